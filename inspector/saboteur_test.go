package inspector

import (
	"slices"
	"testing"

	"github.com/boxwood-rl/boxwood/tree"
)

// Classes of events that the programs can be told to miss; as in
// bpf/box.h.
const (
	blindFolio       = 1 << 0
	blindNew         = 1 << 1
	blindFileCalls   = 1 << 3
	blindObjectCalls = 1 << 4
	blindReads       = 1 << 5
	blindDirs        = 1 << 7
)

func judge(t *testing.T, k *Kernel, argv ...string) Report {
	t.Helper()
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn(argv...)
	return barrier(w)
}

// Each guarantee has a saboteur: when the programs miss a class of events, the ways
// named here go unseen, so that TestEveryWayOfChangingIsSeen would fail.
func TestSaboteurs(t *testing.T) {
	for _, s := range []struct {
		name  string
		blind uint32
		way   string
	}{
		{"stores to mapped files", blindFolio | blindTransaction, "mmap_store"},
		{"file calls and the file system's transactions", blindFileCalls | blindTransaction, "chmod_"},
		{"new inodes, file calls and transactions", blindFileCalls | blindTransaction | blindNew, "create"},
		{"file calls on descriptors", blindFileCalls | blindTransaction, "fallocate_"},
		{"directories whose entries change", blindDirs, "create"},
		{"kernel objects", blindObjectCalls, "shm"},
		{"network configuration", blindObjectCalls, "netlink_write"},
	} {
		t.Run(s.name, func(t *testing.T) {
			k := mustKernel(t, Options{blind: s.blind})
			if r := judge(t, k, "/ways", s.way); r.Verdict != tree.None {
				t.Errorf("%s is seen all the same: %q", s.way, r.Reasons)
			}
		})
	}
}

// fileWays are the ways whose only sign is a file.
func fileWays() (out []string) {
	for _, w := range ways {
		if w.verdict == tree.Files {
			out = append(out, w.name)
		}
	}
	return out
}

// Two witnesses: with the table of calls blind to files, the file system's own
// tracepoints still see every change but one kind ...
func TestTheFileSystemAloneSeesEveryChange(t *testing.T) {
	k := mustKernel(t, Options{blind: blindFileCalls})
	// An open that truncates looks like one that creates.
	silent := []string{"o_trunc", "o_trunc_empty", "creat_", "openat2_trunc"}
	if slices.Contains(k.absent, "ctime_ns_xchg") {
		// The space for the inode has been reserved: by mounting the overlay, by the link.
		silent = append(silent, "chmod_root", "chmod_by_new_link")
	} else {
		silent = append(silent, "dedupe") // it changes nothing that anybody can see, and so no time
	}
	for _, way := range fileWays() {
		if slices.Contains(silent, way) || way == "o_direct" && slices.Contains(k.absent, "iomap_dio_rw_begin") {
			continue
		}
		t.Run(way, func(t *testing.T) {
			if r := judge(t, k, "/ways", way); !shows(r.Verdict, tree.Files) {
				t.Errorf("verdict %d: %q", r.Verdict, r.Reasons)
			}
		})
	}
}

// ... and the table sees all but what makes no call or is written by the kernel.
func TestTheCallsAloneSeeEveryChange(t *testing.T) {
	k := mustKernel(t, Options{blind: blindTransaction | blindFolio | blindNew})
	// The descriptor of a racing write may mean another file when the call ends.
	silent := []string{"mmap_store", "mmap_after_close", "mmap_mprotect", "read_into_map", "mapped_store", "lower_mmap", "core", "create", "lower_create", "long_name", "race_write", "race_close"}
	for _, way := range fileWays() {
		if slices.Contains(silent, way) {
			continue
		}
		t.Run(way, func(t *testing.T) {
			if r := judge(t, k, "/ways", way); !shows(r.Verdict, tree.Files) {
				t.Errorf("verdict %d: %q", r.Verdict, r.Reasons)
			}
		})
	}
}

// Older kernels lack some tracepoints. The rules that stand in for them miss nothing,
// either.
func TestWithoutTheOptionalTracepoints(t *testing.T) {
	var all []string
	for _, o := range optional {
		all = append(all, o.tracepoint)
	}
	k := mustKernel(t, Options{without: all})
	for _, w := range ways {
		if slices.Contains([]string{"netlink_set", "netlink_write", "lo_ioctl", "o_direct", "write_", "race_write", "race_close", "sendfile_", "mmap_store", "unlink_write"}, w.name) {
			t.Run(w.name, func(t *testing.T) {
				if r := judge(t, k, "/ways", w.name); !shows(r.Verdict, w.verdict) {
					t.Errorf("verdict %d, want %d: %q", r.Verdict, w.verdict, r.Reasons)
				}
			})
		}
	}
}
