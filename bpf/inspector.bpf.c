//go:build ignore

// SPDX-License-Identifier: GPL-2.0
/* The inspector's eyes in the kernel. Per watched sandbox they keep one struct
 * box: flags that say what kind of change was seen, and the numbers of the first
 * changed inodes, for reports. A verdict needs the flags alone, and no map can
 * overflow: the flags are where every event ends.
 *
 * Two independent witnesses stand behind each file change: the file system's own
 * tracepoints (below the system calls, so whatever dirties a page, makes an inode
 * or starts a transaction is seen whoever asked for it), and the table of calls.
 *
 * Everything runs synchronously in the task that makes the change.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

char LICENSE[] SEC("license") = "GPL";

#define NCALLS 512
#define NINODES 128

/* Flags; inspector/flags.go names them for people. */
enum flag {
	F_NAMES = 1 << 0,    /* names may have come or gone: compare listings */
	F_META = 1 << 1,     /* some inode may have changed, which isn't known: compare all */
	F_OLD = 1 << 2,      /* an inode older than the epoch changed: in inodes[] */
	F_OUTSIDE = 1 << 3,  /* a file outside the sandbox's subvolume changed */
	F_UNKNOWN = 1 << 4,  /* a call or file that isn't understood */
	F_LOST = 1 << 5,     /* something couldn't be kept or read */
	F_OBJECT = 1 << 6,   /* a kernel object without a process */
	F_PROC = 1 << 7,     /* a write to /proc, /sys or a control group */
	F_REACH = 1 << 8,    /* another process was altered */
	F_EXTERNAL = 1 << 9, /* something tried to leave the sandbox */
	F_URING = 1 << 10,   /* io_uring or kernel AIO */
	F_NEWMETA = 1 << 11, /* an inode made in this epoch changed by more than content */
};

/* Classes of calls; inspector/calls.go assigns them. */
enum class {
	C_NAMES = 1 << 0,
	C_META = 1 << 1,
	C_FD = 1 << 2,      /* acts on the file of an fd */
	C_CONTENT = 1 << 3, /* with C_FD: only content, only if it returns > 0 */
	C_OPEN = 1 << 4,
	C_OBJECT = 1 << 5,
	C_REACH = 1 << 6,
	C_SPECIAL = 1 << 7,
	C_URING = 1 << 8,
	C_BOTH = 1 << 9,
	C_NAMED = 1 << 10, /* the call is in the table */
	C_EVICTS = 1 << 11, /* may drop the last reference to a deleted file */
	C_FDARG = 12,      /* bits 12 and 13: which argument is the fd */
};

/* One watched sandbox; the same layout in bpf/bpf.go. User space maps it and
 * uses atomic operations only, so no event is lost between reading and clearing. */
struct box {
	__u64 root;      /* btrfs root id of its subvolume */
	__u64 epoch;     /* flags since the epoch began */
	__u64 turn;      /* flags since the turn began */
	__u64 first_new; /* lowest inode made in this epoch; ~0: none. btrfs counts up
	                    and never back, so a lower number is older than the epoch */
	__u64 lost;
	__u64 events;    /* finished calls and file system events that were classed */
	__u32 ninodes;   /* may exceed NINODES: then the rest isn't named */
	__u32 turn_from; /* inodes[] of this turn begin here */
	__u64 object_nr; /* the last call that made F_OBJECT, F_REACH or F_UNKNOWN */
	__u64 inodes[NINODES];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, __u32);
} slots SEC(".maps"); /* cgroup id of run -> index in boxes */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 8192);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct box);
} boxes SEC(".maps");

const volatile __u16 calls[NCALLS];
/* Events that a saboteur build doesn't see: bit n = the program or branch with
 * that number. 0 in every real build. */
const volatile __u32 blind;
/* Optional tracepoints that this kernel has. */
const volatile bool have_dio;
const volatile bool have_cap;
volatile __u32 level; /* depth of the groups that are watched */

enum blindness {
	B_FOLIO = 1 << 0,
	B_NEW = 1 << 1,
	B_TXN = 1 << 2,
	B_CALLS_FILES = 1 << 3,
	B_CALLS_OBJECTS = 1 << 4,
	B_FAIL_READS = 1 << 5, /* every resolution fails: must surface as lost */
};

#define TS_COMPAT 2
#define X32_BIT 0x40000000
#define FMODE_WRITE 2
#define O_TRUNC 01000

#define ENOENT 2
#define EINTR 4
#define EIO 5
#define ENOMEM 12
#define EFBIG 27
#define ENOSPC 28
#define ENOSYS 38
#define EDQUOT 122

static __always_inline struct box *watched(void)
{
	__u64 id = bpf_get_current_ancestor_cgroup_id(level);
	__u32 *slot = bpf_map_lookup_elem(&slots, &id);
	if (!slot)
		return 0;
	return bpf_map_lookup_elem(&boxes, slot);
}

static __always_inline void mark(struct box *b, __u64 flags)
{
	if ((b->epoch & flags) != flags)
		__sync_fetch_and_or(&b->epoch, flags);
	if ((b->turn & flags) != flags)
		__sync_fetch_and_or(&b->turn, flags);
}

static __always_inline void lost(struct box *b)
{
	__sync_fetch_and_add(&b->lost, 1);
	mark(b, F_LOST);
}

static __always_inline void mark_call(struct box *b, __u64 flags, __u32 nr)
{
	b->object_nr = nr;
	mark(b, flags);
}

/* ---- files ---- */

enum kind {
	NOTHING,  /* pipes, sockets, devices, anonymous inodes: nothing to save */
	OWN,      /* an inode of the sandbox's subvolume */
	OUTSIDE,  /* a file on another file system that can outlive the turn */
	CONTROL,  /* /proc, /sys, control groups */
	TERMINAL,
	SOCKET,
	UNREADABLE,
};

#define OVERLAYFS 0x794c7630
#define BTRFS 0x9123683E
#define PROCFS 0x9fa0
#define SYSFS 0x62656572
#define CGROUP2 0x63677270
#define CGROUP1 0x27e0eb
#define TMPFS 0x01021994
#define ANON_INODE 0x09041934
#define NSFS 0x6e736673
#define PIPEFS 0x50495045
#define SOCKFS 0x534F434B
#define PIDFS 0x50494446
#define SECRETMEM 0x5345434d
#define HUGETLBFS 0x958458f6
#define MQUEUE 0x19800202
#define DEVPTS 0x1cd1
#define BINDERFS 0x6c6f6f70
#define SB_KERNMOUNT (1UL << 22)

static __always_inline __u64 root_of(struct inode *i)
{
	struct btrfs_inode *bi = (void *)i - bpf_core_field_offset(struct btrfs_inode, vfs_inode);
	return BPF_CORE_READ(bi, root, root_key.objectid);
}

/* place says what a change of this inode means, and for OWN its number. */
static __always_inline enum kind place(struct box *b, struct inode *i, __u64 *ino)
{
	if (!i || (blind & B_FAIL_READS))
		return UNREADABLE;
	__u16 type = BPF_CORE_READ(i, i_mode) & 0170000;
	if (type == 0010000)
		return NOTHING;
	if (type == 0140000)
		return SOCKET;
	if (type == 0020000) {
		__u32 major = BPF_CORE_READ(i, i_rdev) >> 20;
		return (major >= 136 && major <= 143) || major == 4 || major == 5 ? TERMINAL : NOTHING;
	}
	struct super_block *sb = BPF_CORE_READ(i, i_sb);
	__u64 magic = BPF_CORE_READ(sb, s_magic);
	if (magic == OVERLAYFS) {
		struct ovl_inode *oi = (void *)i - bpf_core_field_offset(struct ovl_inode, vfs_inode);
		i = BPF_CORE_READ(oi, __upperdentry, d_inode);
		if (!i)
			return NOTHING; /* still the image's: a change copies it up first */
		magic = BPF_CORE_READ(i, i_sb, s_magic);
	}
	switch (magic) {
	case BTRFS:
		if (root_of(i) != b->root)
			return OUTSIDE;
		*ino = BPF_CORE_READ(i, i_ino);
		return OWN;
	case PROCFS:
	case SYSFS:
	case CGROUP1:
	case CGROUP2:
		return CONTROL;
	case TMPFS: /* memfd and SysV segments live on the kernel's own mount */
		return BPF_CORE_READ(sb, s_flags) & SB_KERNMOUNT ? NOTHING : OUTSIDE;
	case HUGETLBFS:
		return BPF_CORE_READ(sb, s_flags) & SB_KERNMOUNT ? NOTHING : OUTSIDE;
	case ANON_INODE:
	case NSFS:
	case PIPEFS:
	case SOCKFS:
	case PIDFS:
	case SECRETMEM:
		return NOTHING;
	}
	return OUTSIDE;
}

/* inode_at hides the index from the optimiser, which would drop the mask that the
 * verifier wants to see. */
static __always_inline __u64 *inode_at(struct box *b, __u32 n)
{
	__u64 i = n;
	asm volatile("" : "+r"(i));
	return &b->inodes[i & (NINODES - 1)];
}

/* note_inode records that an inode of the subvolume changed. One that was made in
 * this epoch needs no note: whether it is still there is what counts. */
static __always_inline void note_inode(struct box *b, __u64 ino, bool content)
{
	if (ino >= b->first_new) {
		if (!content)
			mark(b, F_NEWMETA);
		return;
	}
	mark(b, F_OLD);
	__u32 n = b->ninodes;
	if (n > b->turn_from && n <= NINODES && *inode_at(b, n - 1) == ino)
		return;
	n = __sync_fetch_and_add(&b->ninodes, 1);
	if (n < NINODES)
		*inode_at(b, n) = ino;
}

static __always_inline void note(struct box *b, struct inode *i, __u32 nr, bool content)
{
	__u64 ino = 0;
	switch (place(b, i, &ino)) {
	case OWN:
		note_inode(b, ino, content);
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

static __always_inline struct file *file_of(struct task_struct *t, __u32 fd)
{
	struct fdtable *fdt = BPF_CORE_READ(t, files, fdt);
	if (fd >= BPF_CORE_READ(fdt, max_fds))
		return 0;
	struct file **table = BPF_CORE_READ(fdt, fd), *f = 0;
	if (bpf_probe_read_kernel(&f, sizeof f, table + fd))
		return 0;
	return f;
}

/* In a table that other tasks share, an fd may mean another file by now. */
static __always_inline bool shared(struct task_struct *t)
{
	return BPF_CORE_READ(t, files, count.counter) > 1;
}

static __always_inline __u16 class_of(__u64 nr)
{
	if (nr >= NCALLS)
		return 0;
	asm volatile("" : "+r"(nr));
	return calls[nr & (NCALLS - 1)];
}

static __always_inline unsigned long fd_arg(struct pt_regs *r, __u16 c)
{
	switch (c >> C_FDARG & 3) {
	case 0:
		return r->di;
	case 1:
		return r->si;
	}
	return r->dx;
}

/* A call of which part is done may still report these. */
static __always_inline bool half_done(long ret)
{
	return ret == -ENOSPC || ret == -EDQUOT || ret == -EIO || ret == -EINTR ||
	       ret == -ENOMEM || ret == -EFBIG || ret <= -512;
}

/* ---- calls that need a look at their arguments ---- */

enum nr {
	NR_open = 2,
	NR_ioctl = 16,
	NR_shmctl = 31,
	NR_connect = 42,
	NR_sendto = 44,
	NR_sendmsg = 46,
	NR_setsockopt = 54,
	NR_semctl = 66,
	NR_msgctl = 71,
	NR_creat = 85,
	NR_ptrace = 101,
	NR_setpriority = 141,
	NR_mq_open = 240,
	NR_ioprio_set = 251,
	NR_openat = 257,
	NR_utimensat = 280,
	NR_prlimit64 = 302,
	NR_sendmmsg = 307,
};

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

/* leaves says whether a datagram or connection to this address leaves the sandbox. */
static __always_inline bool leaves(const void *user, __u32 len)
{
	struct address a = {};
	if (!user || len < 2)
		return false;
	if (bpf_probe_read_user(&a, len < sizeof a ? 8 : sizeof a, user))
		return false;
	if (a.family == AF_INET)
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
struct nlmsg {
	__u32 len;
	__u16 type, flags;
};

/* A netlink message that only asks: one RTM_GET* of NETLINK_ROUTE and nothing
 * behind it. (Requests come in fours: NEW, DEL, GET, SET, from 16.) */
static __always_inline bool only_asks(struct sock *sk, const void *data, __u64 len)
{
	struct nlmsg m = {};
	if (BPF_CORE_READ(sk, sk_protocol) != 0)
		return false;
	if (bpf_probe_read_user(&m, sizeof m, data))
		return false;
	return m.type >= 16 && m.type % 4 == 2 && m.len + 4 > len;
}

static __always_inline void sent(struct box *b, struct task_struct *t, struct pt_regs *r, __u64 nr)
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
		if (nr == NR_sendmmsg && r->dx > 1)
			parts = 2;
	}
	if (leaves(name, namelen))
		mark(b, F_EXTERNAL);
	struct file *f = file_of(t, r->di);
	if (!f)
		return;
	struct inode *i = BPF_CORE_READ(f, f_inode);
	if (i && (BPF_CORE_READ(i, i_mode) & 0170000) == 0140000) {
		struct socket *s = BPF_CORE_READ(f, private_data);
		struct sock *sk = BPF_CORE_READ(s, sk);
		if (sk && BPF_CORE_READ(sk, __sk_common.skc_family) == AF_NETLINK &&
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

static __always_inline void controlled(struct box *b, struct task_struct *t, struct pt_regs *r)
{
	__u32 cmd = r->si;
	if (harmless(cmd))
		return;
	struct file *f = file_of(t, r->di);
	struct inode *i = f ? BPF_CORE_READ(f, f_inode) : 0;
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

static __always_inline void special(struct box *b, struct task_struct *t, struct pt_regs *r, __u64 nr, long ret)
{
	switch (nr) {
	case NR_connect:
		if (leaves((void *)r->si, r->dx))
			mark(b, F_EXTERNAL);
		return;
	case NR_sendto:
	case NR_sendmsg:
	case NR_sendmmsg:
		sent(b, t, r, nr);
		return;
	}
	if (ret < 0)
		return;
	switch (nr) {
	case NR_ioctl:
		controlled(b, t, r);
		break;
	case NR_utimensat: /* futimens passes no path */
		if (r->si || shared(t))
			mark(b, F_META);
		else {
			struct file *f = file_of(t, r->di);
			note(b, f ? BPF_CORE_READ(f, f_inode) : 0, nr, false);
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
	bool writable = BPF_CORE_READ(f, f_mode) & FMODE_WRITE;
	if (!writable && !truncates)
		return;
	if (!known)
		mark(b, F_META);
	__u64 ino = 0;
	struct inode *i = BPF_CORE_READ(f, f_inode);
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

static __always_inline void on_fd(struct box *b, struct task_struct *t, struct pt_regs *r, __u64 nr, __u16 c, long ret)
{
	if (c & C_CONTENT ? ret <= 0 && !half_done(ret) : ret < 0 && !half_done(ret))
		return;
	if (shared(t) && !(c & C_CONTENT && have_dio))
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
	note(b, BPF_CORE_READ(f, f_inode), nr, c & C_CONTENT);
}

SEC("tp_btf/sys_exit")
int BPF_PROG(sys_exit, struct pt_regs *r, long ret)
{
	struct box *b = watched();
	if (!b)
		return 0;
	struct task_struct *t = bpf_get_current_task_btf();
	long nr = (long)r->orig_ax;
	if (nr == -1)
		return 0; /* rt_sigreturn, or a call that was skipped */
	if (t->thread_info.status & TS_COMPAT || nr & X32_BIT || nr < 0 || nr >= NCALLS) {
		if (ret != -ENOSYS)
			mark_call(b, F_UNKNOWN, nr);
		return 0;
	}
	__u16 c = class_of(nr);
	if (c == C_NAMED || c == (C_NAMED | C_EVICTS))
		return 0;
	__sync_fetch_and_add(&b->events, 1);
	if (!(c & C_NAMED)) {
		if (ret != -ENOSYS)
			mark_call(b, F_UNKNOWN, nr);
		return 0;
	}
	if (blind & B_CALLS_FILES)
		c &= ~(C_NAMES | C_META | C_FD | C_OPEN);
	if (blind & B_CALLS_OBJECTS)
		c &= ~(C_OBJECT | C_REACH);
	if (c & C_SPECIAL)
		special(b, t, r, nr, ret);
	if (c & C_OPEN)
		opened(b, t, r, nr, ret);
	if (c & C_FD)
		on_fd(b, t, r, nr, c, ret);
	if (ret < 0 && !half_done(ret))
		return 0;
	if (c & C_NAMES)
		mark(b, F_NAMES);
	if (c & C_META)
		mark(b, F_META);
	if (ret < 0)
		return 0;
	if (c & C_OBJECT)
		mark_call(b, F_OBJECT, nr);
	if (c & C_REACH)
		reached(b, r, nr);
	if (c & C_URING)
		mark_call(b, F_URING, nr);
	if (c & C_BOTH)
		mark_call(b, F_UNKNOWN, nr);
	return 0;
}

/* ---- the file system's own word ---- */

SEC("tp_btf/writeback_dirty_folio")
int BPF_PROG(dirty_folio, struct folio *folio, struct address_space *mapping)
{
	struct box *b = watched();
	if (!b || !mapping || (blind & B_FOLIO))
		return 0;
	struct inode *i = mapping->host;
	if (!i) {
		lost(b);
		return 0;
	}
	/* The tree blocks of btrfs are folios of its inode 1: bookkeeping. */
	if (i->i_ino == 1 && i->i_sb->s_magic == BTRFS)
		return 0;
	if ((i->i_mode & 0170000) == 0060000)
		return 0; /* a block device: the file system below another file */
	__sync_fetch_and_add(&b->events, 1);
	note(b, i, 1, true);
	return 0;
}

SEC("tp_btf/iomap_dio_rw_begin")
int BPF_PROG(direct_io, struct kiocb *io, struct iov_iter *iter)
{
	struct box *b = watched();
	if (!b || (blind & B_FOLIO) || !iter->data_source)
		return 0;
	__sync_fetch_and_add(&b->events, 1);
	note(b, BPF_CORE_READ(io, ki_filp, f_inode), 1, true);
	return 0;
}

SEC("tp_btf/btrfs_inode_new")
int BPF_PROG(inode_new, struct inode *i)
{
	struct box *b = watched();
	if (!b || (blind & B_NEW))
		return 0;
	__sync_fetch_and_add(&b->events, 1);
	if (root_of(i) != b->root) {
		mark_call(b, F_OUTSIDE, 0);
		return 0;
	}
	mark(b, F_NAMES);
	__u64 ino = i->i_ino, seen = b->first_new;
	for (int tries = 0; tries < 16; tries++) {
		if (ino >= seen)
			return 0;
		__u64 was = __sync_val_compare_and_swap(&b->first_new, seen, ino);
		if (was == seen)
			return 0;
		seen = was;
	}
	lost(b);
	return 0;
}

/* btrfs reserves space, in the task that asks, before it changes its trees: for a
 * transaction ("transaction": names, xattrs, sizes, extents), and for an inode or a
 * name that it will write later ("delayed_inode", "delayed_item": modes, owners,
 * times; once until the next commit, which every snapshot is). So a call that the
 * table takes for harmless, or that failed half way, can't change them unseen. */
SEC("tp_btf/btrfs_space_reservation")
int BPF_PROG(transaction, const struct btrfs_fs_info *fs, const char *type, __u64 val, __u64 bytes, int reserve)
{
	struct box *b = watched();
	if (!b || !reserve || (blind & B_TXN))
		return 0;
	__u64 what = 0; /* the first eight letters tell the kinds apart */
	if (bpf_probe_read_kernel(&what, sizeof what, type)) {
		lost(b);
		return 0;
	}
	if (what != 0x746361736e617274 /* "transact" */ && what != 0x5f646579616c6564 /* "delayed_" */)
		return 0;
	__sync_fetch_and_add(&b->events, 1);
	struct task_struct *t = bpf_get_current_task_btf();
	struct pt_regs *r = (void *)bpf_task_pt_regs(t);
	long nr = BPF_CORE_READ(r, orig_ax);
	__u16 c = nr >= 0 ? class_of(nr) : 0;
	if (blind & B_CALLS_FILES)
		c &= ~(C_FD | C_SPECIAL); /* nothing else will explain these */
	if (c & C_META)
		mark(b, F_META);
	else if (c & (C_NAMES | C_OPEN | C_EVICTS))
		mark(b, F_NAMES);
	else if (!(c & (C_FD | C_SPECIAL)))
		mark(b, F_NAMES | F_META);
	return 0;
}

SEC("tp_btf/io_uring_submit_req")
int BPF_PROG(uring, struct io_kiocb *req)
{
	struct box *b = watched();
	if (b)
		mark(b, F_URING);
	return 0;
}

/* The network can't be configured without this check, whatever the message was
 * when it was read, so a thread that swaps the buffer gains nothing. */
#define CAP_NET_ADMIN 12
SEC("tp_btf/cap_capable")
int BPF_PROG(capable, const struct cred *cred, struct user_namespace *target,
	     const struct user_namespace *ns, int cap, int ret)
{
	if (cap != CAP_NET_ADMIN || ret)
		return 0;
	struct box *b = watched();
	if (!b || (blind & B_CALLS_OBJECTS))
		return 0;
	struct pt_regs *r = (void *)bpf_task_pt_regs(bpf_get_current_task_btf());
	long nr = BPF_CORE_READ(r, orig_ax);
	/* opening a file below /proc/sys/net asks, too, but changes nothing yet */
	if (nr != NR_sendto && nr != NR_sendmsg && nr != NR_sendmmsg && nr != NR_ioctl && nr != 1 && nr != 20)
		return 0;
	mark_call(b, F_OBJECT, nr);
	return 0;
}
