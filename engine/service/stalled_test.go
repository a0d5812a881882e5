package service

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

const (
	fiFreeze = 0xC0045877
	fiThaw   = 0xC0045878
)

// diskOfItsOwn mounts a file system, in this process's own mounts, for a state folder. stall has it take no
// write and no flush any more, as a disk does that doesn't answer, until the function that it gives is called, which says
// whether that was so all the time.
func diskOfItsOwn(t *testing.T) (dir string, stall func() func() bool) {
	t.Helper()
	base, err := os.MkdirTemp("/var/tmp", "bw")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	image := filepath.Join(base, "disk")
	dir = filepath.Join(base, filepath.Base(base)+"s")
	run := func(name string, args ...string) string {
		t.Helper()
		out, err := exec.Command(name, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", name, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	run("truncate", "-s", "8G", image)
	run("mkfs.btrfs", "-q", image)
	run("mount", "-o", "loop,noatime", image, dir)
	t.Cleanup(func() { run("umount", dir) })
	t.Cleanup(func() {
		for _, f := range inspected(dir) {
			t.Error("check: ", f)
		}
	})
	return dir, func() func() bool {
		t.Helper()
		// A process that waits for a frozen file system can't even be killed: somebody else thaws it if this test doesn't.
		guard := exec.Command("sh", "-c", "sleep 40; exec fsfreeze --unfreeze "+dir)
		guard.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
		if err := guard.Start(); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(dir)
		if err == nil {
			err = unix.IoctlSetInt(int(f.Fd()), fiFreeze, 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		return func() bool {
			err := unix.IoctlSetInt(int(f.Fd()), fiThaw, 0) // EINVAL: the guard was earlier
			f.Close()
			_ = unix.Kill(-guard.Process.Pid, unix.SIGKILL)
			_ = guard.Wait()
			return err == nil
		}
	}
}

// A disk that doesn't answer keeps changes waiting, and no reader: trees, nodes and what they did are
// read as before; a call ends with its deadline; and when the disk is back all goes on, with nothing lost.
func TestStalledDisk(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	dir, stall := diskOfItsOwn(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	root, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), "echo one >/root/one").GetNode()
	d.captured(t, n.GetId())

	thaw := stall()
	thawed := false
	defer func() {
		if !thawed {
			thaw()
		}
	}()
	short, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	stream, err := d.client.RunTurn(short, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte("true")}})
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a turn on a disk that doesn't answer: %v", err)
	}
	for range 20 {
		if got := d.node(t, n.GetId()); string(got.GetObservation().GetStdout()) != "" || got.GetId() != n.GetId() {
			t.Errorf("a node read beside it: %v", got)
		}
		if list := d.nodesOf(t, root.GetTreeId()); len(list) < 2 {
			t.Errorf("%d nodes are listed beside it", len(list))
		}
	}
	if !thaw() {
		t.Error("the disk answered again before the reads were over: they waited for it")
	}
	thawed = true
	until(t, "the sandbox works again", func() bool {
		_, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte("echo two >/root/two")}})
		return err == nil
	})
	list := d.nodesOf(t, root.GetTreeId())
	last := list[len(list)-1]
	d.captured(t, last.GetId())
	if got := d.ok(t, d.fork(t, last.GetId(), 1)[0].GetId(), "cat /root/one /root/two"); got != "one\ntwo\n" {
		t.Errorf("after it a fork shows %q", got)
	}
}
