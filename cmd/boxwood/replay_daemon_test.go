package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine/check"
	"github.com/boxwood-rl/boxwood/internal/miniroot"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// These tests are of a replay's whole way: this test binary, started again with
// serveArgs, is a daemon as `boxwood serve` starts it.
const serveArgs = "BOXWOOD_TEST_SERVE"

func TestMain(m *testing.M) {
	if args := os.Getenv(serveArgs); args != "" {
		os.Exit(execute(context.Background(), strings.Fields(args), terminal()))
	}
	if os.Getenv(cliArgs) != "" {
		os.Exit(execute(context.Background(), os.Args[1:], terminal()))
	}
	os.Exit(m.Run())
}

// served is a daemon and what talks to it.
type served struct {
	t       *testing.T
	address string
	client  pb.BoxwoodClient
}

func startServed(t *testing.T) *served {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	dir, err := os.MkdirTemp("/var/tmp", "bw") // a real disk, and a short path for sockets
	if err != nil {
		t.Fatal(err)
	}
	name := "boxwood-test-" + filepath.Base(dir)
	t.Cleanup(func() {
		found, err := check.Run(context.Background(), check.Options{State: filepath.Join(dir, "state"), Cgroup: name})
		if err != nil {
			t.Error(err)
		} else if len(found.Findings) > 0 {
			t.Errorf("check: %v", found.Findings)
		}
		_ = os.RemoveAll(dir)
	})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d := &served{t: t, address: filepath.Join(dir, "s")}
	c := exec.Command(self)
	c.Env = append(os.Environ(), fmt.Sprintf("%s=serve --state %s/state --socket %s --pool-size 4G --zygotes 4 --cgroup %s --log-level debug --stop-on-eof",
		serveArgs, dir, d.address, name))
	hold, err := c.StdinPipe() // it ends with this process, whatever ends that
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(d.log())
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	c.Stderr = log
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var died error
	ended := make(chan struct{})
	go func() { died = c.Wait(); close(ended) }()
	t.Cleanup(func() {
		hold.Close()
		select {
		case <-ended:
			if died != nil {
				t.Errorf("the daemon ended with %v", died)
			}
		case <-time.After(60 * time.Second):
			_ = c.Process.Signal(syscall.SIGQUIT)
			<-ended
			t.Error("the daemon didn't stop within 60 s")
		}
		if t.Failed() {
			said, _ := os.ReadFile(d.log())
			t.Logf("daemon's log:\n%s", said)
		}
	})
	a := &app{getenv: func(string) string { return "" }, address: d.address}
	if d.client, err = a.client(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.conn.Close() })
	for deadline := time.Now().Add(60 * time.Second); ; {
		_, err := d.client.GetInfo(context.Background(), &pb.GetInfoRequest{})
		if err == nil {
			break
		}
		select {
		case <-ended:
			t.Fatalf("the daemon ended with %v", died)
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("no daemon answers: %v", err)
		}
	}
	if out, _, status := d.run("image", "import", miniroot.Make(t), "--name", "mini"); status != 0 {
		t.Fatalf("importing: %s", out)
	}
	return d
}

// log is the file of the daemon's log.
func (d *served) log() string { return filepath.Join(filepath.Dir(d.address), "log") }

func (d *served) run(args ...string) (out, errOut string, status int) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return d.runIn(ctx, args...)
}

func (d *served) runIn(ctx context.Context, args ...string) (out, errOut string, status int) {
	var o, e bytes.Buffer
	a := &app{in: strings.NewReader(""), out: &o, err: &e, getenv: func(string) string { return "" }}
	status = execute(ctx, append([]string{"--address", d.address}, args...), a)
	return o.String(), e.String(), status
}

// replay gives the lines of --json: turns, then the last.
func (d *served) replay(status int, args ...string) (turns []turnReport, last outcome) {
	d.t.Helper()
	out, errOut, got := d.run(append([]string{"replay", "--json", "--image", "mini"}, args...)...)
	if got != status {
		d.t.Fatalf("status %d, want %d; %s\n%s", got, status, errOut, out)
	}
	return d.lines(out)
}

func (d *served) lines(out string) (turns []turnReport, last outcome) {
	d.t.Helper()
	for in := json.NewDecoder(strings.NewReader(out)); ; {
		var line json.RawMessage
		if err := in.Decode(&line); err == io.EOF {
			return turns, last
		} else if err != nil {
			d.t.Fatalf("%v in %s", err, out)
		}
		var t turnReport
		into := any(&t)
		if bytes.Contains(line, []byte(`"matched_pct"`)) {
			into = &last
		}
		if err := json.Unmarshal(line, into); err != nil {
			d.t.Fatalf("%v in %s", err, line)
		}
		if into == any(&t) {
			turns = append(turns, t)
		}
	}
}

func writeText(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// sweAgent makes a trajectory of SWE-agent of actions and observations.
func sweAgent(t *testing.T, steps ...string) string {
	type step struct {
		Action      string `json:"action"`
		Observation string `json:"observation"`
	}
	var all []step
	for i := 0; i < len(steps); i += 2 {
		all = append(all, step{steps[i], steps[i+1]})
	}
	text, err := json.Marshal(map[string]any{"trajectory": all})
	if err != nil {
		t.Fatal(err)
	}
	return writeText(t, "a.traj", string(text))
}

// If it fails, what `boxwood replay` says of recorded actions isn't what they
// do in a sandbox, or one trajectory stops others.
func TestReplayOnADaemon(t *testing.T) {
	d := startServed(t)
	start := writeText(t, "start.json", `{"cwd":"/w","files":[{"path":"/w/src/a.txt","content":"one\ntwo\n","mode":"755"},{"path":"/w/b.txt","content":"b\n"}]}`)

	t.Run("the agent's tools and its shell", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		file := sweAgent(t,
			"cd src && x=5", "",
			"find_file a.txt", "Found 1 matches for \"a.txt\" in /w/src:\n/w/src/a.txt",
			"open a.txt", "[File: a.txt (2 lines total)]\n1:one\n2:two",
			"edit one 1", "Text replaced. Please review the changes and make sure they are correct:\n\n1. The edited file is correctly indented\n"+
				"2. The edited file does not contain duplicate lines\n3. The edit does not break existing functionality\n\nEdit the file again if necessary.\n[File: /w/src/a.txt (2 lines total)]\n1:1\n2:two",
			"edit two '  2'", "Your proposed edit has introduced new syntax error(s). Please read",
			"cat a.txt; echo $x; stat -c %a a.txt", "1\ntwo\n5\n755",
			"str_replace_editor view /w/none", "The path /w/none does not exist. Please provide a valid path.",
			"create new/file.py", "[File: new/file.py (1 lines total)]\n1:",
			"search_dir two /w", "Found 1 matches for \"two\" in /w:\n/w/src/a.txt (1 matches)\nEnd of matches for \"two\" in /w",
			"submit", "done")
		turns, o := d.replay(0, file, "--start", start)
		if o.Turns != 8 || o.Compared != 8 || o.Matched != 8 || !o.Evidence || o.Skipped["an edit that the agent's linter refused"] != 1 || o.Skipped["a tool of SWE-agent (submit)"] != 1 {
			t.Errorf("%+v\n%+v", o, turns)
		}
		verdicts := ""
		for _, turn := range turns {
			verdicts += turn.Verdict + " "
		}
		// To look isn't to change. That the shell stands elsewhere is a change of it, and that it knows where a program lies.
		if want := "process none none files  process none files none  "; verdicts != want {
			t.Errorf("verdicts %q, want %q", verdicts, want)
		}
		if o.Bytes == nil || *o.Bytes <= 0 {
			t.Error("no bytes")
		}
	})

	t.Run("the first difference and its cause", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		file := sweAgent(t, "touch /root/a", "", "cat /w/gone.txt", "text", "no-such-program", "fine", "echo the same", "the same")
		turns, o := d.replay(1, file)
		if o.Matched != 2 || o.Compared != 4 || o.Evidence || o.FirstDivergence != 2 || o.Counted != 1 || o.Files+o.Both != 1 || o.Silent != 0 ||
			!strings.HasPrefix(o.Cause, "a file or folder isn't there (") {
			t.Errorf("%+v\n%+v", o, turns)
		}
		out, _, status := d.run("replay", "--image", "mini", file, file)
		if status != 1 || strings.Count(out, "\nnot evidence: "+file) != 2 || !strings.Contains(out, "the first difference is at step 2: a file or folder isn't there (") {
			t.Errorf("status %d\n%s", status, out)
		}
	})

	t.Run("modes", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		file := writeText(t, "m.jsonl", `{"format":"boxwood-trajectory-1"}`+"\n"+`{"command":"echo 1 >/root/a","expect_exit":0}`+"\n"+`{"command":"true","expect_exit":0}`)
		for _, c := range []struct {
			mode  string
			owns  bool // the turn that changes nothing has a checkpoint of its own
			saved bool
		}{{"sparse", false, true}, {"full", true, true}, {"files", false, true}, {"uncaptured", false, false}} {
			turns, o := d.replay(0, "--mode", c.mode, "--run", "modes", file)
			if len(turns) != 2 || o.Earlier != 0 || o.Bytes == nil {
				t.Errorf("%s: %+v\n%+v", c.mode, o, turns)
				continue
			}
			a, b := d.node(turns[0].Node), d.node(turns[1].Node)
			if saved := a.CheckpointId != ""; saved != c.saved || saved && (b.CheckpointId != a.CheckpointId) != c.owns {
				t.Errorf("%s: checkpoints %q and %q", c.mode, a.CheckpointId, b.CheckpointId)
			}
			if !c.saved && (*o.Bytes != 0 || b.Capture != pb.CaptureStatus_CAPTURE_STATUS_WITHHELD) {
				t.Errorf("%s: %d bytes, %v", c.mode, *o.Bytes, b.Capture)
			}
		}
		if _, errOut, status := d.run("replay", "--mode", "some", file); status != failureStatus || !strings.Contains(errOut, "sparse, full, files or uncaptured") {
			t.Errorf("status %d, %s", status, errOut)
		}
	})

	t.Run("a report of replays", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		good := writeText(t, "good.jsonl", `{"format":"boxwood-trajectory-1"}`+"\n"+`{"command":"echo 1 >/root/a","expect_exit":0}`+"\n"+`{"command":"cat /root/a","expect_exit":0}`+"\n"+`{"command":"ls /","expect_exit":0}`)
		bad := filepath.Join(filepath.Dir(good), "bad.jsonl")
		if err := os.WriteFile(bad, []byte(`{"format":"boxwood-trajectory-1"}`+"\n"+`{"command":"true","expect_exit":1}`+"\n"+`{"command":"true","expect_exit":0}`), 0o600); err != nil {
			t.Fatal(err)
		}
		sparse, _, _ := d.run("replay", "--json", "--image", "mini", "--jobs", "2", good, bad)
		full, _, _ := d.run("replay", "--json", "--image", "mini", "--mode", "full", good)
		c := cli{address: d.address}
		f := c.figures(t, writeText(t, "replay.jsonl", sparse+full))
		for name, want := range map[string]string{
			"trajectories":           "[[bad.jsonl sparse 2 50 1 exit 0, recorded 1 not evidence] [good.jsonl sparse 3 100 <nil>  yes] [good.jsonl full 3 100 <nil>  yes]]",
			"verdicts_by_trajectory": fmt.Sprintf("[[good.jsonl 3 2 1 0 0 %v]]", 200/3.0),
			"verdicts_by_tool":       "[[cat 1 1 0 0 0 100] [echo 1 0 1 0 0 0] [ls 1 1 0 0 0 100]]",
			"savings":                fmt.Sprintf("[[sparse 1 1 0] [sparse 2 1 50] [sparse 3 1 %v] [full 1 1 0] [full 2 2 0] [full 3 3 0]]", 200/3.0),
		} {
			if got := fmt.Sprint(f[name].Rows); got != want {
				t.Errorf("%s: %s, want %s", name, got, want)
			}
		}
		if bytes := f["bytes_by_policy"].Rows; len(bytes) != 2 || bytes[0][0] != "sparse" || bytes[0][3].(float64) <= 0 || bytes[1][2] != 3.0 {
			t.Errorf("bytes: %v", bytes)
		}
		if f["tree"].N != 4 || f["exposed_delays"].N != 8 || len(f["timelines"].Rows) != 3 {
			t.Errorf("%v", f)
		}
	})

	t.Run("what hangs, is binary or isn't there", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		hang := writeText(t, "h.jsonl", `{"format":"boxwood-trajectory-1"}`+"\n"+`{"command":"sleep 1000","expect_exit":0}`+"\n"+`{"command":"printf '\\xff\\x00\\x1b[2J'","expect_exit":0,"expect_stdout":"?"}`)
		good := writeText(t, "g.jsonl", `{"format":"boxwood-trajectory-1"}`+"\n"+`{"command":"echo fine","expect_exit":0,"expect_stdout":"fine\n"}`)
		noImage := writeText(t, "n.jsonl", `{"format":"boxwood-trajectory-1","start":"s.json"}`+"\n"+`{"command":"true"}`)
		if err := os.WriteFile(filepath.Join(filepath.Dir(noImage), "s.json"), []byte(`{"image":"nowhere:1"}`), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(good+".start.json", []byte(`{"image":"mini"}`), 0o600); err != nil {
			t.Fatal(err)
		}
		out, errOut, status := d.run("replay", "--timeout", "500ms", hang, noImage, good)
		if status != failureStatus || !strings.Contains(errOut, "neither --image nor a start state") || !strings.Contains(errOut, `nowhere:1`) || !strings.Contains(out, "1 of 1 compared") {
			t.Errorf("status %d, %s\n%s", status, errOut, out)
		}
		turns, o := d.replay(1, "--timeout", "500ms", hang)
		if len(turns) != 2 || turns[0].Different != "it did not end in time" || turns[1].Match || o.Turns != 2 {
			t.Errorf("%+v\n%+v", o, turns)
		}
		if out, _, _ := d.run("replay", "--image", "mini", "--timeout", "500ms", hang); strings.ContainsAny(out, "\x1b\x00") {
			t.Errorf("control characters of a sandbox reached the terminal: %q", out)
		}
	})

	t.Run("paths of a tree as ATIF", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		out, _, status := d.run("tree", "new", "--image", "mini", "-q")
		sandbox := strings.TrimSpace(out)
		for _, command := range []string{"echo shared | tee /root/a", "printf '\\xff'; false"} {
			d.run("exec", sandbox, "-c", command)
		}
		child, _, forked := d.run("fork", sandbox, "-q")
		d.run("exec", sandbox, "-c", "cat /root/a; echo left")
		d.run("exec", strings.TrimSpace(child), "-c", "cat /root/a; echo right")
		list, err := d.client.ListSandboxes(context.Background(), &pb.ListSandboxesRequest{})
		if err != nil || status+forked != 0 {
			t.Fatal(status, forked, err)
		}
		tree := list.Sandboxes[slices.IndexFunc(list.Sandboxes, func(s *pb.Sandbox) bool { return s.Id == sandbox })].TreeId
		folder := filepath.Join(t.TempDir(), "atif")
		out, errOut, status := d.run("tree", "atif", tree, "-o", folder)
		files := strings.Fields(out)
		if status != 0 || len(files) != 2 {
			t.Fatalf("status %d, %s, %s", status, out, errOut)
		}
		d.run("release", sandbox, strings.TrimSpace(child))
		// The first file has all its turns, the second only what isn't in the first.
		_, first := d.replay(0, files[0])
		if first.Turns != 3 || first.Matched != 3 {
			t.Errorf("%+v", first)
		}
		out, _, _ = d.run("replay", "--list", files[1])
		if !strings.Contains(out, "1 of 3 actions can be run again\n  2 can't be: context copied from an earlier file\n") {
			t.Error(out)
		}
		text, err := os.ReadFile(files[1])
		if err != nil || !strings.Contains(string(text), "\"right") && !strings.Contains(string(text), "right\\n") || strings.Contains(string(text), "left\\n") {
			t.Errorf("%v: %s", err, text)
		}
	})

	t.Run("keys typed in a terminal, with waits", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		file := writeText(t, "k.cast", `{"version":2,"width":80,"height":24}
[1, "i", "cd /w; tty >/root/ttx"]
[1.2, "i", "\u007fy\r"]
[2, "o", "shown"]
[601, "i", "pwd > /root/cwd\r"]
[602, "i", "q"]`)
		turns, o := d.replay(0, file, "--start", start, "--speed", "1000")
		if o.Turns != 2 || o.Compared != 0 || o.MatchedPct != nil || o.Evidence || o.Skipped["keystrokes that are not a command line"] != 1 {
			t.Errorf("%+v\n%+v", o, turns)
		}
		b := d.node(turns[1].Node)
		root, err := d.client.ListNodes(context.Background(), &pb.ListNodesRequest{TreeId: o.Tree, Limit: 1})
		if err != nil {
			t.Fatal(err)
		}
		first, err := root.Recv()
		if err != nil || first.ParentId != "" {
			t.Fatal(first, err)
		}
		if gap := time.Duration(b.StartedAt - first.StartedAt); gap < 600*time.Millisecond {
			t.Errorf("the second line was typed %v after the start, 10 minutes were recorded from the first to it, of which a thousandth is 600ms", gap)
		}
		out, _, status := d.run("run", "--node", b.Id, "-c", "cat /root/cwd /root/tty")
		if status != 0 || !strings.HasPrefix(out, "/w\n/dev/pts/") {
			t.Errorf("status %d, %q", status, out)
		}
	})
}

func (d *served) node(id string) *pb.Node {
	d.t.Helper()
	n, err := d.client.GetNode(context.Background(), &pb.GetNodeRequest{NodeId: id})
	if err != nil {
		d.t.Fatal(err)
	}
	return n
}

// If it fails, a replay that was stopped runs turns a second time when it goes
// on, or leaves some out, or loses what its tools and its shell stood at.
func TestReplayGoesOnWhereItWas(t *testing.T) {
	d := startServed(t)
	const last = "cat log; echo $x; pwd"
	file := sweAgent(t, "mkdir -p /w && cd /w && x=5 && echo 1 >> log", "", "create f.py", "[File: f.py (1 lines total)]\n1:", "echo 2 >> log", "",
		"submit", "", "until test -e /root/go; do sleep 0.05; done; echo 3 >> log", "",
		"insert a", "[File: /w/f.py (2 lines total)]\n1:\n2:a", "echo 4 >> log; cat f.py", "\na", last, "1\n2\n3\n4\n5\n/w")
	args := []string{"replay", "--json", "--image", "mini", "--run", "monday", "--timeout", "60s", file}

	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan int, 1)
	go func() {
		_, _, status := d.runIn(ctx, args...)
		stopped <- status
	}()
	var tree *pb.Tree
	d.until("the turn that waits runs", func() bool {
		trees, err := d.client.ListTrees(context.Background(), &pb.ListTreesRequest{Labels: map[string]string{labelRun: "monday"}})
		if err != nil || len(trees.Trees) == 0 {
			return false
		}
		tree = trees.Trees[0]
		list, err := d.client.ListSandboxes(context.Background(), &pb.ListSandboxesRequest{TreeId: tree.Id})
		return err == nil && len(list.Sandboxes) == 1 && list.Sandboxes[0].Busy && len(d.turnsOf(tree.Id)) == 3
	})
	cancel()
	if status := <-stopped; status != failureStatus {
		t.Fatalf("the attempt that was stopped ended with %d", status)
	}

	// The one that goes on waits for ever, too, and is stopped by its deadline.
	args[7] = "1s"
	out, errOut, status := d.run(args...)
	turns, o := d.lines(out)
	if status != 1 || o.Turns != 7 || o.Earlier != 3 || o.Tree != tree.Id {
		t.Fatalf("status %d, %+v, %s\n%s", status, o, errOut, out)
	}
	if final := d.node(turns[len(turns)-1].Node); string(final.Observation.Stdout) != "1\n2\n4\n5\n/w\n" {
		t.Errorf("at its end the replay sees %q", final.Observation.Stdout)
	}
	if o.FirstDivergence != 5 || o.Cause != "it did not end in time; 1 actions before it could not be run again" || o.Counted != 3 {
		t.Errorf("%+v", o)
	}
	if turns[5].Different != "" || turns[6].Different != "" {
		t.Errorf("the tool that went on: %+v, %+v", turns[5], turns[6])
	}

	// A third attempt has nothing to run, and says the same.
	nodes := d.turnsOf(tree.Id)
	out, errOut, status = d.run(args...)
	_, again := d.lines(out)
	if status != 1 || again.Turns != 7 || again.Earlier != 7 || again.Matched != o.Matched {
		t.Errorf("status %d, %+v, %s\n%s", status, again, errOut, out)
	}
	if after := d.turnsOf(tree.Id); !slices.Equal(after, nodes) {
		t.Errorf("nodes %v, before %v", after, nodes)
	}

	// The same file twice is two trajectories, side by side.
	args = append(args, file, file)
	args[5] = "tuesday"
	out, errOut, status = d.run(append(args, "--jobs", "3")...)
	trees, err := d.client.ListTrees(context.Background(), &pb.ListTreesRequest{Labels: map[string]string{labelRun: "tuesday"}})
	if err != nil || len(trees.Trees) != 3 || status != 1 || !strings.Contains(out, `"trajectories":3`) {
		t.Errorf("status %d, %v, %v, %s\n%s", status, err, trees, errOut, out)
	}
}

// turnsOf are the turns of events that have ended.
func (d *served) turnsOf(tree string) (ids []string) {
	d.t.Helper()
	stream, err := d.client.ListNodes(context.Background(), &pb.ListNodesRequest{TreeId: tree, Brief: true})
	if err != nil {
		d.t.Fatal(err)
	}
	list, err := all(stream.Recv)
	if err != nil {
		d.t.Fatal(err)
	}
	for _, n := range list {
		if n.Labels[labelTurn] != "" && n.TurnStatus != pb.TurnStatus_TURN_STATUS_CANCELLED {
			ids = append(ids, n.Id)
		}
	}
	return ids
}

func (d *served) until(what string, condition func() bool) {
	d.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(60 * time.Second); !condition(); <-tick.C {
		if time.Now().After(deadline) {
			d.t.Fatalf("after a minute it is still not so that %s", what)
		}
	}
}
