package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) shellCommand() *cobra.Command {
	var user, cwd string
	c := &cobra.Command{
		Use:   "shell NODE",
		Short: "Look around at a node, in a terminal of a scratch fork",
		Long: `Forks the node and gives you a bash in a terminal there. The fork writes no nodes and ends with
the shell, and what was done in it with it: the node stays as it is. It is a shell beside
those that are saved with the node; what those hold, boxwood diff shows.`,
		Example: `  boxwood shell nd_01j...
  boxwood shell nd_01j... --user agent --cwd /work`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			in, ok := a.in.(*os.File)
			out, ok2 := a.out.(*os.File)
			if !ok || !ok2 || columns(in) == 0 || columns(out) == 0 {
				return fault.New(fault.Invalid, "no_terminal", "a shell needs a terminal, which standard input and output aren't").
					WithHint("in a script, run commands in a fork: SB=$(boxwood fork --scratch -q %s) and boxwood exec $SB", args[0])
			}
			return a.shell(c.Context(), args[0], &pb.OpenSessionRequest{User: user, Cwd: cwd}, in, out)
		},
	}
	c.Flags().StringVar(&user, "user", "", `user: a name, "uid" or "uid:gid"`)
	c.Flags().StringVar(&cwd, "cwd", "", "working folder")
	return c
}

// shellLimit is how long one may look around.
const shellLimit = 24 * time.Hour

// scratchSession is of this program; a node's own are called otherwise.
const scratchSession = "boxwood.shell"

func (a *app) shell(ctx context.Context, node string, session *pb.OpenSessionRequest, in, out *os.File) error {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGHUP)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, shellLimit)
	defer cancel()
	client, err := a.client()
	if err != nil {
		return err
	}
	boxes, release, err := scratchForks(ctx, client, node)
	if err != nil {
		return err
	}
	defer release()
	size, err := unix.IoctlGetWinsize(int(out.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return err
	}
	session.SandboxId, session.Name, session.Tty, session.Env = boxes[0], scratchSession, true, map[string]string{"TERM": a.getenv("TERM")}
	session.Rows, session.Cols = int32(size.Row), int32(size.Col)
	if _, err := client.OpenSession(ctx, session); err != nil {
		return err
	}
	a.note("a scratch fork of %s: nothing that is done here is kept; exit ends it", node)
	restore, err := raw(in)
	if err != nil {
		return err
	}
	result, err := func() (*pb.TurnResult, error) {
		defer restore()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		keys := make(chan []byte)
		go func() { // ends with the process: a read of a terminal can't be broken off
			defer close(keys)
			for buf := make([]byte, 1024); ; {
				n, err := in.Read(buf)
				if n == 0 || err != nil {
					return
				}
				select {
				case keys <- append([]byte(nil), buf[:n]...):
				case <-ctx.Done():
					return
				}
			}
		}()
		go a.typeKeys(ctx, cancel, client, boxes[0], keys, out)
		return runTurn(ctx, client, &pb.RunTurnRequest{SandboxId: boxes[0], Command: &pb.Command{
			Session: scratchSession, Shell: []byte("bash"), DeadlineNs: int64(shellLimit)}}, out, io.Discard)
	}()
	if err != nil {
		return err
	}
	return turnStatus(result)
}

// typeKeys passes keys on, and the terminal's size whenever that changes. A terminal that is gone ends the shell.
func (a *app) typeKeys(ctx context.Context, end context.CancelFunc, client pb.BoxwoodClient, box string, keys <-chan []byte, out *os.File) {
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	for {
		r := &pb.TypeRequest{SandboxId: box, Session: scratchSession}
		select {
		case <-ctx.Done():
			return
		case typed, ok := <-keys:
			if !ok {
				end()
				return
			}
			r.Keys = typed
		case <-resized:
			size, err := unix.IoctlGetWinsize(int(out.Fd()), unix.TIOCGWINSZ)
			if err != nil || size.Row == 0 || size.Col == 0 {
				continue
			}
			r.Rows, r.Cols = int32(size.Row), int32(size.Col)
		}
		// What is typed before bash is there waits for it; a call that fails now is told by the turn.
		for {
			reply, err := client.Type(ctx, r)
			if err != nil || reply.WasRunning {
				break
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
}

// raw has a terminal pass every key on, ^C included, until restore is called.
func raw(f *os.File) (restore func(), err error) {
	was, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return nil, err
	}
	t := *was
	t.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	t.Oflag &^= unix.OPOST
	t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, &t); err != nil {
		return nil, err
	}
	return func() { _ = unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, was) }, nil
}
