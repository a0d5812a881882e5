package kernelobjects

import (
	"bufio"
	"os/exec"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// Each kind of object shows, and what leaves none doesn't.
func TestEachObjectShows(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.Program("unshare"), testenv.Program("python3"))
	for _, c := range []struct {
		name, code string
		shows      bool
	}{
		{"nothing", "pass", false},
		{"a segment", "libc.shmget(0, 4096, 0o1600)", true},
		{"a queue", "libc.msgget(0, 0o1600)", true},
		{"semaphores", "libc.semget(0, 1, 0o1600)", true},
		{"a POSIX queue", "libc.syscall(240, b'x', 0o102, 0o600, None)", true},
		{"the host's name", "socket.sethostname('x')", true},
		{"a mount", "libc.mount(b't', b'/mnt', b'tmpfs', 0, None)", true},
		{"the network", "fcntl.ioctl(socket.socket(), 0x8922, struct.pack('16si20x', b'lo', 1400))", true},
		{"a limit", "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))", true},
		{"a priority", "os.nice(3)", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.Command("python3", "-c", `
import ctypes, fcntl, os, resource, socket, struct, sys
libc = ctypes.CDLL(None)
print("ready", flush=True)
sys.stdin.readline()
`+c.code+`
print("done", flush=True)
sys.stdin.readline()`)
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET, Unshareflags: unix.CLONE_NEWNS}
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { in.Close(); cmd.Process.Kill(); cmd.Wait() }()
			lines := bufio.NewScanner(out)
			look := func() []string {
				t.Helper()
				if !lines.Scan() {
					t.Fatal("the process ended early")
				}
				objects, err := Of(cmd.Process.Pid)
				if err != nil {
					t.Fatal(err)
				}
				return objects
			}
			before := look()
			in.Write([]byte("\n"))
			after := look()
			if shows := !slices.Equal(before, after); shows != c.shows {
				t.Errorf("shows: %v, want %v\n%q\n%q", shows, c.shows, before, after)
			}
		})
	}
}
