package cgroup

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

const headlessEnv = "BOXWOOD_TEST_HEADLESS"

// A child with headlessEnv is a process whose first thread exits and whose second starts
// programs that live on.
func init() {
	if os.Getenv(headlessEnv) == "" {
		return
	}
	go func() {
		for range time.Tick(time.Millisecond) {
			if headless(os.Getpid()) {
				exec.Command("sleep", "1000").Start()
				fmt.Println("ready")
				<-context.Background().Done() // never
			}
		}
	}()
	runtime.LockOSThread()
	unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
}

func TestKillEndsAProcessWhoseFirstThreadHasExited(t *testing.T) {
	testenv.Require(t, testenv.Root)
	r := mustRoot(t, "headless")
	g, err := r.Make("7", 123457, Limits{Pids: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Remove()
	leaf, kill, err := OpenLeaf(g.Run)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leaf)
	defer unix.Close(kill)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), headlessEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: leaf}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the child said %q, %v", line, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := Kill(g.Dir); err != nil {
		t.Fatal(err)
	}
	if err := Await(ctx, g.Dir, "populated", 0); err != nil {
		t.Errorf("after the kill: %v", err)
	}
}
