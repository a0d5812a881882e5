/* Calls that need a look at their arguments. What lies in user memory can change
 * under our eyes, so it never makes a verdict smaller: it only sets the mark
 * "external", or tells netlink's questions from its orders, which have a second
 * witness in the capability they need. */
#pragma once

#include "files.h"

enum nr {
	NR_open = 2,
	NR_ioctl = 16,
	NR_madvise = 28,
	NR_shmctl = 31,
	NR_connect = 42,
	NR_sendto = 44,
	NR_sendmsg = 46,
	NR_setsockopt = 54,
	NR_semctl = 66,
	NR_msgctl = 71,
	NR_creat = 85,
	NR_ptrace = 101,
	NR_utime = 132,
	NR_setpriority = 141,
	NR_mount = 165,
	NR_utimes = 235,
	NR_futimesat = 261,
	NR_ioprio_set = 251,
	NR_openat = 257,
	NR_utimensat = 280,
	NR_prlimit64 = 302,
	NR_sendmmsg = 307,
	NR_move_mount = 429,
};

#define MADV_REMOVE 9
#define AF_UNSPEC 0
#define AF_UNIX 1
#define AF_INET 2
#define AF_INET6 10
#define AF_NETLINK 16

struct address {
	__u16 family;
	__u16 port;
	__u32 v4;
	__u32 v6[4];
};

/* no_way: the kernel has no way to where a call wanted. There is none from a sandbox to anywhere
 * outside it, and unlike the address that is read here the result can't be altered by anybody. */
static __always_inline bool no_way(long ret)
{
	return ret == -101 || ret == -113; /* ENETUNREACH, EHOSTUNREACH */
}

/* leaves says whether a datagram or connection to this address leaves the sandbox. */
static __always_inline bool leaves(const void *user, __u32 len, bool datagram)
{
	struct address a = {};
	if (!user || len < 2)
		return false;
	if (bpf_probe_read_user(&a, len < sizeof a ? 8 : sizeof a, user))
		return false;
	/* that of a datagram may be left out */
	if (a.family == AF_INET || (datagram && a.family == AF_UNSPEC && len >= 16))
		return (a.v4 & 0xff) != 127 && a.v4 != 0;
	if (a.family == AF_INET6) {
		if (a.v6[0] == 0 && a.v6[1] == 0 && a.v6[2] == 0)
			return a.v6[3] != 0 && a.v6[3] != __builtin_bswap32(1);
		if (a.v6[0] == 0 && a.v6[1] == 0 && a.v6[2] == __builtin_bswap32(0xffff))
			return (a.v6[3] & 0xff) != 127;
		return true;
	}
	return a.family != AF_UNSPEC && a.family != AF_UNIX && a.family != AF_NETLINK;
}

struct user_iovec {
	const void *base;
	__u64 len;
};
struct user_msghdr {
	const void *name;
	__u32 namelen, pad;
	const struct user_iovec *iov;
	__u64 iovlen;
};
struct user_mmsghdr { /* of sendmmsg */
	struct user_msghdr h;
	__u64 control[3], len;
};
struct nlmsg {
	__u32 len;
	__u16 type, flags;
};

/* A netlink message that only asks: one RTM_GET* of NETLINK_ROUTE and no message
 * behind it. (Requests come in fours: NEW, DEL, GET, SET, from 16.) */
static __always_inline bool only_asks(struct sock *sk, const void *data, __u64 len)
{
	struct nlmsg m = {};
	if (GET(sk, sk_protocol) != 0)
		return false;
	if (bpf_probe_read_user(&m, sizeof m, data))
		return false;
	if (m.type < 16 || m.type % 4 != 2 || m.len < sizeof m)
		return false;
	__u64 end = ((__u64)m.len + 3) & ~3ULL;
	if (end + sizeof m > len)
		return true;
	/* the kernel stops at a header that is too short to be one */
	if (bpf_probe_read_user(&m, sizeof m, data + end))
		return false;
	return m.len < sizeof m;
}

static __always_inline void sent(struct box *b, struct task_struct *t, struct pt_regs *r, __u64 nr, long ret)
{
	const void *name = 0, *data = 0;
	__u64 len = 0, namelen = 0, parts = 1;
	if (nr == NR_sendto) {
		data = (void *)r->si;
		len = r->dx;
		name = (void *)r->r8;
		namelen = r->r9;
	} else {
		struct user_msghdr m = {};
		struct user_iovec v = {};
		if (bpf_probe_read_user(&m, sizeof m, (void *)r->si))
			return;
		name = m.name;
		namelen = m.namelen;
		parts = m.iovlen;
		if (parts && !bpf_probe_read_user(&v, sizeof v, m.iov)) {
			data = v.base;
			len = v.len;
		}
		if (nr == NR_sendmmsg && r->dx > 1) {
			parts = 2;
			/* the first that wasn't sent, if any was: the call doesn't say why */
			struct user_mmsghdr *next = (struct user_mmsghdr *)r->si + (__u32)ret;
			if (ret > 0 && ret < r->dx &&
			    (bpf_probe_read_user(&m, sizeof m, next) || shared(t) || leaves(m.name, m.namelen, true)))
				mark(b, F_EXTERNAL);
		}
	}
	if (leaves(name, namelen, true))
		mark(b, F_EXTERNAL);
	struct file *f = file_of(t, r->di);
	if (!f)
		return;
	struct inode *i = GET(f, f_inode);
	if (i && (GET(i, i_mode) & 0170000) == 0140000) {
		struct socket *s = GET(f, private_data);
		struct sock *sk = GET(s, sk);
		if (sk && GET(sk, __sk_common.skc_family) == AF_NETLINK &&
		    (parts != 1 || !only_asks(sk, data, len) || (shared(t) && !have_cap)))
			mark_call(b, F_OBJECT, nr);
	}
}

/* Requests of ioctl that change nothing which outlives the turn. */
static __always_inline bool harmless(__u32 cmd)
{
	switch (cmd) {
	case 0x5401: case 0x5405: /* TCGETS, TCGETA */
	case 0x802c542a:          /* TCGETS2 */
	case 0x540b: case 0x5409: case 0x5425: /* TCFLSH, TCSBRK, TCSBRKP */
	case 0x540f: case 0x5410: /* TIOCGPGRP, TIOCSPGRP */
	case 0x540e: case 0x5422: case 0x5429: /* TIOCSCTTY, TIOCNOTTY, TIOCGSID */
	case 0x5411: case 0x541b: case 0x5413: /* TIOCOUTQ, FIONREAD, TIOCGWINSZ */
	case 0x5421: case 0x5450: case 0x5451: case 0x5452: /* FIONBIO, FIONCLEX, FIOCLEX, FIOASYNC */
	case 0x80045430: case 0x40045431: case 0x80045438: case 0x80045439: /* ptys */
	case 0x5441:                                   /* TIOCGPTPEER */
	case 0x2: case 0x1: case 0x5460:               /* FIGETBSZ, FIBMAP, FIOQSIZE */
	case 0x80086601: case 0x80047601: case 0x801c581f: /* GETFLAGS, GETVERSION, FSGETXATTR */
	case 0xc020660b: case 0x81009431: case 0x80111500: /* FIEMAP, GETFSLABEL, GETFSUUID */
		return true;
	}
	/* SIOCGxxx of sockets: interfaces, addresses, routes, time stamps */
	if (cmd >= 0x8910 && cmd <= 0x8970)
		switch (cmd) {
		case 0x8910: case 0x8912: case 0x8913: case 0x8915: case 0x8917: case 0x8919:
		case 0x891b: case 0x891d: case 0x891f: case 0x8921: case 0x8927: case 0x8933:
		case 0x8938: case 0x8942: case 0x8954: case 0x8970:
			return true;
		}
	return cmd >= 0x8903 && cmd <= 0x8907;
}

/* A terminal ends with its last process, so that what is set on one is state only of
   those that survive. */
static __always_inline bool sets_terminal(__u32 cmd)
{
	switch (cmd) {
	case 0x5402: case 0x5403: case 0x5404: /* TCSETS, TCSETSW, TCSETSF */
	case 0x5406: case 0x5407: case 0x5408: /* TCSETA, TCSETAW, TCSETAF */
	case 0x402c542b: case 0x402c542c: case 0x402c542d: /* TCSETS2, TCSETSW2, TCSETSF2 */
	case 0x5414:                           /* TIOCSWINSZ */
		return true;
	}
	return false;
}

static __always_inline void controlled(struct box *b, struct task_struct *t, struct pt_regs *r)
{
	__u32 cmd = r->si;
	if (harmless(cmd))
		return;
	if (sets_terminal(cmd)) {
		mark(b, F_TERMINAL);
		return;
	}
	struct file *f = file_of(t, r->di);
	struct inode *i = f ? GET(f, f_inode) : 0;
	__u64 ino = 0;
	switch (place(b, i, &ino)) {
	case OWN: /* reflinks, attributes, and whatever comes next */
		if (shared(t))
			mark(b, F_META);
		note_inode(b, ino, false);
		break;
	case NOTHING:
		if (shared(t))
			mark(b, F_META);
		break;
	case UNREADABLE:
		lost(b);
		break;
	case OUTSIDE:
		mark_call(b, F_OUTSIDE, NR_ioctl);
		break;
	default:
		mark_call(b, F_OBJECT, NR_ioctl);
	}
}

static __always_inline bool ipc_reads(__u64 nr, __u32 cmd)
{
	cmd &= ~0x100;
	if (cmd == 2 || cmd == 3)
		return true;
	if (nr == NR_shmctl)
		return cmd >= 13 && cmd <= 15;
	if (nr == NR_semctl)
		return (cmd >= 11 && cmd <= 15) || (cmd >= 18 && cmd <= 20);
	return cmd >= 11 && cmd <= 13;
}

static __always_inline void special(struct box *b, struct task_struct *t, struct pt_regs *r, __u64 nr, long ret, __u64 meta)
{
	switch (nr) {
	case NR_connect:
		if (leaves((void *)r->si, r->dx, false))
			mark(b, F_EXTERNAL);
		return;
	case NR_sendto:
	case NR_sendmsg:
	case NR_sendmmsg:
		sent(b, t, r, nr, ret);
		return;
	case NR_madvise: /* punches a hole into a mapped file, maybe before it fails */
		if (r->dx == MADV_REMOVE)
			mark(b, F_META);
		return;
	}
	if (ret < 0) {
		if (nr == NR_ioctl && half_done(ret))
			mark(b, F_META);
		return;
	}
	switch (nr) {
	case NR_ioctl:
		controlled(b, t, r);
		break;
	case NR_utimensat: /* futimens passes no path */
		if (r->si || shared(t))
			mark(b, meta);
		else {
			struct file *f = file_of(t, r->di);
			note(b, f ? GET(f, f_inode) : 0, nr, false);
		}
		break;
	case NR_shmctl:
	case NR_msgctl:
		if (!ipc_reads(nr, r->si))
			mark_call(b, F_OBJECT, nr);
		break;
	case NR_semctl:
		if (!ipc_reads(nr, r->dx))
			mark_call(b, F_OBJECT, nr);
		break;
	case NR_setsockopt: /* netfilter tables; other options die with the socket */
		if ((r->si == 0 && r->dx >= 64 && r->dx < 192) || (r->si == 41 && r->dx == 64))
			mark_call(b, F_OBJECT, nr);
		break;
	case NR_prlimit64:
		if ((__u32)r->di == 1 && r->dx)
			mark_call(b, F_REACH, nr);
		break;
	}
}

/* pid 1 is the one process of the sandbox that isn't watched, and what later
 * turns inherit from. */
static __always_inline void reached(struct box *b, struct pt_regs *r, __u64 nr)
{
	__u32 pid = r->di;
	if (nr == NR_ptrace)
		pid = r->si;
	if (nr == NR_setpriority || nr == NR_ioprio_set) {
		if ((nr == NR_setpriority && r->di != 0) || (nr == NR_ioprio_set && r->di != 1))
			pid = 1; /* by group or user */
		else
			pid = r->si;
	}
	if (pid == 1)
		mark_call(b, F_REACH, nr);
}

/* opened: creation is the file system's to tell. Here: what was truncated, and what
 * lies on no file system of the sandbox's own and can be written from now on. */
static __always_inline void opened(struct box *b, struct task_struct *t, struct pt_regs *r, __u64 nr, long ret)
{
	bool truncates = false, known = true;
	if (nr == NR_open)
		truncates = r->si & O_TRUNC;
	else if (nr == NR_openat)
		truncates = r->dx & O_TRUNC;
	else if (nr == NR_creat)
		truncates = true;
	else
		known = false; /* the flags lie in memory that can change */
	if (ret < 0) {
		if ((truncates || !known) && half_done(ret))
			mark(b, F_META);
		return;
	}
	struct file *f = file_of(t, ret);
	if (!f || (truncates && shared(t))) {
		mark(b, F_META);
		return;
	}
	bool writable = GET(f, f_mode) & FMODE_WRITE;
	if (!writable && !truncates)
		return;
	if (!known)
		mark(b, F_META);
	__u64 ino = 0;
	struct inode *i = GET(f, f_inode);
	switch (place(b, i, &ino)) {
	case OWN:
		if (truncates)
			note_inode(b, ino, false);
		break;
	case OUTSIDE:
		mark_call(b, F_OUTSIDE, nr);
		break;
	case CONTROL:
		mark_call(b, F_PROC, nr);
		break;
	case UNREADABLE:
		lost(b);
		break;
	default:
		break;
	}
}

/* Whose time of change did a call move?
 *
 * A call of C_META, and utimensat, changes one inode and always moves its time. The event
 * marks what that means: nothing older than the epoch changed if it was a new inode, and one
 * of those in moved[] if not. So if the kernel said something in the call, the call has no
 * more to say.
 *
 * Entries come and go with the time of their directory, which is put into moved[]. If the
 * kernel said in a call of C_NAMES which directory it was, those alone need to be listed.
 *
 * Only the kernel's word in this very call makes less of it: without it F_META or F_WIDE
 * stands. A word is kept by thread; one that overwrites another's makes that one be asked for
 * more, and no less. */
static __always_inline bool moves_times(__u16 c, __u64 nr)
{
	return c & C_META || nr == NR_utimensat;
}

static __always_inline __u64 *word_of(struct box *b, struct task_struct *t)
{
	__u64 n = t->pid;
	asm volatile("" : "+r"(n)); /* as in inode_at */
	return &b->told[n & (NTOLD - 1)];
}

static __always_inline __u64 word(struct task_struct *t, __u64 nr)
{
	return (__u64)t->pid << 32 | nr;
}

/* What a change in the file system means that happens in a call of class c:
 * C_FD and C_SPECIAL tell it themselves, C_NAMES and the like are a matter of names. No call that
 * the table takes for harmless, or that failed half way, and no page fault can change
 * anything unseen: it is none of these. */
static __always_inline __u16 explained(__u16 c)
{
	if (blind & B_CALLS_FILES)
		c &= ~(C_FD | C_SPECIAL); /* nothing else will explain these */
	return c & (C_NAMES | C_OPEN | C_EVICTS | C_FD | C_SPECIAL);
}

static __always_inline int time_moves(struct inode *i)
{
	if (i->i_sb->s_magic != BTRFS)
		return 0; /* overlayfs copies the times of its upper layer */
	struct box *b = watched();
	if (!b || (blind & B_TXN))
		return 0;
	struct task_struct *t = bpf_get_current_task_btf();
	long nr = ((struct pt_regs *)bpf_task_pt_regs(t))->orig_ax;
	__u16 c = nr >= 0 ? class_of(nr) : 0, why = explained(c);
	bool dir = (i->i_mode & 0170000) == 0040000 && !(blind & B_DIRS);
	bool meta = nr >= 0 && moves_times(c, nr), attrs = meta || !why;
	count(b);
	if (!meta && why & (C_NAMES | C_OPEN | C_EVICTS))
		mark(b, F_NAMES);
	if (!dir && !attrs)
		return 0;
	bool own = root_of(i) == b->root, new = own && i->i_ino >= b->first_new;
	bool kept = new || (own && moves(b, i->i_ino, attrs ? MOVED_ATTRS : 0));
	if (attrs)
		mark(b, new ? F_NEWMETA : kept ? F_MOVED : F_META);
	if (!why && !meta && (dir || !own))
		mark(b, F_NAMES);
	if ((dir || (!why && !meta)) && !kept)
		mark(b, F_WIDE);
	if (meta || (dir && kept && c & C_NAMES))
		*word_of(b, t) = word(t, nr);
	return 0;
}

/* told says whether the kernel said something in a call that has finished, and forgets it.
 * Each call that moves_times comes here, so nothing of one is taken for the next. */
static __always_inline bool told(struct box *b, struct task_struct *t, __u64 nr)
{
	__u64 *w = word_of(b, t);
	if (*w != word(t, nr))
		return false;
	*w = 0;
	return true;
}

/* meta_of is what a call that moves_times sets when it has finished. */
static __always_inline __u64 meta_of(struct box *b, struct task_struct *t, __u64 nr, long ret)
{
	return told(b, t, nr) && ret >= 0 ? 0 : F_META;
}

/* names_of is what a call of C_NAMES sets. */
static __always_inline __u64 names_of(struct box *b, struct task_struct *t, __u64 nr, long ret)
{
	return told(b, t, nr) && ret >= 0 ? F_NAMES : F_NAMES | F_WIDE;
}

/* changes_nothing says of a finished call, by what nobody can alter any more (its number, its
 * arguments in registers, its result), that it sets no flag, whoever made it. Most calls
 * end here, before anybody asks whose they are. It may only say so where the code
 * behind it would come to the same end. */
static __always_inline bool changes_nothing(__u16 c, long nr, struct pt_regs *r, long ret)
{
	if (c == C_NAMED || c == (C_NAMED | C_EVICTS))
		return true;
	if (!(c & C_NAMED))
		return false;
	/* A file that is opened to be read is neither truncated nor writable. */
	if (nr == NR_openat && !(r->dx & (O_ACCMODE | O_TRUNC)))
		return true;
	if (nr == NR_open && !(r->si & (O_ACCMODE | O_TRUNC)))
		return true;
	if (ret < 0 && !half_done(ret))
		return !(c & (C_SPECIAL | C_META)) || nr == NR_ioctl;
	return ret == 0 && c & C_FD && c & C_CONTENT;
}

static __always_inline void on_fd(struct box *b, struct task_struct *t, struct pt_regs *r, __u64 nr, __u16 c, long ret)
{
	if (c & C_CONTENT ? ret <= 0 && !half_done(ret) : ret < 0 && !half_done(ret))
		return;
	if (!(c & C_CONTENT && have_dio) && shared(t))
		mark(b, F_META);
	struct file *f = file_of(t, fd_arg(r, c));
	if (!f) {
		/* closed by another thread meanwhile: content has a second witness */
		if (!(c & C_CONTENT))
			mark(b, F_META);
		else if (!shared(t))
			lost(b);
		return;
	}
	struct inode *i = GET(f, f_inode);
	/* an order to the network that was written: without the check for its right there is
	 * no other witness */
	if (!have_cap && i && (GET(i, i_mode) & 0170000) == 0140000) {
		struct socket *s = GET(f, private_data);
		struct sock *sk = s ? GET(s, sk) : 0;
		if (!sk || GET(sk, __sk_common.skc_family) == AF_NETLINK)
			mark_call(b, F_OBJECT, nr);
	}
	if (note(b, i, nr, c & C_CONTENT) == OWN && c & C_CONTENT && ret > 0)
		__sync_fetch_and_add(&b->written, ret);
}
