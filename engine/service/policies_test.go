package service

import (
	"fmt"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Whatever a tree captures, a fork of a node is as the node was, or is refused with the policy as the reason. If it fails,
// somebody trains on states that never were.
func TestCapturePolicies(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	const (
		sparse = boxwoodv1.CapturePolicy_CAPTURE_POLICY_SPARSE
		full   = boxwoodv1.CapturePolicy_CAPTURE_POLICY_FULL
		files  = boxwoodv1.CapturePolicy_CAPTURE_POLICY_FILES
		none   = boxwoodv1.CapturePolicy_CAPTURE_POLICY_UNCAPTURED
		looks  = `cat /root/*; for p in /proc/[0-9]*; do cat $p/cmdline 2>/dev/null | tr '\0' ' ' | grep '^sleep' ; done; true`
	)
	turns := []string{
		"true", "echo 1 >/root/a", "true", "sleep 1111 >/dev/null 2>&1 &", "echo 2 >/root/b", "true",
		"kill $(cd /proc; for p in [0-9]*; do [ \"$(cat $p/comm)\" = sleep ] && echo $p; done); echo 3 >/root/c",
	}
	saw := []string{"", "1\n", "1\n", "1\nsleep 1111 \n", "1\n2\nsleep 1111 \n", "1\n2\nsleep 1111 \n", "1\n2\n3\n"}
	for _, c := range []struct {
		policy boxwoodv1.CapturePolicy
		kinds  string // of each node's process state: e, d, or - if it is withheld
		shares string // which nodes have the checkpoint of the one before
	}{
		{boxwoodv1.CapturePolicy_CAPTURE_POLICY_UNSPECIFIED, "eeeddde", "=.=..=."},
		{sparse, "eeeddde", "=.=..=."},
		{full, "eeeddde", "......."},
		{files, "eee---e", "=.=...."},
		{none, "e------", "=......"},
	} {
		t.Run(strings.ToLower(strings.TrimPrefix(c.policy.String(), "CAPTURE_POLICY_")), func(t *testing.T) {
			made, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
				Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true,
				Defaults: &boxwoodv1.Defaults{CapturePolicy: c.policy},
				Setup:    []*boxwoodv1.SetupStep{{Step: &boxwoodv1.SetupStep_Command{Command: "mkdir -p /root; rm -f /root/*; echo made >/made"}}},
			})
			if err != nil {
				t.Fatal(err)
			}
			sb := made.GetSandbox().GetId()
			if got := d.ok(t, sb, "cat /made"); got != "made\n" { // a set-up is captured in any case
				t.Fatalf("the set-up's file has %q", got)
			}
			before, last := d.dumps(t), made.GetRoot().GetCheckpointId()
			var kinds, shares string
			var nodes []*boxwoodv1.Node
			for i, shell := range turns {
				n := d.run(t, sb, shell).GetNode()
				if i == 5 && n.GetVerdict() != boxwoodv1.Verdict_VERDICT_NONE && (c.policy == sparse || c.policy == 0) {
					n = d.node(t, d.asleep(t, sb)) // what it did as it started was still under way
				}
				n = d.captured(t, n.GetId())[0]
				nodes = append(nodes, n)
				switch n.GetProcessKind() {
				case boxwoodv1.ProcessKind_PROCESS_KIND_EMPTY:
					kinds += "e"
				case boxwoodv1.ProcessKind_PROCESS_KIND_DUMP:
					kinds += "d"
				default:
					kinds += "-"
				}
				if n.GetCheckpointId() != "" && n.GetCheckpointId() == last {
					shares += "="
				} else {
					shares += "."
				}
				if n.GetCheckpointId() != "" {
					last = n.GetCheckpointId()
				}
			}
			if kinds != c.kinds || shares != c.shares {
				t.Errorf("process states %s, not %s; checkpoints shared %s, not %s", kinds, c.kinds, shares, c.shares)
			}
			dumped := 0
			for name := range d.dumps(t) {
				if !before[name] {
					dumped++
				}
			}
			if want := map[boxwoodv1.CapturePolicy]int{full: 3, files: 0, none: 0}; c.policy != sparse && c.policy != 0 && dumped != want[c.policy] {
				t.Errorf("%d dumps, not %d", dumped, want[c.policy])
			}
			for i, n := range nodes {
				if n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
					if !strings.Contains(n.GetWithheldReason(), "policy of its tree is ") {
						t.Errorf("node %d is withheld: %s", i, n.GetWithheldReason())
					}
					stream, err := d.client.Fork(ctx(t), &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{
						{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: n.GetId()}, Count: 1}}})
					if err == nil {
						_, err = stream.Recv()
					}
					if reason(err) != "node_withheld" {
						t.Errorf("a fork of node %d, which is withheld: %v", i, err)
					}
					continue
				}
				child := d.fork(t, n.GetId(), 1)[0]
				if got := d.ok(t, child.GetId(), looks); got != saw[i] {
					t.Errorf("a fork of node %d shows %q, not %q", i, got, saw[i])
				}
				free(t, d, child)
			}
			again, err := d.replays(t, nodes[4].GetId()) // what was left out can be made again
			if err != nil || again[0].GetError() != nil {
				t.Fatalf("replaying: %v %v", err, again)
			}
			if got := d.ok(t, again[0].GetSandbox().GetId(), looks); got != saw[4] {
				t.Errorf("node 4, made again, shows %q, not %q", got, saw[4])
			}
			if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: made.GetTree().GetId()}); err != nil {
				t.Error(err)
			}
		})
	}
	for _, n := range []boxwoodv1.CapturePolicy{none + 1, 257, -1} {
		_, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
			Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, Defaults: &boxwoodv1.Defaults{CapturePolicy: n}})
		if reason(err) != "bad_capture_policy" {
			t.Errorf("policy %s: %v", fmt.Sprint(int32(n)), err)
		}
	}
}
