package inspector

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/tree"
)

// ways is every way of changing something that testdata/ways.c knows, with the
// half that must be judged changed and a word that an effect has to name.
var ways = []struct {
	name    string
	verdict tree.Verdict
	names   string // part of an effect's subject; "" where the kind of change has no name
}{
	{"write_", tree.Files, "/w/old"},
	{"pwrite_", tree.Files, "/w/old"},
	{"writev_", tree.Files, "/w/old"},
	{"pwritev_", tree.Files, "/w/old"},
	{"pwritev2_", tree.Files, "/w/old"},
	{"append", tree.Files, "/w/old"},
	{"write_same", tree.Files, "/w/old"},
	{"write_many", tree.Files, "/w/big"},
	{"sendfile_", tree.Files, "/w/old"},
	{"splice_", tree.Files, "/w/old"},
	{"tee_splice", tree.Files, "/w/old"},
	{"copy_file_range_", tree.Files, "/w/old"},
	{"ficlone", tree.Files, "/w/old"},
	{"ficlonerange", tree.Files, "/w/old"},
	{"dedupe", tree.Files, "/w/big"}, // it shows nowhere, but the extents are others
	{"fallocate_", tree.Files, "/w/old"},
	{"fallocate_keep", tree.Files, "/w/old"},
	{"punch", tree.Files, "/w/big"},
	{"zero_range", tree.Files, "/w/big"},
	{"truncate_", tree.Files, "/w/old"},
	{"truncate_grow", tree.Files, "/w/old"},
	{"ftruncate_", tree.Files, "/w/old"},
	{"ftruncate_restore", tree.Files, "/w/big"},
	{"o_trunc", tree.Files, "/w/old"},
	{"o_trunc_empty", tree.Files, "/w/empty"},
	{"creat_", tree.Files, "/w/old"},
	{"openat2_trunc", tree.Files, "/w/old"},
	{"o_direct", tree.Files, "/w/old"},
	{"mmap_store", tree.Files, "/w/old"},
	{"mmap_after_close", tree.Files, "/w/old"},
	{"mmap_mprotect", tree.Files, "/w/old"},
	{"madv_remove", tree.Files, "/w/big"},
	{"madv_remove_half", tree.Files, "/w/big"},
	{"read_into_map", tree.Files, "/w/old"},
	{"io_submit_", tree.Both, "/w/old"},
	{"io_uring_", tree.Both, ""},
	{"io_uring_write", tree.Both, ""},
	{"int80", tree.Both, "/w/old"},
	{"core", tree.Files, "core"},
	{"inherited", tree.Files, "/w/old"},
	{"stdout_", tree.Files, "/w/old"},
	{"proc_self_fd", tree.Files, "/w/old"},
	{"passed", tree.Files, "/w/old"},
	{"double_fork", tree.Files, "/w/old"},
	{"unshared", tree.Files, "/w/old"},
	{"memfd_exec", tree.Files, "/w/old"},
	{"race_write", tree.Files, "/w/old"},
	{"race_fchmod", tree.Files, "/w/old"},
	{"race_path_chmod", tree.Files, "/w/old"},
	{"race_path_truncate", tree.Files, "/w/old"},
	{"race_path_unlink", tree.Files, "/w/old"},
	{"race_close", tree.Files, "/w/old"},
	{"mapped_store", tree.Files, "/w/old"},
	{"sparse", tree.Files, "/w/old"},
	{"concurrent", tree.Files, "/w/big"},
	{"create", tree.Files, "/w/new"},
	{"tmpfile_link", tree.Files, "/w/new"},
	{"rename_", tree.Files, "/w/new"},
	{"rename_over", tree.Files, "/w/old"},
	{"rename_dir", tree.Files, "/w/d2"},
	{"rename_into", tree.Files, "/w/e/old"},
	{"exchange", tree.Files, "/w/old"},
	{"link_", tree.Files, "/w/new"},
	{"symlink_", tree.Files, "/w/new"},
	{"mkfifo_", tree.Files, "/w/new"},
	{"mknod_", tree.Files, "/w/new"},
	{"bind_", tree.Files, "/w/new"},
	{"mkdir_", tree.Files, "/w/new"},
	{"rmdir_", tree.Files, "/w/e"},
	{"unlink_", tree.Files, "/w/old"},
	{"unlink_write", tree.Files, "/w/old"},
	{"replace_same", tree.Files, "/w/empty"},
	{"lower_unlink", tree.Files, "/lw/file"},
	{"lower_write", tree.Files, "/lw/file"},
	{"lower_mmap", tree.Files, "/lw/file"},
	{"lower_chmod", tree.Files, "/lw/file"},
	{"lower_chmod_dir", tree.Files, "/lw/tmp"},
	{"lower_fchmod_dir", tree.Files, "/lw/tmp"},
	{"lower_truncate", tree.Files, "/lw/file"},
	{"lower_create", tree.Files, "/lw/tmp/new"},
	{"lower_rename", tree.Files, "/lw/moved"},
	{"lower_rename_dir", tree.Files, "/lw/moved"},
	{"lower_rename_back", tree.Files, "/lw/tmp/t"},
	{"long_name", tree.Files, "/w/nnn\n\xffnnn"},
	{"chmod_", tree.Files, "/w/old"},
	{"chmod_new_and_old", tree.Files, "/w/old"},
	{"chmod_failed_and_old", tree.Files, "/w/old"},
	{"chmod_by_new_link", tree.Files, "/w/old"},
	{"utimensat_new_and_old", tree.Files, "/w/old"},
	{"fchmod_", tree.Files, "/w/old"},
	{"fchmodat2_", tree.Files, "/w/old"},
	{"chmod_root", tree.Files, "/"},
	{"chmod_dir", tree.Files, "/w/d"},
	{"fchmod_dir", tree.Files, "/w/d"},
	{"chown_", tree.Files, "/w/old"},
	{"lchown_", tree.Files, "/w/old"},
	{"fchown_", tree.Files, "/w/old"},
	{"utimensat_", tree.Files, "/w/old"},
	{"utimensat_dir", tree.Files, "/w/d"},
	{"lower_utimensat_dir", tree.Files, "/lw/tmp"},
	{"futimens_", tree.Files, "/w/old"},
	{"utimes_", tree.Files, "/w/old"},
	{"utime_", tree.Files, "/w/old"},
	{"touch", tree.Files, "/w/old"},
	{"setxattr_", tree.Files, "/w/old"},
	{"lsetxattr_", tree.Files, "/w/old"},
	{"fsetxattr_", tree.Files, "/w/old"},
	{"setxattr_dir", tree.Files, "/w/d"},
	{"removexattr_", tree.Files, "/w/x"},
	{"fremovexattr_", tree.Files, "/w/x"},
	{"setflags", tree.Files, "/w/old"},
	{"fssetxattr", tree.Files, "/w/old"},
	{"setflags_dir", tree.Files, "/w/d"},
	{"futimesat_", tree.Files, "/w/old"},
	{"lremovexattr_", tree.Files, "/w/x"},
	{"setxattrat_", tree.Files, "/w/old"},
	{"removexattrat_", tree.Files, "/w/x"},
	{"file_setattr_", tree.Files, "/w/old"},
	{"shm", tree.Process, ""},
	{"msg_sent", tree.Process, ""},
	{"sem_used", tree.Process, ""},
	{"mq_sent", tree.Process, ""},
	{"msg", tree.Process, ""},
	{"sem", tree.Process, ""},
	{"mq", tree.Process, ""},
	{"hostname", tree.Process, ""},
	{"domainname", tree.Process, ""},
	{"mount_", tree.Process, ""},
	{"bind_mount", tree.Process, ""},
	{"keyring", tree.Process, ""},
	{"sysctl", tree.Process, ""},
	{"lo_ioctl", tree.Process, ""},
	{"netlink_set", tree.Process, ""},
	{"netlink_write", tree.Process, ""},
	{"limits_of_1", tree.Process, ""},
	{"survivor", tree.Process, "ways"},
	{"survivor_file", tree.Both, "/w/old"},
}

// quiet is what leaves nothing behind: a false positive costs a capture.
var quiet = []string{
	"quiet", "reads", "open_rdwr", "open_rdwr_lower", "create_unlink", "mkdtemp_", "lower_temp",
	"lower_temp_chmod", "tmpfile_gone", "rename_new", "rename_back", "rename_whiteout", "failed", "dev_null", "pipes",
	"memfd", "write_nothing", "private_map", "shared_map_read", "children", "fsyncs", "bound_gone",
	"big_temp", "netlink_get", "own_limits", "loopback", "link_unlink", "lock",
}

// shows says whether the verdict has every half of want.
func shows(got, want tree.Verdict) bool { return got == want || got == tree.Both }

func TestEveryWayOfChangingIsSeen(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, way := range ways {
		for _, threads := range []bool{false, true} {
			name, argv := way.name, []string{"/ways", way.name}
			if threads {
				name, argv = name+"/threads", []string{"/ways", "-t", way.name}
			}
			t.Run(name, func(t *testing.T) {
				b := mustBox(t, nil)
				w := mustWatch(t, k, b)
				w.BeginTurn()
				b.turn(argv...)
				r := w.Barrier(context.Background())
				if r.Verdict != way.verdict || r.Turn != way.verdict {
					t.Errorf("verdict %d, turn %d, want %d: %q", r.Verdict, r.Turn, way.verdict, r.Reasons)
				}
				if len(r.Reasons) == 0 || len(r.Effects) == 0 {
					t.Errorf("no reason or effect: %+v", r)
				}
				found := way.names == ""
				for _, e := range r.Effects {
					found = found || strings.Contains(string(e.Subject), way.names)
				}
				if !found {
					t.Errorf("no effect names %q: %v", way.names, effectsOf(r))
				}
				mustSeeAll(t, w)
			})
		}
	}
}

// Calls made in the x32 way count as both halves, or the kernel refuses them: it has no
// CONFIG_X86_X32_ABI, or wasn't started with syscall.x32=y.
func TestX32IsSeenOrRefused(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	old := filepath.Join(b.subject.Upper, "w/old")
	before, err := os.ReadFile(old)
	b.must(err)
	w.BeginTurn()
	out, failed := b.try("/ways", "x32")
	r := barrier(w)
	after, err := os.ReadFile(old)
	b.must(err)
	wrote := !bytes.Equal(before, after)
	switch {
	case failed == nil && wrote:
		expect(t, "a write in the x32 way", r, tree.Both, tree.Both)
	case failed != nil && !wrote && strings.Contains(out, "Function not implemented"):
		t.Log("this kernel refuses calls in the x32 way")
		expect(t, "a write that was refused", r, tree.None, tree.None)
	default:
		t.Fatalf("written: %v, %v: %s", wrote, failed, out)
	}
}

func effectsOf(r Report) (out []string) {
	for _, e := range r.Effects {
		out = append(out, string('0'+rune(e.Kind))+" "+string(e.Subject)+" "+e.Detail)
	}
	return out
}

func TestQuietTurnsAreNone(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, way := range quiet {
		for _, threads := range []bool{false, true} {
			name, argv := way, []string{"/ways", way}
			if threads {
				name, argv = name+"/threads", []string{"/ways", "-t", way}
			}
			t.Run(name, func(t *testing.T) {
				b := mustBox(t, nil)
				w := mustWatch(t, k, b)
				if way == "netlink_get" && threads && slices.Contains(k.absent, "cap_capable") {
					testenv.Require(t, func() string { return "this kernel hasn't got the tracepoint cap_capable: the stricter rule holds" })
				}
				w.BeginTurn()
				b.turn(argv...)
				r := w.Barrier(context.Background())
				if r.Verdict != tree.None || r.Turn != tree.None || r.Count != 0 || r.External {
					t.Errorf("verdict %d: %q %v", r.Verdict, r.Reasons, effectsOf(r))
				}
				mustSeeAll(t, w)
			})
		}
	}
}
