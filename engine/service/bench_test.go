package service

import (
	"testing"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Turn of /bin/true with verdict and durable node, from a Go client.
func BenchmarkTurn(b *testing.B) {
	d := running(b)
	_, sb := d.newTree(b)
	req := &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Argv: [][]byte{[]byte("/bin/true")}}}
	var cmd, barrier, record int64
	for b.Loop() {
		r, err := d.tryRun(b, req)
		if err != nil {
			b.Fatal(err)
		}
		cmd += r.GetTimings().GetCommandNs()
		barrier += r.GetTimings().GetBarrierNs()
		record += r.GetTimings().GetRecordNs()
	}
	b.ReportMetric(float64(cmd)/float64(b.N), "command-ns/op")
	b.ReportMetric(float64(barrier)/float64(b.N), "barrier-ns/op")
	b.ReportMetric(float64(record)/float64(b.N), "record-ns/op")
}

// Fork of one child, its release not counted.
func BenchmarkFork(b *testing.B) {
	d := running(b)
	root, _ := d.newTree(b)
	var ready int64
	for b.Loop() {
		r := d.tryFork(b, &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{
			{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: root.GetId()}, Count: 1}}})
		ready += r[0].GetReadyNs()
		b.StopTimer()
		free(b, d, r[0].GetSandbox())
		d.settle(b)
		b.StartTimer()
	}
	b.ReportMetric(float64(ready)/float64(b.N), "ready-ns/op")
}

// settle waits until everything released is gone and the zygotes are back.
func (d *daemon) settle(t testing.TB) {
	t.Helper()
	until(t, "nothing is left to do", func() bool {
		i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return i.GetPendingRemovals() == 0 && i.GetZygotesReady() >= 8
	})
}
