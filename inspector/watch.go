package inspector

import (
	"bytes"
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/boxwood-rl/boxwood/bpf"
	"github.com/boxwood-rl/boxwood/internal/printable"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/tree"
)

// watch is one sandbox under watch. The kernel side sets flags in box at any
// time; everything else belongs to the goroutine that uses the watch.
type watch struct {
	k        *Kernel
	subject  Subject
	slot     uint32
	box      *bpf.InspectorBox
	orphaned atomic.Bool // the Kernel is closed

	// Since the watch began: the sandbox has mounted something. Names that come and
	// go there raise the same calls, and no file system that we compare shows them.
	mounted bool

	// Since the epoch began.
	base     *base
	began    int64     // a stamp
	mark     clockMark // from before that stamp
	missed   uint64    // of the programs, as was known when it began: no more than there were
	taint    []string
	taintAll bool
	seen     listing // the last one of upper, if any
	stale    bool    // upper has to be listed again: the last try failed, or somebody ran
	files    comparison
	blurred  bool  // the last comparison failed, so which files changed isn't known
	sleep    sleep // survivors when it began

	// Since the turn began.
	turn    signs
	written uint64 // of the box, when it began
	started uint64
	last    []Survivor // survivors at the last barrier
	running bool       // this barrier found a process, or couldn't find out
}

func newWatch(k *Kernel, s Subject, slot uint32) *watch {
	w := &watch{k: k, subject: s, slot: slot, box: k.box(slot)}
	*w.box = bpf.InspectorBox{Cgroup: s.Cgroup, Root: s.Subvolume}
	w.begin(s.Base)
	if s.Restored {
		w.fallAsleep()
	}
	return w
}

// begin starts an epoch. No task of the sandbox runs meanwhile.
func (w *watch) begin(path string) {
	held, like := w.held(), w.seen
	if like.tree == nil && w.base != nil {
		// A directory of the new base that looks as it did in the old one, or when
		// upper was last listed, needs no reading again.
		like = w.base.listed()
		like.at = w.began
	}
	if w.k.clock.setSince(w.mark) {
		like = listing{}
	}
	w.base = w.k.bases.get(path)
	if held.tree != nil {
		w.base.know(held)
	} else {
		w.base.hint(like)
	}
	w.mark = w.k.clock.mark()
	w.began = stamp()
	w.missed = w.k.missed.Load()
	w.taint, w.taintAll = nil, false
	w.seen, w.stale, w.blurred, w.files = listing{}, false, false, comparison{}
	w.wake()
	w.turn = 0
	atomic.StoreUint64(&w.box.Epoch, 0)
	atomic.StoreUint64(&w.box.Turn, 0)
	atomic.StoreUint64(&w.box.FirstNew, math.MaxUint64)
	atomic.StoreUint64(&w.box.Lost, 0)
	atomic.StoreUint32(&w.box.Ninodes, 0)
	atomic.StoreUint32(&w.box.TurnFrom, 0)
	for i := range w.box.Moved {
		atomic.StoreUint32(&w.box.Moved[i], 0)
	}
}

// held is what a snapshot of upper holds that was taken just now, if the flags tell that it is
// what was listed last. A new base is then known without looking at it, while nothing of it is
// in memory yet. Files that were written (sawOld) are still the same names; what makes or
// removes a name, also while it copies a file up, sets another flag, twice.
func (w *watch) held() listing {
	epoch, fresh := signsIn(atomic.LoadUint64(&w.box.Epoch)), signsIn(atomic.LoadUint64(&w.box.Turn))
	const harmless = sawOld | sawExternal | sawTerminal
	switch {
	case w.base == nil, w.stale, len(w.taint) > 0, w.orphaned.Load(), w.missed != w.k.missed.Load(),
		epoch&eitherHalf != 0, fresh&^harmless != 0:
		return listing{}
	case w.seen.tree != nil:
		return w.seen
	case epoch&^harmless != 0:
		return listing{}
	}
	return w.base.listed()
}

func (w *watch) BeginTurn() {
	// What survivors did since the last barrier goes to the turn that begins.
	w.turn = 0
	w.written, w.started = atomic.LoadUint64(&w.box.Written), atomic.LoadUint64(&w.box.Started)
	atomic.StoreUint32(&w.box.TurnFrom, atomic.LoadUint32(&w.box.Ninodes))
}

func (w *watch) Tainted(both bool, why string) {
	w.taint = append(w.taint, why)
	w.taintAll = w.taintAll || both
}

func (w *watch) NewEpoch(base string) {
	w.k.gone.Add(atomic.LoadUint64(&w.box.Lost))
	left := signs(atomic.LoadUint64(&w.box.Turn)) & sawExternal // by a survivor since the turn: no state, which a capture would have
	w.begin(base)
	atomic.StoreUint64(&w.box.Turn, uint64(left))
	w.fallAsleep()
}

func (w *watch) Close() { w.k.drop(w) }

// barrierLimit is when a barrier gives up comparing, if its caller has more
// patience. A comparison of 200,000 warm names takes about half a second.
const barrierLimit = 5 * time.Second

func (w *watch) Barrier(ctx context.Context) Report {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, barrierLimit)
	defer cancel()
	// The order matters. Survivors come first: if there are none, nobody can change
	// anything any more. Flags are taken before the listing that explains them, so
	// what a survivor changes meanwhile is flagged again for the next barrier.
	now, err := w.survivors()
	w.running = err != nil || len(now) > 0
	fresh := signsIn(atomic.SwapUint64(&w.box.Turn, 0))
	w.turn |= fresh
	epoch := signsIn(atomic.LoadUint64(&w.box.Epoch))

	all, turn := &finding{}, &finding{}
	w.judgeUnknown(epoch, all, turn)
	w.judgeFiles(ctx, epoch, fresh, all, turn)
	w.judgeProcesses(epoch, now, err, all, turn)
	r := Report{
		Verdict: all.verdict(), Turn: turn.verdict(),
		External: w.turn&sawExternal != 0 && !sabotage.On("external"),
		Effects:  turn.effects, Count: turn.count,
		Written: int64(atomic.LoadUint64(&w.box.Written) - w.written), Started: int64(atomic.LoadUint64(&w.box.Started) - w.started),
		Beyond:    all.beyond,
		Survivors: all.fates,
		Reasons:   all.reasons,
		Lost:      atomic.LoadUint64(&w.box.Lost),
		Barrier:   time.Since(start),
	}
	if sabotage.Hundredth("none") {
		r.Verdict, r.Turn = tree.None, tree.None
	}
	return r
}

// judgeSigns counts those that say neither half for both.
func (w *watch) judgeSigns(epoch signs, all, turn *finding) {
	for f := signs(1); f <= sawNewMeta; f <<= 1 {
		if f&eitherHalf&epoch != 0 {
			all.both(f.reason(uint32(atomic.LoadUint64(&w.box.ObjectNr))))
		}
		if f&eitherHalf&w.turn != 0 {
			why := f.reason(uint32(atomic.LoadUint64(&w.box.ObjectNr)))
			turn.both(why)
			turn.effect(tree.Unknown, nil, why)
		}
	}
}

// judgeUnknown deals with what can't be given to one half.
func (w *watch) judgeUnknown(epoch signs, all, turn *finding) {
	if w.orphaned.Load() {
		all.both("the inspector is closed")
		turn.both("the inspector is closed")
		return
	}
	if missed, err := w.k.misses(); err != nil || missed != w.missed {
		all.both("lost")
		turn.both("lost")
	}
	w.judgeSigns(epoch, all, turn)
	for _, why := range w.taint {
		all.files = true
		all.process = all.process || w.taintAll
		all.reasons = append(all.reasons, why)
	}
	if w.turn&sawExternal != 0 {
		turn.effect(tree.External, nil, "")
	}
}

func (w *watch) judgeProcesses(epoch signs, now []Survivor, err error, all, turn *finding) {
	for _, f := range []signs{sawObject, sawProc, sawReach} {
		why := f.reason(uint32(atomic.LoadUint64(&w.box.ObjectNr)))
		if epoch&f != 0 {
			all.process = true
			all.reasons = append(all.reasons, why)
		}
		if w.turn&f != 0 {
			turn.process = true
			turn.effect(tree.KernelObject, nil, why)
		}
	}
	w.mounted = w.mounted || epoch&sawMount != 0
	const onMounts = sawNames | sawMeta | sawMoved | sawNewMeta
	if w.mounted && epoch&onMounts != 0 {
		all.processes("files may have changed on a file system that the sandbox mounted")
		turn.process = turn.process || w.turn&onMounts != 0
	}
	all.beyond = all.process || err != nil
	w.judgeSurvivors(epoch, now, err, all, turn)
}

// String is the command line on one line, bounded and safe to print.
func (s Survivor) String() string {
	words := bytes.ReplaceAll(bytes.TrimRight(s.Cmdline, "\x00"), []byte{0}, []byte{' '})
	return printable.Cut(printable.Line(words), 80)
}

func (s Survivor) is(t Survivor) bool {
	return s.PID == t.PID && s.HostPID == t.HostPID && bytes.Equal(s.Cmdline, t.Cmdline)
}

func (w *watch) survivors() ([]Survivor, error) {
	if w.subject.Survivors == nil {
		return nil, errNoSurvivors
	}
	return w.subject.Survivors()
}
