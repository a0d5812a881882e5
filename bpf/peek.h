/* Reading kernel memory through pointers that the verifier doesn't know the type of.
 *
 * A helper call for each field was most of what a watched write cost. From Linux 6.2
 * on, bpf_rdonly_cast gives a pointer a type, which costs nothing, and the field is
 * read by one load. Like the helper, a load that faults gives 0.
 *
 * The cast takes types of vmlinux alone, and btrfs or overlayfs may be modules; so the
 * word that holds the field is read as one of a type that is always there. A smaller
 * field comes out of the aligned word around it, which never reaches into a page
 * that the field isn't in; one of eight bytes is read where it lies, since btrfs has some
 * that aren't aligned.
 */
#pragma once

extern void *bpf_rdonly_cast(const void *p, __u32 type) __attribute__((section(".ksyms"), weak));

static __always_inline __u64 word_at(const void *p)
{
	if (bpf_rdonly_cast)
		return ((struct timespec64 *)bpf_rdonly_cast(p, bpf_core_type_id_kernel(struct timespec64)))->tv_sec;
	__u64 w = 0;
	bpf_probe_read_kernel(&w, sizeof w, p);
	return w;
}

static __always_inline __u64 peek(const void *p, __u32 offset, __u32 size)
{
	if (size == 8)
		return word_at(p + offset);
	return word_at(p + (offset & ~7U)) >> (offset & 7) * 8 & ((1ULL << size * 8) - 1);
}

/* GET(p, field) is p->field, wherever this kernel has it. */
#define GET(p, field) \
	((typeof((p)->field))peek((p), bpf_core_field_offset(typeof(*(p)), field), sizeof((p)->field)))
