package service

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// replays forks a node and gives what the call answered.
func (d *daemon) replays(t testing.TB, node string, change ...func(*boxwoodv1.ForkRequest)) ([]*boxwoodv1.ForkResult, error) {
	t.Helper()
	req := &boxwoodv1.ForkRequest{Replay: true, Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node}, Count: 1}}}
	for _, f := range change {
		f(req)
	}
	stream, err := d.client.Fork(ctx(t), req)
	var out []*boxwoodv1.ForkResult
	for err == nil {
		var m *boxwoodv1.ForkResult
		if m, err = stream.Recv(); err == nil {
			out = append(out, m)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return out, err
}

func ofTwo(r *boxwoodv1.ForkRequest)   { r.Wants[0].Count = 2 }
func seeded(r *boxwoodv1.ForkRequest)  { r.Seed = 7 }
func scratch(r *boxwoodv1.ForkRequest) { r.Scratch = true }

// evicted gives up the states below a node.
func (d *daemon) evicted(t testing.TB, below string) {
	t.Helper()
	_, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: below, KeepNode: true, StatesOnly: true, ReleaseSandboxes: true})
	if err != nil {
		t.Fatal("pruning states: ", err)
	}
}

// allSteps runs turns of every kind of step, and gives the last one's node.
func (d *daemon) allSteps(t testing.TB, sandbox string) string {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	d.open(t, sandbox, "main", withTTY, func(r *boxwoodv1.OpenSessionRequest) { r.Cwd, r.Env = "/usr", map[string]string{"WHO": "me"} })
	d.say(t, sandbox, "main", "x=5; f() { echo f $1; }\nexport y='two\nlines'")
	_, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Command: &boxwoodv1.Command{
		Argv: [][]byte{[]byte("/bin/sh"), []byte("-c"), []byte("cat >$1; pwd >>$1; id -u >>$1; echo $HOW >>$1; exit 3"), []byte("sh"), []byte("/tmp/given")},
		Cwd:  "/var", User: "1000", Env: map[string]string{"HOW": "so\xc3\xa9"}, Stdin: []byte("typed\x00\xff"),
	}})
	must(err)
	_, err = d.client.WriteFile(ctx(t), &boxwoodv1.WriteFileRequest{SandboxId: sandbox, Path: "/root/written", Content: []byte("one\n"), Mode: 0o600})
	must(err)
	var packed bytes.Buffer
	w := tar.NewWriter(&packed)
	must(w.WriteHeader(&tar.Header{Name: "deep/file", Mode: 0o640, Size: 3, Typeflag: tar.TypeReg}))
	_, _ = w.Write([]byte("tar"))
	must(w.Close())
	up, err := d.client.Upload(ctx(t))
	must(err)
	must(up.Send(&boxwoodv1.UploadRequest{Part: &boxwoodv1.UploadRequest_Start{Start: &boxwoodv1.UploadStart{SandboxId: sandbox, Path: "/up"}}}))
	must(up.Send(&boxwoodv1.UploadRequest{Part: &boxwoodv1.UploadRequest_Chunk{Chunk: packed.Bytes()}}))
	_, err = up.CloseAndRecv()
	must(err)

	turn, err := d.client.BeginTurn(ctx(t), &boxwoodv1.BeginTurnRequest{SandboxId: sandbox})
	must(err)
	exec := func(c *boxwoodv1.Command) {
		t.Helper()
		stream, err := d.client.Exec(ctx(t), &boxwoodv1.ExecRequest{TurnId: turn.GetTurnId(), Command: c, ResultOnly: true})
		for err == nil {
			_, err = stream.Recv()
		}
		if err != io.EOF {
			t.Fatal(err)
		}
	}
	exec(&boxwoodv1.Command{Shell: []byte("cat /up/deep/file; exit 4")})
	_, err = d.client.WriteFile(ctx(t), &boxwoodv1.WriteFileRequest{SandboxId: sandbox, TurnId: turn.GetTurnId(), Path: "/root/written", Content: []byte("two\n"), Append: true})
	must(err)
	_, err = d.client.WriteFile(ctx(t), &boxwoodv1.WriteFileRequest{SandboxId: sandbox, TurnId: turn.GetTurnId(), Path: "/proc/none/here", Content: []byte("x")})
	if err == nil {
		t.Fatal("a file was written to /proc")
	}
	exec(&boxwoodv1.Command{Session: "main", Shell: []byte("read -r line; echo \"$line\"; cat /root/written"), Stdin: []byte("keys\n")})
	_, err = d.client.EndTurn(ctx(t), &boxwoodv1.EndTurnRequest{TurnId: turn.GetTurnId()})
	must(err)

	r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Command: &boxwoodv1.Command{Shell: []byte("sleep 100"), DeadlineNs: int64(time.Second)}})
	must(err)
	if r.GetNode().GetTurnStatus() != boxwoodv1.TurnStatus_TURN_STATUS_TIMED_OUT {
		t.Fatal("no deadline passed: ", r.GetNode())
	}
	d.open(t, sandbox, "other")
	_, err = d.client.CloseSession(ctx(t), &boxwoodv1.CloseSessionRequest{SandboxId: sandbox, Name: "other"})
	must(err)
	return d.say(t, sandbox, "main", `f "$x"; echo "$y" $WHO $PWD; cat /tmp/given`).GetNode().GetId()
}

// A withheld node says from where it can be made again. A fork with replay runs its turns
// again as they were asked for, and says of each whether the same came of it; the child
// stands at a node of its own that says what it is.
func TestReplay(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	from := d.run(t, sb.GetId(), "mkdir /work").GetNode()
	last := d.captured(t, d.allSteps(t, sb.GetId()))[0]
	before, _ := d.walkOf(t, last.GetId())
	d.evicted(t, from.GetId())

	_, err := d.replays(t, last.GetId(), func(r *boxwoodv1.ForkRequest) { r.Replay = false })
	var detail *boxwoodv1.Error
	for _, x := range status.Convert(err).Details() {
		detail, _ = x.(*boxwoodv1.Error)
	}
	turns := int(last.GetDepth() - from.GetDepth())
	if detail.GetReason() != "node_withheld" || detail.GetNearestNodeId() != from.GetId() || int(detail.GetNearestTurns()) != turns || !strings.Contains(detail.GetHint(), from.GetId()) {
		t.Fatalf("a withheld node is refused by %v", detail)
	}

	was := d.nodesOf(t, last.GetTreeId())
	key := func(r *boxwoodv1.ForkRequest) { r.IdempotencyKey = "replay of " + last.GetId() }
	got, err := d.replays(t, last.GetId(), ofTwo, key)
	if err != nil || len(got) != 2 {
		t.Fatal(got, err)
	}
	again, err := d.replays(t, last.GetId(), ofTwo, key)
	if err != nil || len(again) != 2 || again[0].GetSandbox().GetId() != got[0].GetSandbox().GetId() || len(again[1].GetReplayed()) != turns {
		t.Fatalf("the same key: %v, %v", again, err)
	}
	var path []*boxwoodv1.Node // from the first turn to the last
	for id := last.GetId(); id != from.GetId(); id = path[0].GetParentId() {
		path = slices.Insert(path, 0, d.node(t, id))
	}
	for _, r := range got {
		if r.GetError() != nil || len(r.GetReplayed()) != turns {
			t.Fatalf("child %d: %v", r.GetChild(), r)
		}
		parent := from.GetId()
		for i, p := range r.GetReplayed() {
			n := d.node(t, p.GetReplayId())
			if !p.GetSameOutput() || !p.GetSameExit() || p.GetNodeId() != path[i].GetId() || n.GetReplayOf() != p.GetNodeId() ||
				n.GetParentId() != parent || string(n.GetAction().GetText()) != string(path[i].GetAction().GetText()) || n.GetTurnStatus() != path[i].GetTurnStatus() {
				t.Errorf("turn %d, %q: %v\nwas %v\nis  %v", i, n.GetAction().GetText(), p, path[i].GetObservation(), n.GetObservation())
			}
			parent = n.GetId()
		}
		c := r.GetSandbox()
		if c.GetHeadId() != parent {
			t.Errorf("the child stands at %s, and the last turn made %s", c.GetHeadId(), parent)
		}
		if got := d.hear(t, c.GetId(), "main", "echo $x $WHO"); got != "5 me\n" {
			t.Errorf("its session says %q", got)
		}
		if n := d.captured(t, parent)[0]; n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
			t.Errorf("the last turn's node is withheld: %s", n.GetWithheldReason())
		} else if after, _ := d.walkOf(t, parent); !slices.Equal(untimed(before), untimed(after)) {
			t.Errorf("its files differ:\n%s", strings.Join(treewalk.Diff(untimed(before), untimed(after), 20), "\n"))
		}
		free(t, d, c)
	}
	if n := d.node(t, last.GetId()); n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || n.GetReplayOf() != "" {
		t.Errorf("the node itself is %v now", n)
	}
	if now := d.nodesOf(t, last.GetTreeId()); len(now) != len(was)+2*(turns+1) {
		t.Errorf("%d nodes, then %d", len(was), len(now))
	}

	alone, err := d.replays(t, last.GetId(), scratch)
	if err != nil || alone[0].GetError() != nil || len(alone[0].GetReplayed()) != turns || alone[0].GetReplayed()[0].GetReplayId() != "" || !alone[0].GetReplayed()[turns-1].GetSameOutput() {
		t.Fatalf("a scratch child: %v, %v", alone, err)
	}
	if got := d.hear(t, alone[0].GetSandbox().GetId(), "main", "echo $x $WHO"); got != "5 me\n" {
		t.Errorf("the scratch child's session says %q", got)
	}
	free(t, d, alone[0].GetSandbox())
}

// What comes out otherwise is told: output, also in what an observation has cut, and status.
func TestReplayTellsWhatDiffers(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	from := d.run(t, sb.GetId(), "mkdir /work").GetNode()
	var last string
	for _, shell := range []string{
		`echo "$BOXWOOD_SEED"`,
		`exit ${BOXWOOD_SEED:+3}`,
		`seq 3000`,
		`seq 1500; echo "seed ${BOXWOOD_SEED:-0123456789012345678}" | head -c 20; seq 1500`, // longer seeds are cut
		`[ -z "$BOXWOOD_SEED" ] || echo x >/work/more`,
	} {
		r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte(shell), OutputLimit: 1000}})
		if err != nil {
			t.Fatal(err)
		}
		last = d.captured(t, r.GetNode().GetId())[0].GetId()
	}
	d.evicted(t, from.GetId())
	got, err := d.replays(t, last, seeded)
	if err != nil || got[0].GetError() != nil {
		t.Fatal(got, err)
	}
	for i, want := range [][2]bool{{false, true}, {true, false}, {true, true}, {false, true}, {true, true}} {
		if p := got[0].GetReplayed()[i]; p.GetSameOutput() != want[0] || p.GetSameExit() != want[1] {
			t.Errorf("turn %d: %v", i, p)
		}
	}
	recorded := map[string]*boxwoodv1.ReplayedTurn{}
	for _, p := range got[0].GetReplayed() {
		recorded[p.GetReplayId()] = p
	}
	rows := 0
	for _, row := range d.rows(t, stats.Replays) {
		p := recorded[row["node"]]
		if p == nil {
			continue
		}
		rows++
		if row["replay_of"] != p.GetNodeId() || row["same_output"] != fmt.Sprint(p.GetSameOutput()) || row["same_exit"] != fmt.Sprint(p.GetSameExit()) || row["outcome"] != "ok" {
			t.Errorf("%v is recorded as %v", p, row)
		}
	}
	if rows != len(recorded) {
		t.Errorf("%d of %d turns that were run again are recorded", rows, len(recorded))
	}
	free(t, d, got[0].GetSandbox())
}

// A turn that nobody can ask for a second time is refused, with its reason and before
// anything ran.
func TestWhatCannotBeReplayed(t *testing.T) {
	d := running(t)
	for _, c := range []struct {
		name, reason string
		turn         func(t *testing.T, sandbox string)
	}{
		{"large stdin", "over the 1048576 bytes", func(t *testing.T, sandbox string) {
			_, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Command: &boxwoodv1.Command{Shell: []byte("wc -c >/work/n"), Stdin: make([]byte, 1<<20+1)}})
			if err != nil {
				t.Fatal(err)
			}
		}},
		{"cancelled", "stopped from outside", func(t *testing.T, sandbox string) {
			stream, err := d.client.RunTurn(ctx(t), &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Command: &boxwoodv1.Command{Shell: []byte("echo >/work/x; echo begun; sleep 100")}})
			if err == nil {
				_, err = stream.Recv() // it has begun
			}
			if err == nil {
				_, err = d.client.CancelTurn(ctx(t), &boxwoodv1.CancelTurnRequest{SandboxId: sandbox})
			}
			for err == nil {
				_, err = stream.Recv()
			}
			if err != io.EOF {
				t.Fatal(err)
			}
		}},
		{"interrupted", "interrupted", func(t *testing.T, sandbox string) {
			d.open(t, sandbox, "main")
			stream, err := d.client.RunTurn(ctx(t), &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Command: &boxwoodv1.Command{Session: "main", Shell: []byte("trap x=1 INT; echo begun; until [ $x ]; do :; done")}})
			if err == nil {
				_, err = stream.Recv()
			}
			if err == nil {
				_, err = d.client.Interrupt(ctx(t), &boxwoodv1.InterruptRequest{SandboxId: sandbox, Session: "main"})
			}
			for err == nil {
				_, err = stream.Recv()
			}
			if err != io.EOF {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, sb := d.newTree(t)
			from := d.run(t, sb.GetId(), "mkdir /work").GetNode()
			c.turn(t, sb.GetId())
			last := d.captured(t, d.run(t, sb.GetId(), "echo >/work/last").GetNode().GetId())[0]
			d.evicted(t, from.GetId())
			nodes := len(d.nodesOf(t, last.GetTreeId()))
			_, err := d.replays(t, last.GetId())
			if reason(err) != "not_repeatable" || !strings.Contains(err.Error(), c.reason) {
				t.Fatalf("replaying it: %v", err)
			}
			if list := d.sandboxes(t, last.GetTreeId()); len(list) > 0 || len(d.nodesOf(t, last.GetTreeId())) != nodes {
				t.Fatalf("something ran: %v", list)
			}
		})
	}
}

// A node that was never captured is made again, too. A replay that doesn't come to its
// end leaves no sandbox, and its siblings go on.
func TestReplayOfWhatWasNeverSaved(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	from := d.captured(t, d.run(t, sb.GetId(), "mkdir /work").GetNode().GetId())[0]
	last := d.captured(t, d.run(t, sb.GetId(), `mv /run /gone; [ -z "$BOXWOOD_SEED" ] || { echo begun; sleep 100; }`).GetNode().GetId())[0]
	if last.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		t.Fatal("it isn't withheld: ", last)
	}
	got, err := d.replays(t, last.GetId())
	if err != nil || got[0].GetError() != nil || !got[0].GetReplayed()[0].GetSameExit() {
		t.Fatal(got, err)
	}
	if n := d.captured(t, got[0].GetSandbox().GetHeadId())[0]; n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || n.GetReplayOf() != last.GetId() || n.GetParentId() != from.GetId() {
		t.Errorf("its replay's node is %v", n)
	}
	d.ok(t, got[0].GetSandbox().GetId(), "ls /gone")
	free(t, d, got[0].GetSandbox(), sb)

	limit, cancel := context.WithTimeout(ctx(t), time.Second)
	defer cancel()
	stream, err := d.client.Fork(limit, &boxwoodv1.ForkRequest{Replay: true, Seed: 1,
		Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: last.GetId()}, Count: 1}}})
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.DeadlineExceeded {
		t.Fatal("a replay beyond its deadline: ", err)
	}
	until(t, "the child that wasn't finished to be gone", func() bool { return len(d.sandboxes(t, last.GetTreeId())) == 0 })

	// Who is being made again is busy for everyone, and can be released.
	stopped := make(chan []*boxwoodv1.ForkResult, 1)
	go func() {
		r, _ := d.replays(t, last.GetId(), seeded)
		stopped <- r
	}()
	var child *boxwoodv1.Sandbox
	until(t, "the turn to run again", func() bool {
		for _, s := range d.sandboxes(t, last.GetTreeId()) {
			if s.GetBusy() {
				child = s
			}
		}
		return child != nil
	})
	if _, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: child.GetId(), Command: &boxwoodv1.Command{Shell: []byte("true")}}); reason(err) != "sandbox_busy" {
		t.Errorf("a turn in the middle of a replay: %v", err)
	}
	free(t, d, child)
	if r := <-stopped; len(r) != 1 || r[0].GetError() == nil {
		t.Errorf("a replay whose sandbox was released: %v", r)
	}
	if list := d.sandboxes(t, last.GetTreeId()); len(list) != 0 {
		t.Errorf("left: %v", list)
	}
}

// Siblings have seeds of their own, or one that they share.
func TestSeeds(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	nodes := []string{d.captured(t, d.run(t, sb.GetId(), "echo >/a").GetNode().GetId())[0].GetId(), d.captured(t, d.run(t, sb.GetId(), "echo >/b").GetNode().GetId())[0].GetId()}
	seeds := func(node string, same bool) (out []string) {
		got, err := d.replays(t, node, ofTwo, seeded, func(r *boxwoodv1.ForkRequest) { r.SameSeed = same })
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range got {
			out = append(out, d.ok(t, r.GetSandbox().GetId(), `echo "$BOXWOOD_SEED"`))
			free(t, d, r.GetSandbox())
		}
		return out
	}
	own, same, other := seeds(nodes[0], false), seeds(nodes[0], true), seeds(nodes[1], true)
	if own[0] == own[1] || same[0] != same[1] || same[0] == "\n" || other[0] != other[1] || same[0] == other[0] {
		t.Errorf("own %q, shared %q, another node's %q", own, same, other)
	}
}
