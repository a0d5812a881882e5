// Package metrics shows the engine's counters to Prometheus. None has a label whose values a client
// could choose: what there is of series is bounded, and tells nothing of one tree.
package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/hostload"
	"github.com/boxwood-rl/boxwood/sched"
)

// Server answers GET /metrics. Whoever can connect may read it.
func Server(e *engine.Engine) *http.Server {
	r := prometheus.NewRegistry()
	r.MustRegister(collector{e}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	return &http.Server{Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: 20 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10}
}

// collector reads everything anew for each scrape.
type collector struct{ e *engine.Engine }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("boxwood_"+name, help, labels, nil)
}

func ofClass(name, help string) *prometheus.Desc { return desc("sched_"+name, help, "line", "class") }

// counts are the counters of a class of work on a line.
var counts = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(sched.Standing) float64
}{
	{ofClass("waiting", "What waits."), prometheus.GaugeValue, func(s sched.Standing) float64 { return float64(s.Waiting) }},
	{ofClass("running", "What runs."), prometheus.GaugeValue, func(s sched.Standing) float64 { return float64(s.Running) }},
	{ofClass("limit", "What of the class may run at once; it follows the host."), prometheus.GaugeValue, func(s sched.Standing) float64 { return float64(s.Limit) }},
	{ofClass("tenants", "Trees whose work waits."), prometheus.GaugeValue, func(s sched.Standing) float64 { return float64(s.Tenants) }},
	{ofClass("oldest_seconds", "The longest that the first in line of a tree has waited."), prometheus.GaugeValue, func(s sched.Standing) float64 { return s.Oldest.Seconds() }},
	{ofClass("added_total", "What came."), prometheus.CounterValue, func(s sched.Standing) float64 { return float64(s.Added) }},
	{ofClass("failed_total", "What ended with an error."), prometheus.CounterValue, func(s sched.Standing) float64 { return float64(s.Failed) }},
	{ofClass("cancelled_total", "What nobody wanted any more before it started."), prometheus.CounterValue, func(s sched.Standing) float64 { return float64(s.Cancelled) }},
	{ofClass("dropped_total", "What was past its deadline when its turn came."), prometheus.CounterValue, func(s sched.Standing) float64 { return float64(s.Dropped) }},
	{ofClass("promoted_total", "What became urgent, as somebody came to wait for it."), prometheus.CounterValue, func(s sched.Standing) float64 { return float64(s.Promoted) }},
	{ofClass("refused_total", "What wasn't taken in, as the queue was full."), prometheus.CounterValue, func(s sched.Standing) float64 { return float64(s.Refused) }},
	{ofClass("limit_raised_total", "How often its limit went up by one."), prometheus.CounterValue, func(s sched.Standing) float64 { return float64(s.Raised) }},
	{ofClass("limit_lowered_total", "How often its limit went down by one."), prometheus.CounterValue, func(s sched.Standing) float64 { return float64(s.Lowered) }},
	{ofClass("late_total", "Captures in the shadow without slack left when they started."), prometheus.CounterValue, func(s sched.Standing) float64 { return float64(s.Late) }},
	{ofClass("wasted_seconds_total", "Time of what failed, and of what was made ahead and not used."), prometheus.CounterValue, func(s sched.Standing) float64 { return s.Wasted.Seconds() }},
}

var times = []struct {
	desc *prometheus.Desc
	get  func(sched.Standing) sched.Histogram
}{
	{ofClass("wait_seconds", "From coming to start."), func(s sched.Standing) sched.Histogram { return s.Wait }},
	{ofClass("took_seconds", "From start to end."), func(s sched.Standing) sched.Histogram { return s.Took }},
	{ofClass("exposed_seconds", "How long somebody waited for what was to be done in the shadow."), func(s sched.Standing) sched.Histogram { return s.Exposed }},
	{ofClass("slack_seconds", "What captures in the shadow had left when they started."), func(s sched.Standing) sched.Histogram { return s.Slack }},
}

var (
	slots = desc("sched_slots", "What may run at once: the largest of the limits of its classes.", "line")

	sandboxes = desc("sandboxes", "Live sandboxes.")
	nodes     = desc("nodes", "Nodes of all trees.")
	zygotes   = desc("zygotes", "Processes that wait to become a sandbox.")
	removals  = desc("pending_removals", "Released sandboxes and removed snapshots whose resources aren't back yet.")
	poolUsed  = desc("pool_used_bytes", "What of the pool is in use.")
	poolTotal = desc("pool_bytes", "Size of the pool.")
	lost      = desc("lost_events_total", "Turns whose verdict was forced to changed because events were lost.")

	memoryTotal     = desc("host_memory_bytes", "Memory of the host.")
	memoryAvailable = desc("host_memory_available_bytes", "What of it could be had without swapping.")
	stalled         = desc("host_stalled_seconds_total", "Time in which some task, or all that had something to do, waited for it (PSI).", "resource", "share")
)

func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range counts {
		to <- m.desc
	}
	for _, m := range times {
		to <- m.desc
	}
	for _, d := range []*prometheus.Desc{slots, sandboxes, nodes, zygotes, removals, poolUsed, poolTotal, lost, memoryTotal, memoryAvailable, stalled} {
		to <- d
	}
}

func (c collector) Collect(to chan<- prometheus.Metric) {
	put := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	for _, l := range c.e.Lines() {
		put(slots, prometheus.GaugeValue, float64(l.Slots), l.Line.String())
		for k, s := range l.Classes {
			if s.Added+s.Refused == 0 {
				continue // this line has no such work
			}
			labels := []string{l.Line.String(), sched.Class(k).String()}
			for _, m := range counts {
				put(m.desc, m.kind, m.get(s), labels...)
			}
			for _, m := range times {
				h := m.get(s)
				to <- prometheus.MustNewConstHistogram(m.desc, h.Count, h.Sum.Seconds(), cumulative(h), labels...)
			}
		}
	}
	i, err := c.e.Info()
	if err != nil {
		to <- prometheus.NewInvalidMetric(sandboxes, err)
		return
	}
	put(sandboxes, prometheus.GaugeValue, float64(i.Sandboxes))
	put(nodes, prometheus.GaugeValue, float64(i.Nodes))
	put(zygotes, prometheus.GaugeValue, float64(i.Zygotes))
	put(removals, prometheus.GaugeValue, float64(i.PendingRemovals))
	put(poolUsed, prometheus.GaugeValue, float64(i.Pool.Used))
	put(poolTotal, prometheus.GaugeValue, float64(i.Pool.Total))
	put(lost, prometheus.CounterValue, float64(i.LostEvents))
	load, err := hostload.Read()
	if err != nil {
		to <- prometheus.NewInvalidMetric(memoryTotal, err)
		return
	}
	put(memoryTotal, prometheus.GaugeValue, float64(load.MemoryTotal))
	put(memoryAvailable, prometheus.GaugeValue, float64(load.MemoryAvailable))
	if s := load.Stalls; s != nil {
		put(stalled, prometheus.CounterValue, s.CPU.Seconds(), "cpu", "some")
		put(stalled, prometheus.CounterValue, s.IO.Seconds(), "io", "some")
		put(stalled, prometheus.CounterValue, s.IOFull.Seconds(), "io", "full")
		put(stalled, prometheus.CounterValue, s.Memory.Seconds(), "memory", "some")
		put(stalled, prometheus.CounterValue, s.MemoryFull.Seconds(), "memory", "full")
	}
}

// cumulative is a histogram as Prometheus has them: how many are at most as long as each bound.
func cumulative(h sched.Histogram) map[float64]uint64 {
	out := map[float64]uint64{}
	var n uint64
	for i, of := range h.Buckets[:len(h.Buckets)-1] {
		n += of
		out[sched.Bound(i).Seconds()] = n
	}
	return out
}
