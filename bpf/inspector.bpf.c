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

#include "box.h"
#include "files.h"
#include "calls.h"
#include "survivors.h"

/* changed is a call that changes_nothing couldn't dismiss; c is 0 if its number is of
 * another table. Functions of their own keep the common way short: it saves no
 * registers that only these need. */
static __noinline int changed(struct pt_regs *r, long ret, __u16 c, bool other)
{
	struct box *b = watched();
	if (!b)
		return 0;
	long nr = (long)r->orig_ax;
	count(b);
	if (no_way(ret))
		mark(b, F_EXTERNAL);
	if (!(c & C_NAMED)) {
		if (ret != -ENOSYS)
			mark_call(b, F_UNKNOWN, other ? nr | X32_BIT : nr);
		return 0;
	}
	struct task_struct *t = bpf_get_current_task_btf();
	if (blind & B_CALLS_FILES)
		c &= ~(C_NAMES | C_META | C_FD | C_OPEN);
	if (blind & B_CALLS_OBJECTS)
		c &= ~(C_OBJECT | C_REACH);
	if (c & C_FD)
		on_fd(b, t, r, nr, c, ret);
	if (!(c & ~(C_NAMED | C_FD | C_CONTENT | C_FDARGS)))
		return 0;
	__u64 meta = moves_times(c, nr) ? meta_of(b, t, nr, ret) : F_META;
	if (c & C_SPECIAL)
		special(b, t, r, nr, ret, meta);
	if (c & C_OPEN)
		opened(b, t, r, nr, ret);
	if (ret < 0 && !half_done(ret))
		return 0;
	if (c & C_NAMES)
		mark(b, names_of(b, t, nr, ret));
	if (c & C_META)
		mark(b, meta);
	if (ret < 0)
		return 0;
	if (nr == NR_utimensat || nr == NR_utimes || nr == NR_utime || nr == NR_futimesat)
		mark(b, F_TIMES);
	if (c & C_OBJECT)
		mark_call(b, nr == NR_mount || nr == NR_move_mount ? F_OBJECT | F_MOUNT : F_OBJECT, nr);
	if (c & C_REACH)
		reached(b, r, nr);
	if (c & C_URING)
		mark_call(b, F_URING, nr);
	if (c & C_BOTH)
		mark_call(b, F_UNKNOWN, nr);
	return 0;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(sys_exit, struct pt_regs *r, long ret)
{
	long nr = (long)r->orig_ax;
	if (nr == -1)
		return 0; /* rt_sigreturn, or a call that was skipped */
	bool other = bpf_get_current_task_btf()->thread_info.status & TS_COMPAT || nr & X32_BIT || nr < 0 || nr >= NCALLS;
	__u16 c = other ? 0 : class_of(nr);
	if (changes_nothing(c, nr, r, ret))
		return 0;
	return changed(r, ret, c, other);
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
	count(b);
	note(b, i, 1, true);
	return 0;
}

SEC("tp_btf/iomap_dio_rw_begin")
int BPF_PROG(direct_io, struct kiocb *io, struct iov_iter *iter)
{
	struct box *b = watched();
	if (!b || (blind & B_FOLIO) || !iter->data_source)
		return 0;
	count(b);
	note(b, io->ki_filp->f_inode, 1, true);
	return 0;
}

SEC("tp_btf/btrfs_inode_new")
int BPF_PROG(inode_new, struct inode *i)
{
	struct box *b = watched();
	if (!b || (blind & B_NEW))
		return 0;
	count(b);
	if (root_of(i) != b->root) {
		mark_call(b, F_OUTSIDE, 0);
		return 0;
	}
	/* A file system that doesn't keep fine times doesn't tell which directory it was. */
	mark(b, i->i_sb->s_type->fs_flags & FS_MGTIME ? F_NAMES : F_NAMES | F_WIDE);
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

/* Where the kernel doesn't tell whose time of change moves (before Linux 6.13), the space
 * that btrfs reserves stands in: in the task that asks, before it changes its trees, for a
 * transaction ("transaction": names, xattrs, sizes, extents), and for an inode or a
 * name that it will write later ("delayed_inode", "delayed_item": modes, owners,
 * times; once until the next commit, which every snapshot is). It is asked for six times by
 * each write, so it isn't attached where it isn't needed. */
static __noinline int begun(__u64 ino)
{
	struct pt_regs *r = (void *)bpf_task_pt_regs(bpf_get_current_task_btf());
	long nr = r->orig_ax;
	__u16 c = nr >= 0 ? class_of(nr) : 0;
	struct box *b = watched();
	if (!b || (blind & B_TXN))
		return 0;
	count(b);
	if (c & C_META)
		mark(b, ino >= b->first_new ? F_NEWMETA : moves(b, ino, MOVED_ATTRS) ? F_MOVED : F_META);
	else if (!explained(c))
		mark(b, F_NAMES | F_WIDE | F_META);
	else if (c & (C_NAMES | C_OPEN | C_EVICTS))
		mark(b, F_NAMES);
	return 0;
}

SEC("tp_btf/btrfs_space_reservation")
int BPF_PROG(transaction, const struct btrfs_fs_info *fs, const char *type, __u64 val, __u64 bytes, int reserve)
{
	if (!reserve) /* every other one gives back */
		return 0;
	/* The first eight letters tell the kinds apart. Most say "space_in" or "delalloc". */
	__u64 what = word_at(type);
	if (what != 0x746361736e617274 /* "transact" */ && what != 0x5f646579616c6564 /* "delayed_" */)
		return 0;
	/* "delayed_inode" comes with the inode's number */
	return begun(word_at(type + 6) == 0x0065646f6e695f64 /* "d_inode" */ ? val : 0);
}

/* The time of change of an inode moves, or would if the clock had ticked: whatever
 * happens to an inode but its content comes here, in the task that does it. */
SEC("tp_btf/ctime_ns_xchg")
int BPF_PROG(ctime_moves, struct inode *i)
{
	return time_moves(i);
}

SEC("tp_btf/ctime_xchg_skip")
int BPF_PROG(ctime_stays, struct inode *i)
{
	return time_moves(i);
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(started, struct task_struct *parent, struct task_struct *child)
{
	if (child->pid != child->tgid)
		return 0; /* a thread */
	struct box *b = watched();
	if (b)
		__sync_fetch_and_add(&b->started, 1);
	return 0;
}

SEC("tp_btf/io_uring_submit_req")
int BPF_PROG(uring, struct io_kiocb *req)
{
	struct box *b = watched();
	if (!b)
		return 0;
	mark(b, F_URING);
	switch (req->opcode) { /* to where, isn't looked at */
	case 9: case 16: case 26: case 47: case 48: /* SENDMSG, CONNECT, SEND, SEND_ZC, SENDMSG_ZC */
		mark(b, F_EXTERNAL);
	}
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
	long nr = r->orig_ax;
	/* opening a file below /proc/sys/net asks, too, but changes nothing yet */
	if (nr != NR_sendto && nr != NR_sendmsg && nr != NR_sendmmsg && nr != NR_ioctl && nr != 1 && nr != 20)
		return 0;
	mark_call(b, F_OBJECT, nr);
	return 0;
}
