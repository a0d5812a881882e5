/* Survivors told apart: which of the processes that were saved asleep have run since,
 * and whether anybody could have reached them. inspector/survivors.go has the rule.
 *
 * The programs are attached when the first process on the host is saved asleep. From
 * then on every call on the host pays a load of one array and one table for it.
 */
#pragma once

#include "calls.h"

/* What sleepers hold that a call can reach without opening it. */
enum holding {
	H_STREAM = 1 << 0, /* stream sockets */
	H_DGRAM = 1 << 1,  /* sockets that anybody can send to */
	H_SHARED = 1 << 2, /* shared mappings of files */
};

/* Why a sleeper counts as changed. */
enum stir {
	S_RAN = 1 << 0,    /* a call of it ended, other than to be started again */
	S_SIGNAL = 1 << 1, /* a signal reached it */
};

/* One process that was asleep when its epoch began; user space makes and removes it. */
struct sleeper {
	__u64 why;          /* enum stir */
	__u32 call, signal; /* the last of each */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct sleeper);
} sleepers SEC(".maps"); /* process id on the host */

/* How many sleepers have process ids that end in these 16 bits: a look at this tells
 * almost every other process from them. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} drowsy SEC(".maps");

/* Calls that reach() knows; inspector/calls.go lists them. */
const volatile bool reaching[NCALLS];

/* Objects that a sleeper holds and that others can open: pipes, terminals, memory
 * without a file. By address, which is theirs as long as they are held. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} holdings SEC(".maps"); /* address of an inode -> index in boxes */

enum {
	NR_process_vm_writev = 311,
	NR_process_madvise = 440,
	NR_prctl = 157,
	NR_futex = 202,
	NR_futex_requeue = 456,
	NR_sched_setparam = 142,
	NR_sched_setscheduler = 144,
	NR_sched_setaffinity = 203,
	NR_sched_setattr = 314,
	NR_migrate_pages = 256,
	NR_move_pages = 279,
	NR_open_by_handle_at = 304,
	NR_openat2 = 437,
};
#define PR_SCHED_CORE 62
#define FUTEX_PRIVATE 128
#define EINPROGRESS 115
#define SOCK_STREAM 1
#define SOCK_SEQPACKET 5
#define MSG_FASTOPEN 0x20000000

static __always_inline void touched(struct box *b, __u64 nr)
{
	b->touch_nr = nr;
	mark(b, F_TOUCHED);
}

/* The peer of a connected socket lies in this sandbox, as far as the kernel can tell. */
static __always_inline bool peer_is_local(struct sock *sk)
{
	__u16 family = BPF_CORE_READ(sk, __sk_common.skc_family);
	if (family == AF_INET) {
		__u32 to = BPF_CORE_READ(sk, __sk_common.skc_daddr);
		return to == 0 || (to & 0xff) == 127 || to == BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
	}
	if (family == AF_INET6) {
		__u32 to[4] = {}, at[4] = {};
		BPF_CORE_READ_INTO(&to, sk, __sk_common.skc_v6_daddr.in6_u.u6_addr32);
		BPF_CORE_READ_INTO(&at, sk, __sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32);
		if (to[0] == at[0] && to[1] == at[1] && to[2] == at[2] && to[3] == at[3])
			return true;
		if (to[0] || to[1])
			return false;
		return to[2] == 0 || to[2] != __builtin_bswap32(0xffff) || (to[3] & 0xff) == 127;
	}
	return true;
}

static __always_inline struct sock *sock_of(struct task_struct *t, __u32 fd)
{
	struct file *f = file_of(t, fd);
	struct inode *i = f ? BPF_CORE_READ(f, f_inode) : 0;
	if (!i || (BPF_CORE_READ(i, i_mode) & 0170000) != 0140000)
		return 0;
	struct socket *s = BPF_CORE_READ(f, private_data);
	return BPF_CORE_READ(s, sk);
}

/* A task that isn't a sleeper ended a call: can it have reached one that is? What
 * a call reaches through a descriptor it reaches because it opened, connected or was
 * handed it; the first two are seen here, and a descriptor is handed on by a process
 * that has it. */
static __always_inline void reach(struct box *b, struct task_struct *t, struct pt_regs *r, long nr, long ret)
{
	switch (nr) {
	case NR_open:
	case NR_openat:
	case NR_creat:
	case NR_openat2:
	case NR_open_by_handle_at: {
		if (ret < 0)
			return;
		struct file *f = file_of(t, ret);
		__u64 i = f ? (__u64)BPF_CORE_READ(f, f_inode) : 0;
		if (!i || bpf_map_lookup_elem(&holdings, &i))
			touched(b, nr);
		return;
	}
	case NR_connect: {
		if (!b->holds || (ret < 0 && ret != -EINPROGRESS && !half_done(ret)))
			return;
		struct sock *sk = sock_of(t, r->di);
		if (!sk || shared(t) || peer_is_local(sk))
			touched(b, nr);
		return;
	}
	case NR_sendto:
	case NR_sendmsg:
	case NR_sendmmsg: {
		if (!b->holds || (ret < 0 && !half_done(ret)))
			return;
		struct sock *sk = sock_of(t, r->di);
		if (!sk || shared(t)) {
			touched(b, nr);
			return;
		}
		__u16 type = BPF_CORE_READ(sk, sk_type);
		__u32 flags = nr == NR_sendto ? r->r10 : nr == NR_sendmsg ? r->dx : r->r10;
		if (BPF_CORE_READ(sk, __sk_common.skc_family) == AF_NETLINK)
			return;
		if (type == SOCK_STREAM || type == SOCK_SEQPACKET) {
			if (flags & MSG_FASTOPEN)
				touched(b, nr);
		} else if (b->holds & H_DGRAM) {
			touched(b, nr);
		}
		return;
	}
	case NR_ptrace:
		if (r->di != 0 && ret >= 0) /* PTRACE_TRACEME is about itself */
			touched(b, nr);
		return;
	case NR_process_vm_writev:
	case NR_process_madvise:
		if (ret >= 0 || half_done(ret))
			touched(b, nr);
		return;
	case NR_prlimit64:
		if (ret >= 0 && r->di != 0 && r->dx)
			touched(b, nr);
		return;
	case NR_setpriority: /* PRIO_PROCESS is 0, IOPRIO_WHO_PROCESS 1; 0 is the caller */
		if (ret >= 0 && (r->di != 0 || (__u32)r->si != 0))
			touched(b, nr);
		return;
	case NR_ioprio_set:
		if (ret >= 0 && (r->di != 1 || (__u32)r->si != 0))
			touched(b, nr);
		return;
	case NR_sched_setparam:
	case NR_sched_setscheduler:
	case NR_sched_setaffinity:
	case NR_sched_setattr:
	case NR_migrate_pages:
	case NR_move_pages:
		if (ret >= 0 && (__u32)r->di != 0)
			touched(b, nr);
		return;
	case NR_prctl:
		if (r->di == PR_SCHED_CORE && ret >= 0)
			touched(b, nr);
		return;
	case NR_futex: { /* a wake shows in the woken; a requeue does not */
		__u32 op = r->si & 127;
		if ((op == 3 || op == 4 || op == 12) && !(r->si & FUTEX_PRIVATE) && (b->holds & H_SHARED) && ret > 0)
			touched(b, nr);
		return;
	}
	case NR_futex_requeue:
		if ((b->holds & H_SHARED) && ret > 0)
			touched(b, nr);
		return;
	}
}

SEC("tp_btf/sys_exit")
int BPF_PROG(beside, struct pt_regs *r, long ret)
{
	long nr = (long)r->orig_ax;
	__u32 tgid = bpf_get_current_pid_tgid() >> 32, end = tgid & 0xffff;
	__u64 *near = bpf_map_lookup_elem(&drowsy, &end);
	struct sleeper *s = near && *near ? bpf_map_lookup_elem(&sleepers, &tgid) : 0;
	if (s) {
		/* Not back in user space: the call starts again. Freezing does this to every
		 * sleeper. Some calls say EINTR instead (epoll_wait): that alone is no proof
		 * of anything, and user space asks where the thread is. */
		if (ret == -EINTR || (ret <= -512 && ret >= -516 && ret != -515))
			return 0;
		s->call = nr;
		__sync_fetch_and_or(&s->why, S_RAN);
		return 0;
	}
	if (nr < 0 || nr >= NCALLS || (blind & B_REACH))
		return 0;
	__u64 i = nr;
	asm volatile("" : "+r"(i));
	if (!reaching[i & (NCALLS - 1)])
		return 0;
	struct box *b = watched();
	if (b && b->asleep)
		reach(b, bpf_get_current_task_btf(), r, nr, ret);
	return 0;
}

/* A signal that its target ignores leaves nothing, but for those that stop and go on. */
#define TRACE_SIGNAL_IGNORED 1
SEC("tp_btf/signal_generate")
int BPF_PROG(signalled, int sig, struct kernel_siginfo *info, struct task_struct *task, int group, int result)
{
	__u32 tgid = task->tgid;
	struct sleeper *s = bpf_map_lookup_elem(&sleepers, &tgid);
	if (!s)
		return 0;
	if (result == TRACE_SIGNAL_IGNORED && (sig < 18 || sig > 22))
		return 0;
	s->signal = sig;
	__sync_fetch_and_or(&s->why, S_SIGNAL);
	return 0;
}

/* ---- what user space asks about one process ---- */

struct thread {
	__u32 tid, exiting;
	__u64 start;
	__u64 mm, files, fs;
	__s64 nr, ax;
	__u64 ip, sp;
	__u64 args[6];
};

SEC("iter/task")
int threads_of(struct bpf_iter__task *c)
{
	struct task_struct *t = c->task;
	if (!t)
		return 0;
	struct thread o = {};
	o.tid = t->pid;
	o.exiting = t->exit_state;
	o.start = t->start_boottime;
	o.mm = (__u64)t->mm;
	o.files = (__u64)t->files;
	o.fs = (__u64)t->fs;
	struct pt_regs *r = (void *)bpf_task_pt_regs(t);
	o.nr = BPF_CORE_READ(r, orig_ax);
	o.ax = BPF_CORE_READ(r, ax);
	o.ip = BPF_CORE_READ(r, ip);
	o.sp = BPF_CORE_READ(r, sp);
	o.args[0] = BPF_CORE_READ(r, di);
	o.args[1] = BPF_CORE_READ(r, si);
	o.args[2] = BPF_CORE_READ(r, dx);
	o.args[3] = BPF_CORE_READ(r, r10);
	o.args[4] = BPF_CORE_READ(r, r8);
	o.args[5] = BPF_CORE_READ(r, r9);
	bpf_seq_write(c->meta->seq, &o, sizeof o);
	return 0;
}

/* One descriptor or mapping of a process. */
struct held {
	__u64 inode;     /* its address */
	__u64 root, ino; /* on btrfs, of the copy in the upper layer */
	__u64 magic;
	__u32 fd;        /* ~0: a mapping */
	__u32 rdev;
	__u16 mode, family, type;
	__u8 shared;     /* a mapping that stores show in */
	__u8 internal;   /* on a mount of the kernel's own */
	char name[16];
};

static __always_inline void describe(struct seq_file *seq, struct file *f, __u32 fd, bool mapped_shared)
{
	struct held o = {};
	struct inode *i = BPF_CORE_READ(f, f_inode);
	o.inode = (__u64)i;
	o.fd = fd;
	o.shared = mapped_shared;
	o.mode = BPF_CORE_READ(i, i_mode);
	o.rdev = BPF_CORE_READ(i, i_rdev);
	o.internal = !!(BPF_CORE_READ(i, i_sb, s_flags) & SB_KERNMOUNT);
	o.magic = BPF_CORE_READ(i, i_sb, s_magic);
	if ((o.mode & 0170000) == 0140000) {
		struct socket *s = BPF_CORE_READ(f, private_data);
		o.family = BPF_CORE_READ(s, sk, __sk_common.skc_family);
		o.type = BPF_CORE_READ(s, sk, sk_type);
	}
	struct inode *real = i;
	if (o.magic == OVERLAYFS) {
		struct ovl_inode *oi = (void *)i - bpf_core_field_offset(struct ovl_inode, vfs_inode);
		real = BPF_CORE_READ(oi, __upperdentry, d_inode);
	}
	if (real && BPF_CORE_READ(real, i_sb, s_magic) == BTRFS) {
		o.root = root_of(real);
		o.ino = BPF_CORE_READ(real, i_ino);
	}
	bpf_probe_read_kernel_str(o.name, sizeof o.name, BPF_CORE_READ(f, f_path.dentry, d_name.name));
	bpf_seq_write(seq, &o, sizeof o);
}

SEC("iter/task_file")
int files_of(struct bpf_iter__task_file *c)
{
	struct file *f = c->file;
	if (f)
		describe(c->meta->seq, f, c->fd, false);
	return 0;
}

#define VM_SHARED 8
SEC("iter/task_vma")
int mappings_of(struct bpf_iter__task_vma *c)
{
	struct vm_area_struct *v = c->vma;
	if (!c->task || !v)
		return 0;
	struct file *f = v->vm_file;
	if (f)
		describe(c->meta->seq, f, ~0, v->vm_flags & VM_SHARED);
	return 0;
}

/* The generator finds types only where something has them. */
const struct thread *thread_type __attribute__((unused));
const struct held *held_type __attribute__((unused));
