package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/view"
	"github.com/boxwood-rl/boxwood/engine/witness"
	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// --verify looks at the replay's own sandbox when a turn has ended and its capture is over, and in the end at a fork of
// each node; the two must be alike (law 5). It looks from the host and asks the daemon nothing: files as the sandbox
// sees them by package treewalk, processes and what the kernel holds around them by package witness, while all of
// it is frozen. Neither shares code with capture or restore.
//
// Where processes run, two looks are taken, a while apart. What moves by itself can't be held against anything: such
// a node counts as unsettled, which isn't exact.

// verification is what --verify came to. Percentages are of all nodes: what is withheld, failed or unsettled isn't exact.
type verification struct {
	verifiedCount
	ExactPct    float64 `json:"exact_pct"`
	WithheldPct float64 `json:"withheld_pct"`
	// What other ways to come back to a node would have given: the conversation alone, in the start state; and the
	// node's files, with the start's processes.
	ChatOnlyPct  float64 `json:"chat_only_pct"`
	FilesOnlyPct float64 `json:"files_only_pct"`

	By  []verifiedPart `json:"by"`
	Bad []badNode      `json:"bad,omitempty"` // that failed or differ
}

type verifiedCount struct {
	Nodes     int `json:"nodes"`
	Exact     int `json:"exact"`
	Withheld  int `json:"withheld"`
	Failed    int `json:"failed"`
	Different int `json:"different"`
	Unsettled int `json:"unsettled"`
	ChatOnly  int `json:"chat_only"`
	FilesOnly int `json:"files_only"`
}

// verifiedPart are the nodes of one verdict and one kind of process state.
type verifiedPart struct {
	Verdict string `json:"verdict"`
	Kind    string `json:"kind"`
	verifiedCount
}

type badNode struct {
	Node string   `json:"node"`
	Why  []string `json:"why"`
}

// seen is one look at a sandbox.
type seen struct {
	files     []string // lines that the start hasn't, and with a minus those that it has and this hasn't
	processes *witness.State
	unsettled bool
}

// verifier collects what was seen.
type verifier struct {
	start      map[string]bool // lines of the start state
	atStart    *seen
	nodes      []string
	references map[string]*seen
}

// settleFor is how far two looks are apart that tell what moves by itself.
const settleFor = 20 * time.Millisecond

// reference looks at the replay's sandbox, which stands at n; nil: at the start.
func (r *replay) reference(ctx context.Context, n *pb.Node) error {
	if !r.verify {
		return nil
	}
	v := &r.verifier
	if n != nil {
		if _, err := r.client.WaitCaptured(ctx, &pb.WaitCapturedRequest{NodeIds: []string{n.Id}}); err != nil {
			return err
		}
	}
	s, err := v.look(ctx, r.generation)
	if err != nil {
		return fmt.Errorf("looking at the sandbox for --verify: %w", err)
	}
	if n == nil {
		v.atStart, v.references = s, map[string]*seen{}
		return nil
	}
	v.nodes = append(v.nodes, n.Id)
	v.references[n.Id] = s
	return nil
}

// look sees what a sandbox is. The first one is the start.
func (v *verifier) look(ctx context.Context, generation string) (*seen, error) {
	pid1, err := findSandbox(generation)
	if err == nil {
		err = settled(ctx, pid1)
	}
	if err != nil {
		return nil, err
	}
	s, n, err := v.lookOnce(ctx, pid1)
	if err != nil || n == 0 {
		return s, err
	}
	timer := time.NewTimer(settleFor)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	again, _, err := v.lookOnce(ctx, pid1)
	if err != nil {
		return nil, err
	}
	again.unsettled = !slices.Equal(s.files, again.files) || len(witness.Diff(s.processes, again.processes)) > 0
	return again, nil
}

// lookOnce gives the number of processes beside pid 1, too. They are frozen meanwhile.
func (v *verifier) lookOnce(ctx context.Context, pid1 int) (_ *seen, n int, err error) {
	pids, err := processesOf(pid1)
	if err != nil {
		return nil, 0, err
	}
	if len(pids) > 0 {
		dir, err := groupOf(pid1)
		if err != nil {
			return nil, 0, err
		}
		if err := cgroup.Freeze(ctx, dir); err != nil {
			return nil, 0, err
		}
		defer func() { err = errors.Join(err, cgroup.Thaw(dir)) }()
	}
	s := &seen{}
	if s.processes, err = processesSeen(ctx, pid1); err != nil {
		return nil, 0, err
	}
	lines, err := filesOf(ctx, pid1)
	if err != nil {
		return nil, 0, err
	}
	if v.start == nil {
		v.start = map[string]bool{}
		for _, l := range lines {
			v.start[l] = true
		}
	}
	here := map[string]bool{}
	for _, l := range lines {
		if here[l] = true; !v.start[l] {
			s.files = append(s.files, l)
		}
	}
	for _, l := range slices.Sorted(maps.Keys(v.start)) {
		if !here[l] {
			s.files = append(s.files, "-"+l)
		}
	}
	return s, len(pids), nil
}

// processesSeen waits for those that are on their way out, which no freezing holds up.
func processesSeen(ctx context.Context, pid1 int) (*witness.State, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		pids, err := processesOf(pid1)
		if err != nil {
			return nil, err
		}
		s, err := witness.Of(pid1, pids)
		leaving := errors.Is(err, witness.ErrExiting) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
		if !leaving {
			return s, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, err
		}
	}
}

// settled waits until pid 1 has given up what it needed to take its root, which is the last that it does on its own: a sandbox
// is handed out a moment before.
func settled(ctx context.Context, pid1 int) error {
	text, err := os.ReadFile("/proc/sys/kernel/cap_last_cap")
	if err != nil {
		return err
	}
	last, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	allCapabilities := fmt.Sprintf("\nCapPrm:\t%016x\n", uint64(1)<<(last+1)-1)
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Second, errors.New("its pid 1 is still on its way after 10 s"))
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid1))
		if err != nil {
			return err
		}
		if !strings.Contains(string(status), allCapabilities) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// findSandbox finds pid 1 of a sandbox by the machine-id of its generation.
func findSandbox(generation string) (pid int, err error) {
	sum := sha256.Sum256([]byte("machine-id/" + generation))
	want := hex.EncodeToString(sum[:16]) + "\n"
	all, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	for _, d := range all {
		pid, err := strconv.Atoi(d.Name())
		if err != nil || inner(pid) != "1" {
			continue
		}
		if id, err := os.ReadFile(filepath.Join("/proc", d.Name(), "root/etc/machine-id")); err == nil && string(id) == want {
			return pid, nil
		}
	}
	return 0, fault.New(fault.Precondition, "sandbox_not_here", "no process of the sandbox can be seen").
		WithHint("--verify looks at sandboxes from outside: run it as root on the daemon's host")
}

// inner is the pid of a process in the namespace of pids below ours that it is in; empty: it is in no such one.
func inner(pid int) string {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(status), "\nNSpid:")
	line, _, _ := strings.Cut(rest, "\n")
	if f := strings.Fields(line); len(f) == 2 {
		return f[1]
	}
	return ""
}

// processesOf are the others in the namespace of a pid 1, but for those that have ended: while their parent is frozen,
// nobody takes them away.
func processesOf(pid1 int) (pids []int, err error) {
	own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid1))
	if err != nil {
		return nil, err
	}
	all, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, d := range all {
		pid, err := strconv.Atoi(d.Name())
		if err != nil || pid == pid1 {
			continue
		}
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
		if err != nil || ns != own {
			continue
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err == nil && !(strings.Contains(string(status), "\nState:\tZ") && strings.Contains(string(status), "\nThreads:\t1\n")) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// groupOf is the folder of the cgroup that has all of a sandbox.
func groupOf(pid1 int) (string, error) {
	mounts, err := cgroup.FindMounts("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid1))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok && path != "/" {
			return filepath.Join(mounts.V2, path), nil
		}
	}
	return "", fmt.Errorf("process %d is in no cgroup of its own", pid1)
}

// filesOf describes the files of a sandbox as it sees them.
func filesOf(ctx context.Context, pid1 int) ([]string, error) {
	root, err := os.Open(fmt.Sprintf("/proc/%d/root", pid1))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return treewalk.Sandbox(root, pid1, ctx.Err)
}

// verified forks every node and compares.
func (r *replay) verified(ctx context.Context) (*verification, error) {
	out := &verification{}
	parts := map[[2]string]*verifiedCount{}
	for _, id := range r.verifier.nodes {
		n, err := r.client.GetNode(ctx, &pb.GetNodeRequest{NodeId: id})
		if err != nil {
			return nil, err
		}
		key := [2]string{view.VerdictName(n.Verdict), kindName(n)}
		if parts[key] == nil {
			parts[key] = &verifiedCount{}
		}
		one, why := r.verifyNode(ctx, n)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		parts[key].add(one)
		out.add(one)
		if len(why) > 0 {
			out.Bad = append(out.Bad, badNode{n.Id, why})
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(parts), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		out.By = append(out.By, verifiedPart{key[0], key[1], *parts[key]})
	}
	if out.Nodes > 0 {
		pct := func(n int) float64 { return 100 * float64(n) / float64(out.Nodes) }
		out.ExactPct, out.WithheldPct, out.ChatOnlyPct, out.FilesOnlyPct = pct(out.Exact), pct(out.Withheld), pct(out.ChatOnly), pct(out.FilesOnly)
	}
	return out, nil
}

// verifyNode counts one node, and says what is wrong with its fork.
func (r *replay) verifyNode(ctx context.Context, n *pb.Node) (c verifiedCount, why []string) {
	c.Nodes = 1
	start, was := r.verifier.atStart, r.verifier.references[n.Id]
	if !was.unsettled && len(witness.Diff(start.processes, was.processes)) == 0 {
		c.FilesOnly = 1
		if len(was.files) == 0 {
			c.ChatOnly = 1
		}
	}
	if n.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		c.Withheld = 1
		return c, nil
	}
	is, err := r.lookAtFork(ctx, n.Id)
	if err != nil {
		c.Failed = 1
		return c, []string{"it can't be forked: " + err.Error()}
	}
	switch why = differences(was, is, n); {
	case was.unsettled || is.unsettled:
		c.Unsettled, why = 1, nil
	case len(why) > 0:
		c.Different = 1
	default:
		c.Exact = 1
	}
	return c, why
}

func (c *verifiedCount) add(o verifiedCount) {
	c.Nodes, c.Exact, c.Withheld, c.Failed = c.Nodes+o.Nodes, c.Exact+o.Exact, c.Withheld+o.Withheld, c.Failed+o.Failed
	c.Different, c.Unsettled = c.Different+o.Different, c.Unsettled+o.Unsettled
	c.ChatOnly, c.FilesOnly = c.ChatOnly+o.ChatOnly, c.FilesOnly+o.FilesOnly
}

func (v *verification) print(out io.Writer) {
	fmt.Fprintf(out, "of %d nodes %d fork exactly (%.1f %%), %d are withheld (%.1f %%), %d failed, %d differ, %d didn't stand still; "+
		"the conversation alone would have come back to %.1f %%, files alone to %.1f %%\n",
		v.Nodes, v.Exact, v.ExactPct, v.Withheld, v.WithheldPct, v.Failed, v.Different, v.Unsettled, v.ChatOnlyPct, v.FilesOnlyPct)
	for _, p := range v.By {
		fmt.Fprintf(out, "  %-8s %-9s %d nodes, %d exact, %d withheld\n", p.Verdict, p.Kind, p.Nodes, p.Exact, p.Withheld)
	}
	for _, b := range v.Bad {
		fmt.Fprintf(out, "wrong: %s: %s\n", b.Node, printable.Line(strings.Join(b.Why, "; ")))
	}
}

// lookAtFork looks at a scratch fork of a node.
func (r *replay) lookAtFork(ctx context.Context, node string) (*seen, error) {
	stream, err := r.client.Fork(ctx, &pb.ForkRequest{
		Wants: []*pb.ForkRequest_Want{{From: &pb.ForkRequest_Want_NodeId{NodeId: node}, Count: 1}}, Scratch: true,
	})
	if err != nil {
		return nil, err
	}
	children, err := all(stream.Recv)
	if err != nil {
		return nil, err
	}
	if len(children) != 1 {
		return nil, fmt.Errorf("the daemon answered with %d children in place of one", len(children))
	}
	if children[0].GetSandbox() == nil {
		return nil, fmt.Errorf("%s", children[0].GetMessage())
	}
	child := children[0].GetSandbox()
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, _ = r.client.Release(ctx, &pb.ReleaseRequest{SandboxIds: []string{child.Id}}) // its lease ends it otherwise
	}()
	return r.verifier.look(ctx, child.Generation)
}

// differences between what a node was and a fork of it, the first of them.
func differences(was, is *seen, n *pb.Node) []string {
	d := treewalk.Diff(was.files, is.files, 10)
	a, b := was.processes, is.processes
	if n.GetProcessKind() == pb.ProcessKind_PROCESS_KIND_SHELLS {
		a, b = asShells(a), asShells(b)
	}
	for _, l := range witness.Diff(a, b) {
		if len(d) < 20 {
			d = append(d, l)
		}
	}
	return d
}

// asShells leaves out where a shell's memory lies, which is elsewhere in one that was started anew, and what it was started with,
// which names the child. What is in its memory the daemon has compared, by what both shells say of themselves.
func asShells(s *witness.State) *witness.State {
	pids := slices.Collect(maps.Keys(s.Processes))
	out := s.WithoutMemory(pids)
	for _, p := range out.Processes {
		p.Facts = slices.DeleteFunc(slices.Clone(p.Facts), func(f string) bool { return strings.HasPrefix(f, "auxv: ") || strings.HasPrefix(f, "environ: ") })
	}
	return out
}

func kindName(n *pb.Node) string {
	if n.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		return "withheld"
	}
	return strings.ToLower(strings.TrimPrefix(n.ProcessKind.String(), "PROCESS_KIND_"))
}
