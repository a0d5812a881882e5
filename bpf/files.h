/* From a descriptor to what a change of it means. */
#pragma once

#include "box.h"
#include "peek.h"

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
#define FS_MGTIME 64

static __always_inline __u64 root_of(struct inode *i)
{
	struct btrfs_inode *bi = (void *)i - bpf_core_field_offset(struct btrfs_inode, vfs_inode);
	return GET(GET(bi, root), root_key.objectid);
}

/* place says what a change of this inode means, and for OWN its number. */
static __always_inline enum kind place(struct box *b, struct inode *i, __u64 *ino)
{
	if (!i || (blind & B_FAIL_READS))
		return UNREADABLE;
	__u16 type = GET(i, i_mode) & 0170000;
	if (type == 0010000)
		return NOTHING;
	if (type == 0140000)
		return SOCKET;
	if (type == 0020000) {
		__u32 major = GET(i, i_rdev) >> 20;
		return (major >= 136 && major <= 143) || major == 4 || major == 5 ? TERMINAL : NOTHING;
	}
	struct super_block *sb = GET(i, i_sb);
	__u64 magic = GET(sb, s_magic);
	if (magic == OVERLAYFS) {
		struct ovl_inode *oi = (void *)i - bpf_core_field_offset(struct ovl_inode, vfs_inode);
		struct dentry *upper = GET(oi, __upperdentry);
		i = upper ? GET(upper, d_inode) : 0;
		if (!i)
			return NOTHING; /* still the image's: a change copies it up first */
		sb = GET(i, i_sb);
		magic = GET(sb, s_magic);
	}
	switch (magic) {
	case BTRFS:
		if (root_of(i) != b->root)
			return OUTSIDE;
		*ino = GET(i, i_ino);
		return OWN;
	case PROCFS:
	case SYSFS:
	case CGROUP1:
	case CGROUP2:
		return CONTROL;
	case TMPFS: /* memfd and SysV segments live on the kernel's own mount */
		return GET(sb, s_flags) & SB_KERNMOUNT ? NOTHING : OUTSIDE;
	case HUGETLBFS:
		return GET(sb, s_flags) & SB_KERNMOUNT ? NOTHING : OUTSIDE;
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

static __always_inline enum kind note(struct box *b, struct inode *i, __u32 nr, bool content)
{
	__u64 ino = 0;
	enum kind kind = place(b, i, &ino);
	switch (kind) {
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
	return kind;
}

static __always_inline struct file *file_of(struct task_struct *t, __u32 fd)
{
	struct fdtable *fdt = t->files->fdt;
	if (fd >= fdt->max_fds)
		return 0;
	return (struct file *)word_at(fdt->fd + fd);
}

/* In a table that other tasks share, an fd may mean another file by now. */
static __always_inline bool shared(struct task_struct *t)
{
	return t->files->count.counter > 1;
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
