package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
)

// FindCRIU gives the CRIU program that Boxwood uses: $BOXWOOD_CRIU; the one that
// set-up put beside this program (../.cache/criu/criu); one in PATH. Empty: none.
func FindCRIU() string {
	if path := os.Getenv("BOXWOOD_CRIU"); path != "" {
		return path
	}
	if self, err := os.Executable(); err == nil {
		path := filepath.Join(filepath.Dir(filepath.Dir(self)), ".cache", "criu", "criu")
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	path, err := exec.LookPath("criu")
	if err != nil {
		return ""
	}
	return path
}

// criuScript runs as pid 1 of fresh pid and mount namespaces, so that killing it
// ends everything it started, CRIU and restored processes included, and so that
// the pids of the dumped tree are free again for the restore.
//
// The tree is a shell that remembers a token and a child that sleeps. It says
// ready through a fifo, is dumped (which ends it), restored, and asked for the
// token, which then can only come from its restored memory.
const criuScript = `
criu=$1 token=$2
mkdir images && mkfifo answer && : >version || exit 3
echo starting >step
"$criu" --version </dev/null >banner || exit 4
sed -n "s/^Version: //p" banner >version
setsid bash -c '
	token=$1
	sleep 1000 &
	trap "echo \$token >answer" USR1
	echo ready >answer
	while :; do wait; done' bash "$token" </dev/null >/dev/null 2>&1 &
tree=$!
read -r said <answer && [ "$said" = ready ] || exit 3
echo dumping >step
"$criu" dump -t $tree -D images -o dump.log --manage-cgroups=ignore --network-lock skip </dev/null || exit 4
wait $tree
echo restoring >step
"$criu" restore -D images -d -o restore.log --manage-cgroups=ignore --network-lock skip </dev/null || exit 5
echo asking >step
kill -USR1 $tree || exit 6
read -r said <answer && [ "$said" = "$token" ] || exit 6
`

// criuInside prepares the namespaces. CRIU refuses a process that holds a file
// opened in another mount namespace or half a pipe, so all that is inherited is
// closed. It takes bash: other shells close no descriptor above 9 and keep a
// copy of those they redirect.
const criuInside = `
cd "$1" && shift && mount --make-rprivate / && mount -t proc proc /proc || exit 3
for fd in /proc/self/fd/*; do
	fd=${fd##*/}
	[ "$fd" -le 2 ] || eval "exec $fd>&-"
done
exec "$@" </dev/null >output 2>&1`

// criu dumps and restores a small process tree. A program that hangs is killed
// with its whole pid namespace when ctx ends.
func criu(ctx context.Context, path, parent string) finding {
	if path == "" {
		return no("not found (set BOXWOOD_CRIU, or run make setup)")
	}
	if os.Geteuid() != 0 {
		return unknown("needs root")
	}
	dir, err := os.MkdirTemp(parent, CRIUFolders)
	if err != nil {
		return unknown("making a folder: %v", err)
	}
	defer os.RemoveAll(dir)

	token := fmt.Sprintf("token-%d", os.Getpid())
	cmd := exec.CommandContext(ctx, "bash", "-c", criuInside, "bash", dir,
		"bash", "-c", criuScript, "bash", path, token)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	err = runBound(cmd)
	output := readString(filepath.Join(dir, "output"))
	step := strings.TrimSpace(readString(filepath.Join(dir, "step")))
	version := "CRIU " + strings.TrimSpace(readString(filepath.Join(dir, "version")))
	switch {
	case err == nil:
		return yes("%s (%s) dumped and restored a live process tree", version, path)
	case ctx.Err() != nil:
		return unknown("%s (%s) hung while %s", version, path, step)
	case errors.Is(err, syscall.EPERM):
		return no("starting its test in fresh pid and mount namespaces: %v", err)
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() == 3 {
		return unknown("preparing the test: %v %s", err, lastLine(output))
	}
	return no("%s (%s) failed while %s: %s", version, path, step, criuComplaint(dir, output))
}

// runBound runs a command that is killed with us (Pdeathsig). That signal comes when the thread ends
// that started the command, so no other goroutine may have this thread meanwhile, and end it.
func runBound(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
}

// criuComplaint is the first error in CRIU's logs, or what was printed last. It
// calls a file limit that it may not raise an error, too, and goes on.
func criuComplaint(dir, output string) string {
	for _, log := range []string{"restore.log", "dump.log"} {
		for line := range strings.Lines(readString(filepath.Join(dir, "images", log))) {
			if _, complaint, found := strings.Cut(line, "Error "); found && !strings.Contains(complaint, "rlimit:") {
				return strings.TrimSpace(complaint)
			}
		}
	}
	return lastLine(output)
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// readString is a small file's content, or nothing.
func readString(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(content)
}

// CRIUFolders begin the names of the folders that CheckCRIU works in. Whoever is killed in it leaves one.
const CRIUFolders = "boxwood-doctor-criu-"

// CheckCRIU says whether the program at path dumps and restores live processes
// on this kernel: an error for everything but a clear yes. It works in a folder below dir, that
// for temporary files if it is empty.
func CheckCRIU(ctx context.Context, path, dir string) error {
	if f := criu(ctx, path, dir); f.state != Yes {
		return fmt.Errorf("%s: %s", f.state, f.detail)
	}
	return nil
}
