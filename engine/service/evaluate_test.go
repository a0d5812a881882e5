package service

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// solved grades /w/answer: the hidden test wants 42 in it, by the programs of where it runs.
func solved(image string) *boxwoodv1.Grader {
	g := &boxwoodv1.Grader{
		Files: []*boxwoodv1.FileToWrite{{Path: "/grading/test.sh", Content: []byte(`
			[ "$(cat /w/answer)" = 42 ] && reward=1 || reward=0
			echo "{\"reward\": $reward, \"style\": 0.25}" > /grading/rewards.json`)}},
		Command:     &boxwoodv1.Command{Argv: [][]byte{[]byte("bash"), []byte("/grading/test.sh")}, DeadlineNs: int64(20 * time.Second)},
		RewardsFile: "/grading/rewards.json",
	}
	if image != "" {
		g.Start = &boxwoodv1.Grader_Image{Image: image}
		g.Paths = []string{"/w"}
	}
	return g
}

func (d *daemon) evaluate(t testing.TB, node string, g *boxwoodv1.Grader) *boxwoodv1.EvaluateResponse {
	t.Helper()
	r, err := d.client.Evaluate(ctx(t), &boxwoodv1.EvaluateRequest{NodeId: node, Grader: g})
	if err != nil {
		t.Fatal("evaluating: ", err)
	}
	return r
}

// same demands that the daemon has the trees, nodes and sandboxes that it had.
func (d *daemon) same(t *testing.T) func() {
	t.Helper()
	count := func() [3]int {
		trees, err := d.client.ListTrees(ctx(t), &boxwoodv1.ListTreesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		boxes, err := d.client.ListSandboxes(ctx(t), &boxwoodv1.ListSandboxesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return [3]int{len(trees.GetTrees()), int(d.nodes(t)), len(boxes.GetSandboxes())}
	}
	before := count()
	return func() {
		t.Helper()
		if after := count(); after != before {
			t.Errorf("trees, nodes and sandboxes were %v and are %v", before, after)
		}
	}
}

// An honest answer is graded, named rewards come back, nothing of the grading stays,
// and the agent's own sandbox never sees the hidden test.
func TestEvaluate(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	wrong := d.run(t, sb.GetId(), "mkdir -p /w/deep && echo 41 > /w/answer; ln -s answer /w/link; mkfifo /w/pipe").GetNode()
	right := d.run(t, sb.GetId(), "echo 42 > /w/answer").GetNode()
	d.captured(t, wrong.GetId(), right.GetId())
	same := d.same(t)
	for _, image := range []string{"", "mini"} {
		for node, want := range map[string]float64{wrong.GetId(): 0, right.GetId(): 1} {
			r := d.evaluate(t, node, solved(image))
			if r.GetRewards()["reward"] != want || r.GetRewards()["style"] != 0.25 || r.GetProblem() != "" {
				t.Errorf("image %q: %v, want reward %v", image, r, want)
			}
		}
	}
	same()
	if got := d.ok(t, sb.GetId(), "ls -d /grading 2>/dev/null || echo none"); got != "none\n" {
		t.Errorf("the agent sees %s", got)
	}
	// A node serves as the grader's sandbox, too.
	_, prepared := d.newTree(t)
	ready := d.run(t, prepared.GetId(), "mkdir /grading && echo 42 > /grading/key").GetNode()
	d.captured(t, ready.GetId())
	g := &boxwoodv1.Grader{
		Start: &boxwoodv1.Grader_NodeId{NodeId: ready.GetId()}, Paths: []string{"/w/answer", "/w/absent"},
		Command: &boxwoodv1.Command{Shell: []byte("read a < /w/answer; read b < /grading/key; [ $a = $b ]")},
	}
	r := d.evaluate(t, right.GetId(), g)
	if r.GetRewards()["reward"] != 1 || fmt.Sprint(r.GetMissing()) != "[/w/absent]" {
		t.Errorf("%v", r)
	}
}

// An agent that has its hands on all that a grader leans on earns nothing in a grader's
// own sandbox: tests, programs, PATH, start files of the shell, links that lead there.
func TestGraderIsOutOfReach(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	tampered := d.run(t, sb.GetId(), `
		mkdir -p /w /grading /usr/local/bin
		echo 0 > /w/answer
		printf '#!/bin/bash\necho 42\n' > /fake; chmod 755 /fake
		cp /fake /usr/local/bin/cat; mv /usr/bin/cat /w/cat; cp /fake /usr/bin/cat
		echo 'cat() { echo 42; }; export -f cat; PATH=/w:$PATH' | tee /etc/profile /etc/bash.bashrc > /root/.bash_profile
		echo 'echo {\"reward\": 1} > /grading/rewards.json; exit' > /grading/test.sh
		echo '{"reward": 1}' > /grading/rewards.json
		ln -s /usr/bin /w/bin
		ln -s /grading /w/grading`).GetNode()
	if code := tampered.GetObservation().GetExitCode(); code != 0 {
		t.Fatalf("the agent ended with %d: %s", code, tampered.GetObservation().GetStderr())
	}
	d.captured(t, tampered.GetId())
	r := d.evaluate(t, tampered.GetId(), solved("mini"))
	if reward, there := r.GetRewards()["reward"]; !there || reward != 0 {
		t.Errorf("it earned %v: %v", reward, r)
	}
	// In its own sandbox it gets away with it, which is what the page on grading says.
	if r := d.evaluate(t, tampered.GetId(), solved("")); r.GetRewards()["reward"] != 1 {
		t.Errorf("in a scratch fork: %v", r)
	}
	// Hidden files win over what the agent put in their places.
	shadowed := d.run(t, sb.GetId(), `rm -rf /w; mkdir -p /w/tests; echo 'exit 0' > /tmp/pass; ln -s /tmp /w/tests/unit; ln -s /tmp/pass /w/tests/run.sh`).GetNode()
	d.captured(t, shadowed.GetId())
	g := solved("mini")
	g.Files[0].Path = "/w/tests/run.sh"
	g.Files = append(g.Files, &boxwoodv1.FileToWrite{Path: "/w/tests/unit/pass", Content: []byte("x")})
	g.Command = &boxwoodv1.Command{Shell: []byte("mkdir -p /grading; bash /w/tests/run.sh; [ ! -L /w/tests/unit ] && [ ! -e /tmp/pass ]")}
	if r := d.evaluate(t, shadowed.GetId(), g); r.GetRewards()["reward"] != 0 || r.GetObservation().GetExitCode() != 0 {
		t.Errorf("a link in the place of a hidden file: %v", r)
	}
}

// What isn't a grade is told apart from a grade of 0.
func TestNoRewardIsNotZero(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	node := d.run(t, sb.GetId(), "mkdir /w; echo 42 > /w/answer").GetNode()
	huge := d.run(t, sb.GetId(), "mkdir /w/g; truncate -s 8T /w/g/hole").GetNode()
	d.captured(t, node.GetId(), huge.GetId())
	narrow, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
		Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, Defaults: &boxwoodv1.Defaults{Limits: &boxwoodv1.Limits{DiskBytes: 16 << 20}},
	})
	if err != nil {
		t.Fatal(err)
	}
	some := d.run(t, sb.GetId(), "rm -r /w/g; head -c 32000000 /dev/urandom >/w/some").GetNode()
	d.captured(t, some.GetId())
	shell := func(text string) *boxwoodv1.Grader {
		return &boxwoodv1.Grader{
			Start: &boxwoodv1.Grader_Image{Image: "mini"}, Paths: []string{"/w"}, RewardsFile: "/r",
			Command: &boxwoodv1.Command{Shell: []byte(text), DeadlineNs: int64(20 * time.Second)},
		}
	}
	defer d.same(t)()
	for name, text := range map[string]string{
		"no file": "exit 1", "no numbers": "echo '{\"reward\": \"much\"}' > /r", "empty": "echo {} > /r", "not finite": "echo nan > /r",
		"large": "head -c 2000000 /dev/zero > /r",
	} {
		if r := d.evaluate(t, node.GetId(), shell(text)); len(r.GetRewards()) != 0 || r.GetProblem() == "" {
			t.Errorf("%s: %v", name, r)
		}
	}
	if r := d.evaluate(t, node.GetId(), shell("echo 0.5 > /r; exit 3")); r.GetRewards()["reward"] != 0.5 {
		t.Errorf("one number: %v", r)
	}
	slow := shell("sleep 1000")
	slow.Command.DeadlineNs = int64(200 * time.Millisecond)
	if r := d.evaluate(t, node.GetId(), slow); len(r.GetRewards()) != 0 || r.GetStatus() != boxwoodv1.TurnStatus_TURN_STATUS_TIMED_OUT {
		t.Errorf("a slow grader: %v", r)
	}
	absent := shell("")
	absent.Command = &boxwoodv1.Command{Argv: [][]byte{[]byte("/no/such/program")}}
	_, err = d.client.Evaluate(ctx(t), &boxwoodv1.EvaluateRequest{NodeId: node.GetId(), Grader: absent})
	if reason(err) != "grader_not_started" {
		t.Errorf("a grader that can't be started: %v", err)
	}
	// An agent that leaves more than there is room for neither stalls its grade nor makes it the host's failure.
	for _, paths := range [][]string{{"/w"}, {"/w/answer", "/w/g"}} {
		g := shell("echo 1 > /r")
		g.Paths = paths
		r := d.evaluate(t, huge.GetId(), g)
		if len(r.GetRewards()) != 0 || !strings.Contains(r.GetProblem(), "on its disk") || r.GetStatus() != boxwoodv1.TurnStatus_TURN_STATUS_COMPLETED {
			t.Errorf("8 TiB in %q: %v", paths, r)
		}
	}
	// How much room there is the grader's own sandbox says, whose tree may have limits of its own.
	g := shell("echo 1 > /r")
	if r := d.evaluate(t, some.GetId(), g); r.GetRewards()["reward"] != 1 {
		t.Errorf("32 MB: %v", r)
	}
	g.Start = &boxwoodv1.Grader_NodeId{NodeId: narrow.GetRoot().GetId()}
	if r := d.evaluate(t, some.GetId(), g); len(r.GetRewards()) != 0 || !strings.Contains(r.GetProblem(), "on its disk") {
		t.Errorf("32 MB in a grader's sandbox with room for 16 MiB: %v", r)
	}
	// A caller that gives up, and a host without room, are errors.
	short, cancel := context.WithTimeout(ctx(t), 300*time.Millisecond)
	defer cancel()
	_, err = d.client.Evaluate(short, &boxwoodv1.EvaluateRequest{NodeId: node.GetId(), Grader: shell("sleep 1000")})
	if status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a call that gave up: %v", err)
	}
	d.nobody(t, "boxwood.grader")
	for name, g := range map[string]*boxwoodv1.Grader{
		"no image":      {Start: &boxwoodv1.Grader_Image{Image: "none"}, Command: &boxwoodv1.Command{Shell: []byte("true")}},
		"no command":    {},
		"relative path": {Start: &boxwoodv1.Grader_Image{Image: "mini"}, Paths: []string{"w"}, Command: &boxwoodv1.Command{Shell: []byte("true")}},
		"all of it":     {Start: &boxwoodv1.Grader_Image{Image: "mini"}, Paths: []string{"/"}, Command: &boxwoodv1.Command{Shell: []byte("true")}},
		"nested paths":  {Start: &boxwoodv1.Grader_Image{Image: "mini"}, Paths: []string{"/w", "/w/a"}, Command: &boxwoodv1.Command{Shell: []byte("true")}},
		"paths nowhere": {Paths: []string{"/w"}, Command: &boxwoodv1.Command{Shell: []byte("true")}},
		"climbing file": {Files: []*boxwoodv1.FileToWrite{{Path: "/w/../etc/x"}}, Command: &boxwoodv1.Command{Shell: []byte("true")}},
	} {
		if r, err := d.client.Evaluate(ctx(t), &boxwoodv1.EvaluateRequest{NodeId: node.GetId(), Grader: g}); err == nil {
			t.Errorf("%s: %v", name, r)
		}
	}
}

// nobody waits until no tree with the label is left: a call that gave up is cleared up behind its back.
func (d *daemon) nobody(t testing.TB, label string) {
	t.Helper()
	for {
		r, err := d.client.ListTrees(ctx(t), &boxwoodv1.ListTreesRequest{Labels: map[string]string{label: "1"}})
		if err != nil {
			t.Fatal(err)
		}
		if len(r.GetTrees()) == 0 {
			return
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("trees are left: ", r.GetTrees())
		}
	}
}

// A key answers from the log: the grader doesn't run again.
func TestEvaluateOnce(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	node := d.run(t, sb.GetId(), "mkdir /w").GetNode()
	d.captured(t, node.GetId())
	req := &boxwoodv1.EvaluateRequest{NodeId: node.GetId(), IdempotencyKey: "evaluate-" + node.GetId(), Grader: &boxwoodv1.Grader{
		Command: &boxwoodv1.Command{Shell: []byte("head -c 8 /dev/urandom | od -An -tx1")}}}
	var said [2][]byte
	for i := range said {
		r, err := d.client.Evaluate(ctx(t), req)
		if err != nil {
			t.Fatal(err)
		}
		said[i] = r.GetObservation().GetStdout()
	}
	if len(said[0]) == 0 || !bytes.Equal(said[0], said[1]) {
		t.Errorf("%s and %s", said[0], said[1])
	}
}
