/* What the programs know of the running kernel: only the fields named here.
 * Offsets are relocated at load from the kernel's own BTF, so order and padding
 * mean nothing; a field that a kernel doesn't have makes loading fail, loudly.
 */
#pragma once

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed char __s8;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u64 __be64;
typedef __u32 __wsum;
typedef _Bool bool;
#define true 1
#define false 0

enum { BPF_ANY = 0 };
enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
};
enum {
	BPF_F_NO_PREALLOC = 1 << 0,
	BPF_F_MMAPABLE = 1 << 10,
};

#define __kernel __attribute__((preserve_access_index))

struct pt_regs {
	unsigned long r10, r9, r8, ax, dx, si, di, orig_ax, ip, sp;
} __kernel;

typedef struct {
	int counter;
} __kernel atomic_t;

struct file;
struct dentry;
struct sock;

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} __kernel;

struct files_struct {
	atomic_t count;
	struct fdtable *fdt;
} __kernel;

struct thread_info {
	__u32 status;
} __kernel;

struct mm_struct;
struct fs_struct;

struct task_struct {
	struct thread_info thread_info;
	int pid, tgid, exit_state;
	__u64 start_boottime;
	struct mm_struct *mm;
	struct fs_struct *fs;
	struct files_struct *files;
} __kernel;

struct file_system_type {
	int fs_flags;
} __kernel;

struct super_block {
	unsigned long s_magic;
	unsigned long s_flags;
	struct file_system_type *s_type;
} __kernel;

struct inode {
	__u16 i_mode;
	unsigned long i_ino;
	struct super_block *i_sb;
	__u32 i_rdev;
} __kernel;

struct address_space {
	struct inode *host;
} __kernel;

struct qstr {
	const unsigned char *name;
} __kernel;

struct dentry {
	struct qstr d_name;
	struct inode *d_inode;
} __kernel;

struct path {
	struct dentry *dentry;
} __kernel;

struct file {
	unsigned int f_mode;
	struct inode *f_inode;
	void *private_data;
	struct path f_path;
} __kernel;

struct vm_area_struct {
	unsigned long vm_flags;
	struct file *vm_file;
} __kernel;

struct kiocb {
	struct file *ki_filp;
} __kernel;

struct iov_iter {
	bool data_source;
} __kernel;

struct socket {
	struct sock *sk;
} __kernel;

struct in6_addr {
	union {
		__be32 u6_addr32[4];
	} in6_u;
} __kernel;

struct sock_common {
	unsigned short skc_family;
	__be32 skc_daddr, skc_rcv_saddr;
	struct in6_addr skc_v6_daddr, skc_v6_rcv_saddr;
} __kernel;

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
	__u16 sk_type;
} __kernel;

/* An overlay inode knows its copy in the upper layer, NULL until copied up. */
struct ovl_inode {
	struct inode vfs_inode;
	struct dentry *__upperdentry;
} __kernel;

struct btrfs_key {
	__u64 objectid;
} __kernel;

struct btrfs_root {
	struct btrfs_key root_key;
} __kernel;

struct btrfs_inode {
	struct btrfs_root *root;
	struct inode vfs_inode;
} __kernel;

/* Two words of any kernel, for peek(). */
struct timespec64 {
	__s64 tv_sec;
} __kernel;

struct folio;
struct btrfs_fs_info;
struct io_kiocb {
	__u8 opcode;
} __kernel;
struct cred;
struct user_namespace;
struct kernel_siginfo;
struct seq_file;

/* What the iterators are called with. */
struct bpf_iter_meta {
	struct seq_file *seq;
} __kernel;

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
} __kernel;

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
} __kernel;

struct bpf_iter__task_vma {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	struct vm_area_struct *vma;
} __kernel;
