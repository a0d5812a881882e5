package service

import (
	"testing"
	"time"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// What is made from checkpoints is recorded with its purpose, and each sandbox that ends with why, also by the daemon that finds it gone.
func TestBodiesAndSandboxesAreRecorded(t *testing.T) {
	d := startDaemon(t, stateDir(t))
	d.importRoot(t)
	root, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), "echo x >/root/x").GetNode()
	d.captured(t, n.GetId())
	made := d.fork(t, n.GetId(), 6) // more than there are spares
	if _, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: made[0].GetId(), NodeId: n.GetId()}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{made[0].GetId()}}); err != nil {
		t.Fatal(err)
	}
	scratch := d.tryFork(t, &boxwoodv1.ForkRequest{Scratch: true, Wants: []*boxwoodv1.ForkRequest_Want{
		{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: n.GetId()}, Count: 1}, {From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: n.GetId()}, Count: 1}}})
	short := d.tryFork(t, &boxwoodv1.ForkRequest{LeaseNs: int64(time.Millisecond), Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: n.GetId()}, Count: 1}}})
	ended := func() map[string]string {
		out := map[string]string{}
		for _, row := range d.rows(t, "sandboxes") {
			if row["tree"] == root.GetTreeId() {
				out[row["sandbox"]] = row["ended"] + " at " + row["head"]
			}
		}
		return out
	}
	expired := short[0].GetSandbox().GetId()
	until(t, "a lease has ended", func() bool { return ended()[expired] != "" })
	if got := ended(); got[made[0].GetId()] != "released at "+n.GetId() || got[expired] != "expired at "+n.GetId() || len(got) != 2 {
		t.Errorf("sandboxes have ended as %v", got)
	}
	purposes := map[string]int{}
	for _, row := range d.rows(t, "restores") {
		if row["tree"] == root.GetTreeId() && row["outcome"] == "ok" {
			purposes[row["purpose"]]++
			if clone, attach, total := number(t, row["clone_ns"]), number(t, row["attach_ns"]), number(t, row["total_ns"]); clone <= 0 || attach <= 0 || total < clone+attach {
				t.Errorf("it took %v", row)
			}
		}
	}
	handed := 0
	for _, row := range d.rows(t, "forks") {
		if row["tree"] == root.GetTreeId() && number(t, row["attach_ns"]) == 0 {
			handed++ // a spare
		}
	}
	if purposes["fork"]+handed != 10 || purposes["spare"] < handed || purposes["rollback"] != 1 {
		t.Errorf("bodies were made for %v, and %d forks were handed a spare", purposes, handed)
	}

	d.kill()
	d = startDaemon(t, d.dir)
	for _, c := range scratch {
		if got := ended()[c.GetSandbox().GetId()]; got != "gone_at_start at "+n.GetId() {
			t.Errorf("a scratch sandbox of a daemon that was killed has ended as %q", got)
		}
	}
}
