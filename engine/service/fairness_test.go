package service

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// fairBound is how much longer the median turn of honest sandboxes may take next to an attacker, in the best of a few tries: far
// above what is measured (docs/BENCHMARKS.md, isolation), and far below what an attacker without limits makes of it.
const fairBound = 10

// An attacker that takes all that it gets doesn't keep 16 others from going on.
func TestAnAttackerHoldsNobodyUp(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	free(t, d, sb)
	var honest []*boxwoodv1.Sandbox
	honest = append(honest, d.fork(t, root.GetId(), 16)...)
	turns := func() time.Duration {
		var mu sync.Mutex
		var took []time.Duration
		var wg sync.WaitGroup
		for _, sb := range honest {
			wg.Go(func() {
				for range 5 {
					start := time.Now()
					_, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Argv: [][]byte{[]byte("true")}}})
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					took = append(took, time.Since(start))
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if len(took) == 0 {
			t.FailNow()
		}
		slices.Sort(took)
		return took[len(took)/2]
	}
	turns()
	for name, script := range map[string]string{
		"cpu":   `for i in {1..32}; do while :; do :; done & done; echo up; wait`,
		"forks": `echo up; f() { f | f & }; f; while :; do (:) & done`,
		"disk":  `echo up; printf -v x '%1048576s'; while :; do printf %s "$x" >>/big || : >/big; done`,
	} {
		best := 1e9
		for try := 0; try < 3 && best > fairBound; try++ {
			quiet := turns()
			attacker := d.fork(t, root.GetId(), 1)[0]
			attack, stop := context.WithCancel(ctx(t))
			stream, err := d.client.RunTurn(attack, &boxwoodv1.RunTurnRequest{SandboxId: attacker.GetId(), Command: &boxwoodv1.Command{Shell: []byte(script)}})
			if err == nil {
				_, err = stream.Recv() // it is up
			}
			if err != nil {
				t.Fatal(err)
			}
			beside := turns()
			stop()
			free(t, d, attacker)
			best = min(best, float64(beside)/float64(quiet))
		}
		t.Logf("next to an attack on %s a turn takes %.1f times as long", name, best)
		if best > fairBound {
			t.Errorf("next to an attack on %s a turn takes %.1f times as long, and at most %d is fair", name, best, fairBound)
		}
	}
}
