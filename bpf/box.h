/* What is kept of a watched sandbox, and how a task finds it. */
#pragma once

#define NCALLS 512
#define NINODES 128
#define NMOVED 128
#define NTOLD 8

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
	F_MOUNT = 1 << 12,   /* with F_OBJECT: a file system was mounted */
	F_TIMES = 1 << 13,   /* with F_META, F_OLD or F_NEWMETA: times were set by a call */
	F_TERMINAL = 1 << 15, /* the settings or the size of a terminal were set */
	F_TOUCHED = 1 << 14, /* something that a survivor holds, or is, was reached */
	F_MOVED = 1 << 16,   /* older inodes may have changed by more than content: those in moved[] */
	F_WIDE = 1 << 17,    /* with F_NAMES: maybe in directories that moved[] hasn't got */
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
	C_FDARGS = 3 << C_FDARG,
};

/* One watched sandbox; the same layout in bpf/bpf.go. User space maps it and
 * uses atomic operations only, so no event is lost between reading and clearing.
 * What an event of a known kind needs comes first, within 64 bytes. */
struct box {
	__u64 cgroup;    /* id of its group; 0: not in use */
	__u64 root;      /* btrfs root id of its subvolume */
	__u64 epoch;     /* flags since the epoch began */
	__u64 turn;      /* flags since the turn began */
	__u64 first_new; /* lowest inode made in this epoch; ~0: none. btrfs counts up
	                    and never back, so a lower number is older than the epoch */
	__u32 ninodes;   /* may exceed NINODES: then the rest isn't named */
	__u32 turn_from; /* inodes[] of this turn begin here */
	__u64 events;    /* finished calls and file system events that were classed */
	__u64 lost;
	__u64 object_nr; /* the last call that made F_OBJECT, F_REACH or F_UNKNOWN */
	__u32 asleep;    /* survivors that were asleep when the epoch began: survivors.h */
	__u32 holds;     /* enum holding: what they hold */
	__u64 touch_nr;  /* the last call that made F_TOUCHED */
	__u64 inodes[NINODES];
	__u32 moved[NMOVED]; /* a set, see moves() */
	__u64 told[NTOLD];   /* see time_moves() */
	__u64 written;       /* bytes that calls wrote to files; for reports */
	__u64 started;       /* processes that processes of the sandbox started; the same */
};

/* A box stands where its control group's id says, modulo NBOXES, if that place was
 * free; slots knows the others. */
#define NBOXES 8192

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, NBOXES);
	__type(key, __u64);
	__type(value, __u32);
} slots SEC(".maps"); /* cgroup id of run -> index in boxes */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NBOXES);
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
	B_REACH = 1 << 6, /* calls that reach a survivor */
	B_DIRS = 1 << 7, /* directories whose times move */
};

#define TS_COMPAT 2
#define X32_BIT 0x40000000
#define FMODE_WRITE 2
#define O_ACCMODE 03
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
	if (!id)
		return 0; /* the task's group lies above that level */
	__u32 place = id & (NBOXES - 1);
	struct box *b = bpf_map_lookup_elem(&boxes, &place);
	if (b && b->cgroup == id)
		return b;
	__u32 *slot = bpf_map_lookup_elem(&slots, &id);
	if (!slot)
		return 0;
	return bpf_map_lookup_elem(&boxes, slot);
}

/* A figure for benchmarks: two processors that count at once may count one. */
static __always_inline void count(struct box *b)
{
	b->events++;
}

static __always_inline void mark(struct box *b, __u64 flags)
{
	if ((b->epoch & flags) != flags)
		__sync_fetch_and_or(&b->epoch, flags);
	if ((b->turn & flags) != flags)
		__sync_fetch_and_or(&b->turn, flags);
}

/* moves puts an inode of the subvolume that is older than the epoch into moved[]: a
 * directory whose entries may have changed, or an inode that a call by path changed
 * (attrs: MOVED_ATTRS). It stays there until the next epoch. False: there is no room. */
#define MOVED_ATTRS (1U << 31)

static __noinline bool moves(struct box *b, __u64 ino, __u32 attrs)
{
	if (!ino || ino >= MOVED_ATTRS)
		return false;
#pragma unroll
	for (int i = 0; i < 8; i++) {
		__u64 n = ino + i * 37;
		asm volatile("" : "+r"(n)); /* as in inode_at */
		__u32 *m = &b->moved[n & (NMOVED - 1)];
		__u32 was = *m;
		if (!was)
			was = __sync_val_compare_and_swap(m, 0, ino | attrs);
		if (!was)
			return true;
		if ((was & ~MOVED_ATTRS) != ino)
			continue;
		if (attrs & ~was)
			__sync_fetch_and_or(m, attrs);
		return true;
	}
	return false;
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
