//go:build ignore

// SPDX-License-Identifier: GPL-2.0
/* The functions of the programs, one at a time, so that tests can call them through
 * BPF_PROG_RUN, which the kernel doesn't offer for the programs themselves. The
 * arguments are the context's.
 */
#include "../kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

char LICENSE[] SEC("license") = "GPL";

#include "../box.h"
#include "../files.h"
#include "../calls.h"

struct args {
	__u64 a[4];
};

static __always_inline struct box *first(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&boxes, &zero);
}

SEC("raw_tp")
int run_harmless(struct args *c) { return harmless(c->a[0]); }

SEC("raw_tp")
int run_ipc_reads(struct args *c) { return ipc_reads(c->a[0], c->a[1]); }

SEC("raw_tp")
int run_half_done(struct args *c) { return half_done(c->a[0]); }

SEC("raw_tp")
int run_leaves(struct args *c) { return leaves((void *)c->a[0], c->a[1], c->a[2]); }

/* The kind of the caller's descriptor; 100: there is none. */
SEC("raw_tp")
int run_place(struct args *c)
{
	struct box *b = first();
	struct file *f = file_of(bpf_get_current_task_btf(), c->a[0]);
	__u64 ino = 0;
	if (!b || !f)
		return 100;
	return place(b, GET(f, f_inode), &ino);
}

SEC("raw_tp")
int run_shared(struct args *c) { return shared(bpf_get_current_task_btf()); }

SEC("raw_tp")
int run_note_inode(struct args *c)
{
	struct box *b = first();
	if (b)
		note_inode(b, c->a[0], c->a[1]);
	return 0;
}

SEC("raw_tp")
int run_class_of(struct args *c) { return class_of(c->a[0]); }

SEC("raw_tp")
int run_changes_nothing(struct args *c)
{
	struct pt_regs *r = (void *)bpf_task_pt_regs(bpf_get_current_task_btf());
	return changes_nothing(c->a[0], c->a[1], r, c->a[2]);
}
