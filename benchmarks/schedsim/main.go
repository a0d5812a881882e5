// Command schedsim runs the scheduler's decisions, sched.Core, on simulated hosts, beside other ways to run the same
// load, and prints one JSON line a figure; run.sh calls it. Nothing of it is measured on this machine: service times are
// those of docs/BENCHMARKS.md, loads are assumed (docs/SCHEDULER.md). The same seeds give the same lines. -long simulates
// more of it.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
)

func main() {
	long := flag.Bool("long", false, "five minutes of 20 seeds instead of one of 5")
	flag.Parse()
	seeds, d := 5, time.Minute
	if *long {
		seeds, d = 20, 5*time.Minute
	}
	for _, m := range machines {
		for _, l := range m.compare(seeds, d) {
			if err := json.NewEncoder(os.Stdout).Encode(l); err != nil {
				fmt.Fprintln(os.Stderr, "schedsim:", err)
				os.Exit(1)
			}
		}
	}
}

// machine is a host and its load.
type machine struct {
	name      string
	cores     int
	sandboxes int
	pace      float64 // of models: 1 means waits as they are assumed, 1.5 a third shorter
}

// machines: the service times were measured on 2 cores. The last has the same load a core as the first; the one before it is as full
// as a host can be that still keeps up.
var machines = []machine{
	{"n64", 2, 64, 1},
	{"n96", 2, 96, 1},
	{"n96_fast", 2, 96, 1.5},
	{"n512", 16, 512, 1},
}

type figure struct {
	Bench      string  `json:"bench"`
	Metric     string  `json:"metric"`
	Value      float64 `json:"value"`
	Unit       string  `json:"unit"`
	N          int     `json:"n"`
	Conditions string  `json:"conditions"`
}

// compare gives the figures of each policy. All policies meet the same sandboxes.
func (m machine) compare(seeds int, d time.Duration) (out []figure) {
	how := fmt.Sprintf("simulated: %d cores, %d sandboxes, %d seeds of %s; no machine was measured", m.cores, m.sandboxes, seeds, d)
	var base []figures
	for _, p := range policies {
		var runs []figures
		var all figures
		var rates, cpu, slower []float64
		for seed := range seeds {
			f := simulate(p, m, uint64(seed)+1, d/4, d)
			runs = append(runs, f)
			all.turns += f.turns
			all.exposed = append(all.exposed, f.exposed...)
			all.shares = append(all.shares, f.shares...)
			all.first = append(all.first, f.first...)
			all.child = append(all.child, f.child...)
			rates = append(rates, float64(f.turns)/d.Seconds())
			cpu = append(cpu, 100*f.cpu)
			if len(base) > 0 {
				slower = append(slower, 100*(float64(base[seed].turns)/float64(f.turns)-1))
			}
		}
		emit := func(metric string, v float64, unit string, of int) {
			out = append(out, figure{"sched-sim", m.name + "." + p.name + "." + metric, math.Round(v*1000) / 1000, unit, of, how})
		}
		emit("turns_per_s", stat.Mean(rates, nil), "1/s", all.turns)
		emit("cpu_pct", stat.Mean(cpu, nil), "%", seeds)
		for _, q := range []float64{0.5, 0.99} {
			emit(fmt.Sprintf("first_child_ms.p%g", 100*q), quantile(all.first, q), "ms", len(all.first))
			emit(fmt.Sprintf("fork_ms.p%g", 100*q), quantile(all.child, q), "ms", len(all.child))
		}
		if !p.captures {
			base = runs
			continue
		}
		for _, q := range []float64{0.5, 0.95, 0.99, 0.999} {
			emit(fmt.Sprintf("exposed_ms.p%g", 100*q), quantile(all.exposed, q), "ms", len(all.exposed))
		}
		emit("exposed_share_pct.p95", quantile(all.shares, 0.95), "%", len(all.shares))
		mean := stat.Mean(slower, nil)
		half := distuv.StudentsT{Mu: 0, Sigma: 1, Nu: float64(seeds - 1)}.Quantile(0.975) * stat.StdErr(stat.StdDev(slower, nil), float64(seeds))
		emit("slowdown_vs_uncaptured_pct", mean, "%", seeds)
		emit("slowdown_vs_uncaptured_pct.ci_low", mean-half, "%", seeds)
		emit("slowdown_vs_uncaptured_pct.ci_high", mean+half, "%", seeds)
	}
	return out
}

func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN() // which JSON refuses: a figure that got lost must not look like one
	}
	return stat.Quantile(q, stat.Empirical, slices.Sorted(slices.Values(values)), nil)
}
