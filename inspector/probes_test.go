package inspector

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/tree"
)

// Changes of which other inspectors have missed about half. Those that change the
// memory of a persistent shell (cd, export, umask, functions, options) belong to
// sessions, which sandboxes don't have yet: here they end with the shell.
func TestProbes(t *testing.T) {
	k := mustKernel(t, Options{})
	const sh = "/bin/sh"
	for _, c := range []struct {
		name string
		argv []string
		want tree.Verdict
	}{
		{"a store to a shared mapping", []string{"/ways", "mmap_store"}, tree.Files},
		{"a store after the descriptor is closed", []string{"/ways", "mmap_after_close"}, tree.Files},
		{"copy_file_range", []string{"/ways", "copy_file_range_"}, tree.Files},
		{"sendfile", []string{"/ways", "sendfile_"}, tree.Files},
		{"splice", []string{"/ways", "splice_"}, tree.Files},
		{"FICLONE", []string{"/ways", "ficlone"}, tree.Files},
		{"fallocate", []string{"/ways", "fallocate_"}, tree.Files},
		{"a punched hole", []string{"/ways", "punch"}, tree.Files},
		{"utimensat", []string{"/ways", "utimensat_"}, tree.Files},
		{"touch -c", []string{sh, "-c", "touch -c old"}, tree.Files},
		{"fchmodat2", []string{"/ways", "fchmodat2_"}, tree.Files},
		{"chmod", []string{"/ways", "chmod_"}, tree.Files},
		{"chown", []string{"/ways", "chown_"}, tree.Files},
		{"an xattr", []string{"/ways", "setxattr_"}, tree.Files},
		{"stdout redirected to a file", []string{sh, "-c", "exec >>old; echo x"}, tree.Files},
		{"stderr redirected to a file", []string{sh, "-c", "exec 2>>old; echo x >&2"}, tree.Files},
		{"dd with conv=notrunc", []string{sh, "-c", "dd if=other of=old bs=9 count=1 conv=notrunc"}, tree.Files},
		{"a short write through r+b", []string{"/ways", "pwrite_"}, tree.Files},
		{"direct I/O", []string{"/ways", "o_direct"}, tree.Files},
		{"kernel AIO", []string{"/ways", "io_submit_"}, tree.Both},
		{"io_uring", []string{"/ways", "io_uring_"}, tree.Both},
		{"truncate", []string{"/ways", "truncate_"}, tree.Files},
		{"O_TRUNC", []string{"/ways", "o_trunc"}, tree.Files},
		{"rename", []string{"/ways", "rename_"}, tree.Files},
		{"RENAME_EXCHANGE", []string{"/ways", "exchange"}, tree.Files},
		{"a hard link", []string{"/ways", "link_"}, tree.Files},
		{"mkdir", []string{"/ways", "mkdir_"}, tree.Files},
		{"unlink", []string{"/ways", "unlink_"}, tree.Files},
		{"O_TMPFILE and linkat", []string{"/ways", "tmpfile_link"}, tree.Files},
		{"a socket bound to a path", []string{"/ways", "bind_"}, tree.Files},
		{"a descriptor passed over a socket", []string{"/ways", "passed"}, tree.Files},
		{"a here-document", []string{sh, "-c", "cat >old <<X\nlines\nX"}, tree.Files},
		{"a double fork", []string{"/ways", "double_fork"}, tree.Files},
		{"a file in /run", []string{sh, "-c", "echo x >/run/x"}, tree.Files},
		{"SysV shared memory", []string{"/ways", "shm"}, tree.Process},
		{"a mount", []string{"/ways", "mount_"}, tree.Process},
		{"a server left behind", []string{"/ways", "survivor"}, tree.Process},
		// And what others have called a change, or a net of nothing.
		{"moved there and back", []string{sh, "-c", "mv old f; mv f old"}, tree.None},
		{"the memory of a shell that ends", []string{sh, "-c", "cd d; export A=1; umask 077; f() { :; }"}, tree.None},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := judge(t, k, c.argv...)
			if r.Verdict != c.want || r.Turn != c.want {
				t.Errorf("verdict %d, turn %d, want %d: %q %q", r.Verdict, r.Turn, c.want, r.Reasons, effectsOf(r))
			}
		})
	}
}

// Standard output was redirected by a turn that is over; it is written to now.
func TestProbeOfAnEarlierTurnsRedirection(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/bin/bash", "-c", "(trap 'echo hello' USR1; echo; echo; while :; do sleep 1000 & wait; done) >>old 2>&1 </dev/null & until grep -q '^$' old; do :; done")
	expect(t, "the turn that redirects", barrier(w), tree.Both, tree.Both)
	sleeps := func() bool {
		procs, err := b.survivors()
		b.must(err)
		return slices.ContainsFunc(procs, func(p Survivor) bool { return strings.HasPrefix(string(p.Cmdline), "sleep") }) &&
			!slices.ContainsFunc(procs, func(p Survivor) bool { return !waiting(p.HostPID) })
	}
	for deadline := time.Now().Add(time.Minute); !sleeps(); {
		if time.Now().After(deadline) {
			t.Fatal("the survivors don't sleep")
		}
	}
	b.freeze()
	w.NewEpoch(b.snapshot())
	b.thaw()
	w.BeginTurn()
	expect(t, "nothing is written", barrier(w), tree.None, tree.None)
	procs, err := b.survivors()
	b.must(err)
	w.BeginTurn()
	for _, p := range procs {
		if strings.HasPrefix(string(p.Cmdline), "/bin/bash") {
			b.must(syscall.Kill(p.PID, syscall.SIGUSR1))
			break
		}
	}
	for deadline := time.Now().Add(time.Minute); ; {
		data, err := os.ReadFile(filepath.Join(b.root, "w/old"))
		b.must(err)
		if strings.Contains(string(data), "hello") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the survivor doesn't write")
		}
	}
	expect(t, "it writes", barrier(w), tree.Both, tree.Both)
}
