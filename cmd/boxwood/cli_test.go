package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/ipc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/ids"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

var update = flag.Bool("update", false, "write the golden files anew")

// fake answers as a daemon would, from a script: sandboxes run only "echo",
// "exit" and "loud". It is for how the command line asks and shows; the engine
// has tests of its own.
type fake struct {
	pb.UnimplementedBoxwoodServer
	requests []proto.Message
	recorder *stats.Recorder
}

const (
	treeID    = "tr_01kb0000000000000000000001"
	rootID    = "nd_01kb0000000000000000000001"
	nodeID    = "nd_01kb0000000000000000000002"
	sandboxID = "sb_01kb0000000000000000000001"
)

func (f *fake) saw(m proto.Message) { f.requests = append(f.requests, proto.Clone(m)) }

func failure(code codes.Code, message string, detail *pb.Error) error {
	s, err := status.New(code, message).WithDetails(detail)
	if err != nil {
		panic(err)
	}
	return s.Err()
}

func (f *fake) CreateTree(_ context.Context, r *pb.CreateTreeRequest) (*pb.CreateTreeResponse, error) {
	f.saw(r)
	if r.GetImage() == "missing:1" {
		return nil, failure(codes.NotFound, `no image "missing:1"`, &pb.Error{Reason: "no_such_image", Origin: pb.Error_ORIGIN_CLIENT, Hint: "import one"})
	}
	return &pb.CreateTreeResponse{Tree: &pb.Tree{Id: treeID, RootId: rootID}, Root: &pb.Node{Id: rootID, CheckpointId: "ck_1", CheckpointNodeId: rootID},
		Sandbox: &pb.Sandbox{Id: sandboxID, HeadId: rootID}}, nil
}

func (f *fake) RunTurn(r *pb.RunTurnRequest, s grpc.ServerStreamingServer[pb.TurnEvent]) error {
	f.saw(r)
	if r.SandboxId != sandboxID {
		return failure(codes.Internal, "pool is\x1b[2J broken", &pb.Error{Reason: "internal", Origin: pb.Error_ORIGIN_INFRASTRUCTURE, RequestId: "rq7"})
	}
	words := strings.Fields(string(r.Command.Shell))
	for _, a := range r.Command.Argv {
		words = append(words, string(a))
	}
	n := &pb.Node{Id: nodeID, ParentId: rootID, TurnStatus: pb.TurnStatus_TURN_STATUS_COMPLETED, Verdict: pb.Verdict_VERDICT_NONE, Observation: &pb.Observation{}}
	switch words[0] {
	case "echo":
		_ = s.Send(&pb.TurnEvent{Event: &pb.TurnEvent_Stdout{Stdout: []byte(strings.Join(words[1:], " ") + "\n")}})
	case "loud":
		_ = s.Send(&pb.TurnEvent{Event: &pb.TurnEvent_Stdout{Stdout: []byte("\x1b[31mraw\xff")}})
		_ = s.Send(&pb.TurnEvent{Event: &pb.TurnEvent_Stderr{Stderr: []byte("err")}})
	case "exit":
		fmt.Sscan(words[1], &n.Observation.ExitCode)
	case "signal":
		n.Observation.ExitCode, n.Observation.Signal = -1, 9
	case "hang":
		n.TurnStatus = pb.TurnStatus_TURN_STATUS_TIMED_OUT
	case "die":
		n.TurnStatus = pb.TurnStatus_TURN_STATUS_LOST
	}
	return s.Send(&pb.TurnEvent{Event: &pb.TurnEvent_Result{Result: &pb.TurnResult{Node: n, Timings: &pb.Timings{}, SandboxLost: words[0] == "die"}}})
}

func (f *fake) Release(_ context.Context, r *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
	f.saw(r)
	return &pb.ReleaseResponse{Released: int64(len(r.SandboxIds))}, nil
}

func (f *fake) Fork(r *pb.ForkRequest, s grpc.ServerStreamingServer[pb.ForkResult]) error {
	f.saw(r)
	for i := range r.Wants[0].Count {
		result := &pb.ForkResult{Child: i, ReadyNs: 1_900_000, Outcome: &pb.ForkResult_Sandbox{Sandbox: &pb.Sandbox{Id: fmt.Sprintf("sb_child%d", i)}}}
		if r.Replay {
			result.Replayed = []*pb.ReplayedTurn{{NodeId: "nd_a", SameOutput: true, SameExit: true}, {NodeId: "nd_b", SameExit: true}, {NodeId: "nd_c"}}
		}
		if i == 2 {
			result = &pb.ForkResult{Child: i, Code: int32(codes.ResourceExhausted), Message: "the pool is full\x07", Outcome: &pb.ForkResult_Error{Error: &pb.Error{Reason: "pool_full", Hint: "prune"}}}
		}
		if err := s.Send(result); err != nil {
			return err
		}
	}
	return nil
}

func (f *fake) GetNode(_ context.Context, r *pb.GetNodeRequest) (*pb.Node, error) {
	return &pb.Node{Id: r.NodeId, TreeId: treeID, ParentId: rootID, Depth: 1, Action: &pb.Action{Text: []byte("make \x1b]0;owned\x07 all")},
		Observation: &pb.Observation{Stdout: []byte("first\nlast \xff\x1b[2J\n"), StdoutOmitted: 5000, StdoutCutAt: 6, Stderr: []byte("warn\n"), ExitCode: 2},
		TurnStatus:  pb.TurnStatus_TURN_STATUS_COMPLETED, Verdict: pb.Verdict_VERDICT_FILES, Reasons: []string{"2 files differ"}, External: true,
		Effects:     []*pb.Effect{{Kind: pb.Effect_FILE_CREATED, Subject: []byte("/work/\x1ba")}, {Kind: pb.Effect_FILE_RENAMED, Subject: []byte("/work/b"), Detail: "from /work/c"}},
		EffectCount: 70, CheckpointId: "ck_1", CheckpointNodeId: r.NodeId, Capture: pb.CaptureStatus_CAPTURE_STATUS_CAPTURED,
		Rewards: map[string]float64{"tests": 0.5, "lint": 1}, Value: 0.25, Visits: 4, Labels: map[string]string{"edit": "x"}, Pinned: true,
		PayloadDigest: "abc", PayloadBytes: 2048, StartedAt: 1_767_323_045_000_000_000, EndedAt: 1_767_323_045_250_000_000, SandboxId: sandboxID}, nil
}

func (f *fake) ListSessions(context.Context, *pb.ListSessionsRequest) (*pb.ListSessionsResponse, error) {
	return &pb.ListSessionsResponse{Sessions: []*pb.Session{{Name: "main"}}}, nil
}

func (f *fake) OpenSession(_ context.Context, r *pb.OpenSessionRequest) (*pb.OpenSessionResponse, error) {
	f.saw(r)
	return &pb.OpenSessionResponse{Result: &pb.TurnResult{Node: &pb.Node{Id: nodeID}}}, nil
}

func (f *fake) ListImages(context.Context, *pb.ListImagesRequest) (*pb.ListImagesResponse, error) {
	return &pb.ListImagesResponse{Images: []*pb.Image{
		{Digest: "sha256:" + strings.Repeat("ab", 32), Names: []string{"task:1", "日本:2"}, Layers: []string{"a", "b"}, Bytes: 206_800_000},
		{Digest: "sha256:" + strings.Repeat("cd", 32), Names: []string{"x\x1b[2J:1"}, Layers: []string{"a"}, Bytes: 999},
	}}, nil
}

func (f *fake) Annotate(_ context.Context, r *pb.AnnotateRequest) (*pb.AnnotateResponse, error) {
	f.saw(r)
	return &pb.AnnotateResponse{}, nil
}

func (f *fake) ExportStats(r *pb.ExportStatsRequest, s grpc.ServerStreamingServer[pb.ExportStatsChunk]) error {
	var b bytes.Buffer
	if err := f.recorder.Export(s.Context(), r.Table, stats.Filter{Tree: ids.Tree(r.TreeId)}, &b); err != nil {
		return failure(codes.NotFound, err.Error(), &pb.Error{Hint: "tables are turns, nodes, forks and captures"})
	}
	for b.Len() > 0 {
		if err := s.Send(&pb.ExportStatsChunk{Data: bytes.Clone(b.Next(max(100, b.Len()/20)))}); err != nil {
			return err
		}
	}
	return nil
}

// GetInfo tells of a host with more to do from call to call, two seconds apart.
func (f *fake) GetInfo(_ context.Context, r *pb.GetInfoRequest) (*pb.GetInfoResponse, error) {
	f.saw(r)
	n := int64(0)
	for _, m := range f.requests {
		if _, ok := m.(*pb.GetInfoRequest); ok {
			n++
		}
	}
	return &pb.GetInfoResponse{Version: "1.2.3", Sandboxes: 2, Nodes: 40, ZygotesReady: 8, PoolBytesUsed: 3e9, PoolBytesTotal: 100e9,
		Queues: []*pb.Queue{
			{Line: "boxes", Class: "fork", Slots: 4, Running: 3, Waiting: 12, Tenants: 2, OldestNs: 30e6, Started: 10 * n, Done: 10 * n, WaitNs: 50e6 * n, TookNs: 20e6 * n, Refused: n},
			{Line: "captures", Class: "shadow", Slots: 4, Limit: 2, Started: 7, Done: 7, Promoted: n, Exposed: n, ExposedNs: 4e6 * n},
		},
		Host: &pb.HostLoad{At: 2e9 * n, HasStalls: true, CpuSomeNs: 1e9 * n, IoSomeNs: 2e8 * n, MemoryTotal: 24e9, MemoryAvailable: 20e9, DaemonCpuNs: 5e8 * n, DaemonResident: 120e6}}, nil
}

func (f *fake) ListTrees(_ context.Context, r *pb.ListTreesRequest) (*pb.ListTreesResponse, error) {
	f.saw(r)
	return &pb.ListTreesResponse{Trees: []*pb.Tree{{Id: treeID, SandboxCount: 2, NodeCount: 40, CheckpointCount: 9, Run: "r/1", Labels: map[string]string{"job": "a\x1b[2Jb"}}}}, nil
}

func (f *fake) ListSandboxes(_ context.Context, r *pb.ListSandboxesRequest) (*pb.ListSandboxesResponse, error) {
	f.saw(r)
	return &pb.ListSandboxesResponse{Sandboxes: []*pb.Sandbox{{Id: "sb_rests", TreeId: treeID, HeadId: rootID}, {Id: sandboxID, TreeId: treeID, HeadId: nodeID, Busy: true}}}, nil
}

// cli runs one command line against the fake.
type cli struct {
	*fake
	address string
}

func newCLI(t *testing.T) *cli {
	t.Helper()
	recorder, err := stats.New(stats.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		recorder.Fork(stats.ForkRow{Request: "rq", Node: nodeID, Ready: time.Duration(i+1) * time.Millisecond, Outcome: stats.OK, Batch: 20})
	}
	c := &cli{fake: &fake{recorder: recorder}, address: filepath.Join(t.TempDir(), "s")}
	listener, err := net.Listen("unix", c.address)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pb.RegisterBoxwoodServer(server, c.fake)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return c
}

func (c *cli) run(args ...string) (out, errOut string, status int) {
	var o, e bytes.Buffer
	a := &app{in: strings.NewReader("input"), out: &o, err: &e, getenv: func(name string) string {
		return map[string]string{"BOXWOOD_ADDRESS": c.address}[name]
	}}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	status = execute(ctx, args, a)
	return o.String(), e.String(), status
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs; got:\n%s", path, got)
	}
}

func TestShown(t *testing.T) {
	t.Setenv("TZ", "UTC")
	time.Local = time.UTC
	for _, c := range []struct {
		file string
		args []string
	}{
		{"node-show.txt", []string{"node", "show", nodeID}},
		{"image-list.txt", []string{"image", "list"}},
		{"stats-forks.txt", []string{"stats", "forks"}},
		{"help.txt", []string{"--help"}},
		{"top.txt", []string{"top", "--once", "--every", "50ms"}},
	} {
		t.Run(c.file, func(t *testing.T) {
			out, errOut, status := newCLI(t).run(c.args...)
			if status != 0 || errOut != "" {
				t.Errorf("status %d, %q", status, errOut)
			}
			golden(t, c.file, out)
			if strings.ContainsAny(out, "\x1b\x07\x00") {
				t.Error("text of a sandbox reached the terminal with its control characters")
			}
		})
	}
}

func TestRunAndExec(t *testing.T) {
	for _, c := range []struct {
		name        string
		args        []string
		out, errOut string
		status      int
	}{
		{"output and status 0", []string{"exec", sandboxID, "--", "echo", "a", "-n"}, "a -n\n", "", 0},
		{"a line for bash", []string{"exec", sandboxID, "-c", "echo b"}, "b\n", "", 0},
		{"a line for a session", []string{"exec", sandboxID, "--session", "main", "-c", "echo b"}, "b\n", "", 0},
		{"a line for a new session", []string{"exec", sandboxID, "--session", "new", "-c", "echo b"}, "b\n", "", 0},
		{"the command's own status", []string{"exec", sandboxID, "--", "exit", "7"}, "", "", 7},
		{"a status like boxwood's own", []string{"exec", sandboxID, "--", "exit", "125"}, "", "", 125},
		{"signal", []string{"exec", sandboxID, "--", "signal"}, "", "", 137},
		{"deadline", []string{"exec", sandboxID, "--", "hang"}, "", "", 124},
		{"raw bytes", []string{"exec", sandboxID, "--", "loud"}, "\x1b[31mraw\xff", "err", 0},
		{"run with a tree of its own", []string{"run", "--image", "task:1", "--", "echo", "x"}, "x\n", "", 0},
		{"run in a sandbox", []string{"run", "--sandbox", sandboxID, "--", "exit", "3"}, "", "", 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, errOut, status := newCLI(t).run(c.args...)
			if out != c.out || errOut != c.errOut || status != c.status {
				t.Errorf("got %q, %q, %d", out, errOut, status)
			}
		})
	}
}

func TestRunReleasesItsSandbox(t *testing.T) {
	for _, command := range []string{"echo", "exit 1", "die"} {
		c := newCLI(t)
		c.run("run", "--image", "task:1", "-c", command)
		last, ok := c.requests[len(c.requests)-1].(*pb.ReleaseRequest)
		if !ok || last.SandboxIds[0] != sandboxID {
			t.Errorf("%s: the last request was %v", command, c.requests[len(c.requests)-1])
		}
	}
	c := newCLI(t)
	c.run("run", "--image", "task:1", "--keep", "-c", "echo")
	if _, released := c.requests[len(c.requests)-1].(*pb.ReleaseRequest); released {
		t.Error("--keep released the sandbox")
	}
}

// Failures are one line and a hint, and never the status of a command.
func TestFailures(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"hint of the service", []string{"run", "--image", "missing:1", "--", "true"}, "boxwood: no image \"missing:1\"\n  hint: import one\n"},
		{"infrastructure, with request id", []string{"exec", "sb_other", "--", "true"}, "boxwood: pool is\\x1b[2J broken (request rq7)\n"},
		{"sandbox lost", []string{"exec", sandboxID, "--", "die"}, "boxwood: the sandbox died in the turn\n  hint: the turn may have killed its pid 1 or run out of memory; fork the node before it\n"},
		{"no daemon", []string{"--address", "/nowhere/s", "tree", "list"}, "boxwood: no daemon answers on /nowhere/s\n  hint: start one with `boxwood serve`, or name another with --address or $BOXWOOD_ADDRESS\n"},
		{"unknown command", []string{"forc"}, "boxwood: there is no command \"boxwood forc\"\n  hint: boxwood --help shows how\n"},
		{"unknown flag", []string{"fork", "--cuont", "2"}, "boxwood: unknown flag: --cuont\n  hint: boxwood fork --help shows how\n"},
		{"missing argument", []string{"rollback", sandboxID}, "boxwood: accepts 2 arg(s), received 1\n  hint: boxwood rollback --help shows how\n"},
		{"no command line", []string{"exec", sandboxID}, "boxwood: name the command after --, or a line for bash with -c\n  hint: boxwood exec --help shows how\n"},
		{"two starts", []string{"run", "--image", "a", "--node", "b", "--", "true"}, "boxwood: name exactly one of --image, --node and --sandbox\n  hint: boxwood run --help shows how\n"},
		{"reward that is no number", []string{"annotate", nodeID, "--reward", "tests=good"}, "boxwood: the reward tests=good is not a number\n  hint: boxwood annotate --help shows how\n"},
		{"file of an unknown kind", []string{"stats", "forks", "-o", "forks.csv"}, "boxwood: the file \"forks.csv\" must end in .parquet, .arrow or .arrows\n  hint: boxwood stats --help shows how\n"},
		{"time that is none", []string{"stats", "turns", "--since", "yesterday"}, "boxwood: --since: \"yesterday\" is neither a time such as 2026-01-31T12:00:00Z nor how long ago, such as 90m\n  hint: boxwood stats --help shows how\n"},
		{"unknown table", []string{"stats", "fork"}, "boxwood: there is no table \"fork\"\n  hint: tables are turns, nodes, forks and captures\n"},
		{"another version", []string{"rollback", sandboxID, nodeID}, "boxwood: the daemon doesn't know this call\n  hint: it is of another version: `boxwood version` shows both\n"},
		{"pool size", []string{"serve", "--pool-size", "big"}, "boxwood: --pool-size: \"big\" is not a size such as 100G\n  hint: boxwood serve --help shows how\n"},
		{"metrics without a port", []string{"serve", "--metrics", "localhost"}, "boxwood: --metrics takes HOST:PORT: address localhost: missing port in address\n  hint: boxwood serve --help shows how\n"},
		{"fork queue", []string{"serve", "--fork-queue", "-1"}, "boxwood: --fork-queue can't be negative\n  hint: boxwood serve --help shows how\n"},
		{"interval of top", []string{"top", "--every", "1ms"}, "boxwood: --every must be 50ms or more\n  hint: boxwood top --help shows how\n"},
		{"log level", []string{"serve", "--log-level", "loud"}, "boxwood: there is no log level \"loud\"\n  hint: boxwood serve --help shows how\n"},
		{"trajectory", []string{"replay", "cli_test.go"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, errOut, status := newCLI(t).run(c.args...)
			if c.want != "" && errOut != c.want {
				t.Errorf("got\n%swant\n%s", errOut, c.want)
			}
			if lines := strings.Count(errOut, "\n"); out != "" || status != failureStatus || lines < 1 || lines > 2 || !strings.HasPrefix(errOut, "boxwood: ") {
				t.Errorf("status %d, %q, %q", status, out, errOut)
			}
		})
	}
}

func TestForkShowsEachChild(t *testing.T) {
	out, errOut, status := newCLI(t).run("fork", nodeID, "-n", "4")
	if status != failureStatus || strings.Count(out, "ready in 1.9 ms") != 3 ||
		errOut != "child 2 failed: ResourceExhausted: the pool is full\\x07\n  hint: prune\nboxwood: 1 of 4 children failed\n" {
		t.Errorf("status %d\n%s%s", status, out, errOut)
	}
	c := newCLI(t)
	if out, _, status := c.run("fork", nodeID, "--replay"); status != 0 || out != "sb_child0  ready in 1.9 ms; 1 of 3 turns came out as before, otherwise the output of nd_b, output and status of nd_c\n" {
		t.Errorf("a replay: status %d, %q", status, out)
	}
	if out, _, status := c.run("fork", sandboxID, "-q"); out != "sb_child0\n" || status != 0 {
		t.Errorf("%d %q", status, out)
	}
	if want := c.requests[1].(*pb.ForkRequest).Wants[0]; want.GetSandboxId() != sandboxID || want.Count != 1 {
		t.Errorf("asked for %v", want)
	}
}

func (f *fake) Evaluate(_ context.Context, r *pb.EvaluateRequest) (*pb.EvaluateResponse, error) {
	f.saw(r)
	if r.GetGrader().GetRewardsFile() == "" {
		return &pb.EvaluateResponse{Problem: "the grader's command reached its deadline", Observation: &pb.Observation{Stderr: []byte("slow\a")}}, nil
	}
	return &pb.EvaluateResponse{Rewards: map[string]float64{"reward": 0.75, "a style": 1}, Missing: []string{"/work/gone"}}, nil
}

func TestGrade(t *testing.T) {
	test := filepath.Join(t.TempDir(), "test.sh")
	if err := os.WriteFile(test, []byte("hidden"), 0o755); err != nil {
		t.Fatal(err)
	}
	c := newCLI(t)
	out, errOut, status := c.run("grade", nodeID, "--image", "task:7", "--path", "/work/src", "--path", "/work/gone", "--file", "/grading/test.sh="+test,
		"--rewards", "/r", "--annotate", "--timeout", "30s", "--", "/grading/test.sh", "-v")
	if out != "a style 1\nreward 0.75\n" || status != 0 || !strings.Contains(errOut, "the node has no /work/gone") {
		t.Errorf("status %d\n%s%s", status, out, errOut)
	}
	asked := c.requests[0].(*pb.EvaluateRequest)
	g := asked.GetGrader()
	if asked.GetNodeId() != nodeID || g.GetImage() != "task:7" || strings.Join(g.GetPaths(), " ") != "/work/src /work/gone" || g.GetRewardsFile() != "/r" ||
		string(g.GetFiles()[0].GetContent()) != "hidden" || g.GetFiles()[0].GetMode() != 0o755 || g.GetFiles()[0].GetPath() != "/grading/test.sh" ||
		len(g.GetCommand().GetArgv()) != 2 || g.GetCommand().GetDeadlineNs() != int64(30*time.Second) {
		t.Errorf("asked for %v", asked)
	}
	if note := c.requests[1].(*pb.AnnotateRequest).GetAnnotations()[0]; note.GetNodeId() != nodeID || note.GetRewards()["reward"] != 0.75 {
		t.Errorf("annotated %v", note)
	}
	out, errOut, status = newCLI(t).run("grade", nodeID, "-c", "sleep 9")
	if out != "" || status != failureStatus || !strings.Contains(errOut, "no reward: the grader's command reached its deadline") ||
		!strings.Contains(errOut, "slow\\x07") {
		t.Errorf("status %d\n%s%s", status, out, errOut)
	}
	for name, args := range map[string][]string{
		"no command": {"grade", nodeID}, "both starts": {"grade", nodeID, "--image", "a", "--node", nodeID, "--", "x"},
		"no such file": {"grade", nodeID, "--file", "/x=/no/such", "--", "x"},
	} {
		if _, errOut, status := newCLI(t).run(args...); status != failureStatus || errOut == "" {
			t.Errorf("%s: status %d, %s", name, status, errOut)
		}
	}
}

func TestStatsFiles(t *testing.T) {
	dir := t.TempDir()
	c := newCLI(t)
	for _, ending := range []string{"arrow", "arrows", "parquet"} {
		path := filepath.Join(dir, "forks."+ending)
		if out, errOut, status := c.run("stats", "forks", "-o", path); status != 0 || out != path+"\n" {
			t.Fatalf("%d %q %q", status, out, errOut)
		}
		if info, err := os.Stat(path); err != nil || info.Size() < 500 || info.Mode().Perm() != 0o644 {
			t.Errorf("%v %v", info, err)
		}
	}
	out, _, _ := c.run("stats", "forks", "-o", "-")
	in, err := ipc.NewReader(strings.NewReader(out))
	if err != nil || !in.Next() || in.Record().NumRows() != 20 {
		t.Errorf("standard output is not the stream: %v", err)
	}
	if _, _, status := c.run("stats", "nothing", "-o", filepath.Join(dir, "nothing.arrow")); status == 0 {
		t.Error("an unknown table was written")
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*nothing*")); len(left) > 0 {
		t.Errorf("a failed export left %v", left)
	}
}

func TestJSON(t *testing.T) {
	out, _, status := newCLI(t).run("node", "show", nodeID, "--json")
	var node struct {
		ID          string `json:"id"`
		Observation struct {
			Stdout []byte `json:"stdout"`
		} `json:"observation"`
	}
	if err := json.Unmarshal([]byte(out), &node); err != nil || status != 0 || node.ID != nodeID || !bytes.Contains(node.Observation.Stdout, []byte("\xff\x1b")) {
		t.Errorf("%v: %s", err, out)
	}
}

func TestReplayComparesAndRecords(t *testing.T) {
	dir := t.TempDir()
	file, again := filepath.Join(dir, "t.jsonl"), filepath.Join(dir, "again.jsonl")
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("start.json", `{"image":"task:1","cwd":"/w","files":[{"path":"/w/it's/a","content":"x","mode":"755"}],"commands":["true"]}`)
	write("t.jsonl", `{"format":"boxwood-trajectory-1","start":"start.json"}
{"command":"echo one","expect_exit":0,"expect_stdout":"one\n"}
{"command":"exit 3","expect_exit":4}
{"command":"echo two","cwd":"/x"}`)
	c := newCLI(t)
	out, errOut, status := c.run("replay", file, "--record", again)
	if status != 1 || errOut != "" || !strings.Contains(out, "differs: exit 3, recorded 4") ||
		!strings.Contains(out, "3 turns ran; 1 of 2 compared are as recorded") || !strings.Contains(out, "first difference is at step 2") {
		t.Errorf("status %d, %q\n%s", status, errOut, out)
	}
	create := c.requests[0].(*pb.CreateTreeRequest)
	if got := create.Setup[0].GetCommand(); got != `mkdir -p -- '/w/it'\''s'` {
		t.Errorf("the set-up makes folders by %s", got)
	}
	if f := create.Setup[1].GetFile(); f.GetMode() != 0o755 || string(f.GetContent()) != "x" {
		t.Errorf("the set-up writes %v", f)
	}
	if a, b := c.requests[1].(*pb.RunTurnRequest).Command.Cwd, c.requests[3].(*pb.RunTurnRequest).Command.Cwd; a != "/w" || b != "/x" {
		t.Errorf("turns ran in %s and %s", a, b)
	}
	if out, _, status := newCLI(t).run("replay", again, "--json"); status != 0 || !strings.Contains(out, `"matched":3`) {
		t.Errorf("what was recorded doesn't match itself: %d\n%s", status, out)
	}
}

// TestReplayGoesOn would fail if a file that can't be read or run stopped the
// others, or if the exit status didn't tell.
func TestReplayGoesOn(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	broken := write("broken.traj", `{"trajectory":[{"action":`)
	nothing := write("nothing.cast", `{"version":2,"width":80,"height":24}`+"\n"+`[1,"i","q"]`)
	good := write("good.jsonl", `{"format":"boxwood-trajectory-1"}`+"\n"+`{"command":"echo one","expect_exit":0}`)
	rows := write("rows.jsonl", strings.Repeat(`{"instance_id":"i","messages":[{"role":"assistant","content":"`+"```\\nls\\n```"+`"}]}`+"\n", 2))

	out, errOut, status := newCLI(t).run("replay", "--image", "task:1", broken, nothing, good, rows)
	if status != failureStatus || strings.Count(out, " turns ran; ") != 4 { // one is of all
		t.Errorf("status %d\n%s", status, out)
	}
	for _, want := range []string{"boxwood: reading broken.traj: as swe-agent: step 1: line 1: the file ends", "nothing.cast: none of its 1 actions can be run again"} {
		if !strings.Contains(errOut, want) {
			t.Errorf("%q is not in\n%s", want, errOut)
		}
	}
	if _, errOut, status := newCLI(t).run("replay", "--image", "task:1", "--record", filepath.Join(dir, "r"), rows); status != failureStatus || !strings.Contains(errOut, "--record takes one trajectory") {
		t.Errorf("status %d\n%s", status, errOut)
	}

	c := newCLI(t)
	out, _, status = c.run("replay", "--list", nothing, good)
	want := nothing + ": asciicast-v2, 0 of 1 actions can be run again\n  1 can't be: keystrokes that are not a command line\n" +
		good + ": boxwood-trajectory-1, 1 of 1 actions can be run again\n"
	if status != 0 || out != want || len(c.requests) != 0 {
		t.Errorf("status %d, %d requests, got\n%swant\n%s", status, len(c.requests), out, want)
	}
	out, errOut, status = newCLI(t).run("replay", "--list", "--json", broken, rows)
	if status != failureStatus || errOut == "" || strings.Count(out, `"skipped":{}`) != 2 || !strings.Contains(out, `rows.jsonl row 2 i","format":"swe-smith"`) {
		t.Errorf("status %d, %s\n%s", status, errOut, out)
	}
}

func TestSizes(t *testing.T) {
	for in, want := range map[string]int64{"4096": 4096, "1K": 1024, "100G": 100 << 30, "1.5T": 3 << 39, "2GiB": 2 << 30, "10MB": 10 << 20} {
		if got, err := parseSize(in); err != nil || got != want {
			t.Errorf("parseSize(%q) = %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "G", "-1G", "0", "1X", "9999999T", "NaN"} {
		if got, err := parseSize(in); err == nil {
			t.Errorf("parseSize(%q) = %d", in, got)
		}
	}
	for in, want := range map[int64]string{0: "0 B", 999: "999 B", 1000: "1 kB", 206_800_000: "207 MB", 999_999: "1 MB", 8_590_000_000: "8.59 GB"} {
		if got := size(in); got != want {
			t.Errorf("size(%d) = %q, want %q", in, got, want)
		}
	}
}

// Every command explains itself and shows an example.
func TestHelpHasExamples(t *testing.T) {
	root := newRoot(&app{getenv: os.Getenv})
	stack := root.Commands()
	for len(stack) > 0 {
		c := stack[0]
		stack = append(stack[1:], c.Commands()...)
		if c.HasSubCommands() || c.Name() == "help" || c.Name() == "completion" {
			continue
		}
		if c.Short == "" || !strings.Contains(c.Example, "boxwood ") {
			t.Errorf("%s has no example", c.CommandPath())
		}
	}
}
