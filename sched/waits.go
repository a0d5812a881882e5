package sched

import (
	"slices"
	"time"

	"gonum.org/v1/gonum/stat"
)

const (
	// windowSize is how many of the last values count. A quantile of 64 is steady enough to order by,
	// and 64 turns are soon over when a model gets slower.
	windowSize = 64
	// enough values to believe a quantile.
	enough = 5
	// lately is how many of the last values are held against those before.
	lately = 8
	// early is the quantile of past waits at which the next turn is expected: nine of ten come later. To be early costs
	// a better order at most, to be late an exposed delay.
	early = 0.1
	// unknownWait is what is expected before anything was seen.
	unknownWait = time.Second
	// maxTrees whose waits are remembered; the one that was quiet for longest is forgotten.
	maxTrees = 4096
)

// window holds the last values of something. Quantiles bear outliers; a shift of
// the whole drops what was before it.
type window struct {
	values []float64 // oldest first
	sorted []float64 // the same by size, kept so: a turn or fork that sorted 64 values would notice it
	pushed int
}

func (w *window) len() int { return len(w.values) }

func (w *window) push(v float64) {
	if len(w.values) == windowSize {
		at, _ := slices.BinarySearch(w.sorted, w.values[0])
		w.sorted = slices.Delete(w.sorted, at, at+1)
		w.values = slices.Delete(w.values, 0, 1)
	}
	w.values = append(w.values, v)
	at, _ := slices.BinarySearch(w.sorted, v)
	w.sorted = slices.Insert(w.sorted, at, v)
	w.pushed++
}

func (w *window) quantile(q float64) float64 { return stat.Quantile(q, stat.Empirical, w.sorted, nil) }

func (w *window) mean() float64 { return stat.Mean(w.values, nil) }

// drifted drops what is no longer true: if the median of the last values lies beyond nearly all before them, only
// those of the last stay that do so, too.
func (w *window) drifted() {
	if len(w.values) < 3*lately || w.pushed%(lately/2) != 0 { // sorting costs more than the rest
		return
	}
	cut := len(w.values) - lately
	before, last := slices.Sorted(slices.Values(w.values[:cut])), slices.Sorted(slices.Values(w.values[cut:]))
	now := stat.Quantile(0.5, stat.Empirical, last, nil)
	low, high := stat.Quantile(0.05, stat.Empirical, before, nil), stat.Quantile(0.95, stat.Empirical, before, nil)
	if low <= now && now <= high {
		return
	}
	w.values = slices.DeleteFunc(w.values[cut:], func(v float64) bool { return now < low && v >= low || now > high && v <= high })
	w.sorted = slices.Sorted(slices.Values(w.values))
}

// waits estimates, for each tree, how long after a turn the next turn of the same
// sandbox comes. A tree of which little is known is taken to be like all others.
type waits struct {
	trees map[string]*treeWaits
	all   window
	seen  uint64
}

type treeWaits struct {
	window
	seen uint64
}

func (w *waits) observe(tree string, d time.Duration) {
	if w.trees == nil {
		w.trees = map[string]*treeWaits{}
	}
	t := w.trees[tree]
	if t == nil {
		if len(w.trees) >= maxTrees {
			w.forget()
		}
		t = &treeWaits{}
		w.trees[tree] = t
	}
	w.seen++
	t.seen = w.seen
	for _, to := range []*window{&t.window, &w.all} {
		to.push(max(0, d.Seconds()))
		to.drifted()
	}
}

// forget drops the quietest eighth of the trees, so that it isn't done for each that comes.
func (w *waits) forget() {
	var seen []uint64
	for _, t := range w.trees {
		seen = append(seen, t.seen)
	}
	slices.Sort(seen)
	for name, t := range w.trees {
		if t.seen <= seen[len(seen)/8] {
			delete(w.trees, name)
		}
	}
}

// expect is how long after a turn the next one is expected.
func (w *waits) expect(tree string) time.Duration {
	from := &w.all
	if t := w.trees[tree]; t != nil && t.len() >= enough {
		from = &t.window
	}
	if from.len() < enough {
		return unknownWait
	}
	q := max(early, 2/float64(from.len())) // one outlier is borne from the start
	return time.Duration(from.quantile(q) * float64(time.Second))
}
