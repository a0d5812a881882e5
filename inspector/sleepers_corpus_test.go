package inspector

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/treewalk"
	"github.com/boxwood-rl/boxwood/internal/wilson"
	"github.com/boxwood-rl/boxwood/tree"
)

var (
	sleepersN    = flag.Int("sleepers.n", 40, "turns to run beside random survivors")
	sleepersSeed = flag.Uint64("sleepers.seed", 0, "seed; 0 takes one from the clock")
)

// deeds are what sleepers.c can do, from its own table: quiet ones first.
func deeds(t testing.TB) (quiet, all []string) {
	t.Helper()
	source, err := os.ReadFile("testdata/sleepers.c")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`\bD\((\w\w+)\)`).FindAllStringSubmatch(string(source), -1) {
		all = append(all, m[1])
	}
	return strings.Fields("nothing probe own_limits own_affinity refused pipes socketpair own_terminal temp children"), all
}

// captured begins an epoch and returns what was saved. Calls that freezing interrupts
// for good (EINTR) are made again at once, which a restored process does, too: those
// are looked at when they have.
func (b *box) captured(w Watch, awake bool) theirs {
	b.t.Helper()
	b.freeze()
	w.NewEpoch(b.snapshot())
	was := b.oracle()
	b.thaw()
	settle(b, awake)
	procs, err := b.survivors()
	b.must(err)
	for _, p := range procs {
		if slices.ContainsFunc([]string{"epoll", "sigwait"}, func(way string) bool { return strings.HasSuffix(string(p.Cmdline), way+"\x00") }) {
			was.procs[p.PID], _ = lookAt(p.PID)
		}
	}
	return was
}

// restless is every way of staying behind that does something.
var restless = strings.Fields("timer alarm timerfd busy ends forks stores")

// theirs is what the oracle sees of a box: its survivors, and its files.
type theirs struct {
	procs map[int][]string
	files []string
}

func (b *box) oracle() (o theirs) {
	b.t.Helper()
	procs, err := b.survivors()
	b.must(err)
	o.procs = map[int][]string{}
	for _, p := range procs {
		lines, err := lookAt(p.PID)
		if err != nil {
			lines = []string{"gone: " + err.Error()}
		}
		o.procs[p.PID] = lines
	}
	o.files, _, err = treewalk.Digest(b.root+"/w", treewalk.Options{})
	b.must(err)
	for i, l := range o.files {
		if strings.Contains(l, `" dir `) {
			o.files[i] = regexp.MustCompile(` mtime=\S+`).ReplaceAllString(l, "")
		}
	}
	return o
}

// changed says what differs, in words.
func (o theirs) changed(is theirs) (files, process []string) {
	for pid, was := range o.procs {
		now, ok := is.procs[pid]
		if !ok {
			process = append(process, fmt.Sprintf("%d is gone", pid))
		} else if slices.Contains(was, onItsWay) || slices.Contains(now, onItsWay) {
			continue
		} else if d := treewalk.Diff(was, now, 4); len(d) > 0 {
			process = append(process, fmt.Sprintf("%d: %q", pid, d))
		}
	}
	for pid := range is.procs {
		if _, ok := o.procs[pid]; !ok {
			process = append(process, fmt.Sprintf("%d is new", pid))
		}
	}
	return treewalk.Diff(o.files, is.files, 4), process
}

// Random survivors and what happens beside them, over captures, against an oracle
// that reads their memory, descriptors and registers.
func TestRandomSurvivors(t *testing.T) {
	seed := *sleepersSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d (repeat with -sleepers.seed)", seed)
	r := rand.New(rand.NewPCG(seed, 17))
	k := mustKernel(t, Options{})
	quiet, all := deeds(t)
	var turns, missed, changed, asleep, needless, cautious int64
	for turns < int64(*sleepersN) && !t.Failed() {
		t.Run(fmt.Sprint("from turn ", turns), func(t *testing.T) {
			b := mustBox(t, nil)
			w := mustWatch(t, k, b)
			var log []string
			awake := false
			for range 1 + r.IntN(3) {
				ways := sleeping
				if r.IntN(12) == 0 {
					ways, awake = restless, true
				}
				way := ways[r.IntN(len(ways))]
				if out, err := b.try("/sleepers", "stay", way); err != nil {
					log = append(log, way+" failed: "+out) // two of a kind want one address
					continue
				}
				log = append(log, "stay "+way)
			}
			settle(b, awake)
			barrier(w)
			was, reached := b.captured(w, awake), false
			for range 1 + r.IntN(4) {
				turns++
				calm, did := r.IntN(2) == 0, []string{}
				for range 1 + r.IntN(2) {
					does := all
					if calm {
						does = quiet
					}
					pid := "0"
					if procs, err := b.survivors(); err == nil && len(procs) > 0 {
						pid = strconv.Itoa(procs[r.IntN(len(procs))].PID)
					} else if !calm {
						continue // nobody is left to do it to
					}
					did = append(did, does[r.IntN(len(does))]+" "+pid)
				}
				reached = reached || !calm
				w.BeginTurn()
				for _, d := range did {
					argv := append([]string{"/sleepers", "do"}, strings.Fields(d)...)
					_, _ = b.try(argv...) // what fails was tried, too
				}
				settle(b, awake)
				now := b.oracle()
				rep := barrier(w)
				// A child of a child may only just have ended.
				left, err := b.survivors()
				b.must(err)
				for pid := range now.procs {
					_, saved := was.procs[pid]
					if !saved && !slices.ContainsFunc(left, func(p Survivor) bool { return p.PID == pid }) {
						delete(now.procs, pid)
					}
				}
				log = append(log, strings.Join(did, ", "))
				files, process := was.changed(now)
				switch {
				case len(process) > 0 && !shows(rep.Verdict, tree.Process), len(files) > 0 && !shows(rep.Verdict, tree.Files):
					missed++
					t.Errorf("a change was judged unchanged: verdict %d, %q, %+v\nfiles %q\nprocesses %q\nseed %d: %s", rep.Verdict, rep.Reasons, rep.Survivors, files, process, seed, strings.Join(log, "; "))
					return
				case len(process) > 0:
					changed++
				case rep.Verdict == tree.None || rep.Verdict == tree.Files:
					asleep++
				case awake:
				case !reached:
					needless++
					t.Logf("judged changed without need: %q, after %s", rep.Reasons, strings.Join(log, "; "))
				default:
					cautious++
				}
				if rep.Verdict != tree.None && r.IntN(2) == 0 || len(process) > 0 {
					was, reached = b.captured(w, awake), false
					log = append(log, "captured")
				}
			}
		})
	}
	t.Logf("%d turns: processes changed in %d, of which missed %s; unchanged and judged so %d; judged changed beside a quiet turn %s, after something that could have reached them %d",
		turns, changed, wilson.String(missed, changed+missed), asleep, wilson.String(needless, asleep+needless), cautious)
	if turns >= 200 && (changed < turns/10 || asleep < turns/5) {
		t.Errorf("the mix shows too little: %d changed, %d unchanged", changed, asleep)
	}
}

// settle waits until who sleeps does so again: woken processes run on after a turn.
func settle(b *box, awake bool) {
	for deadline := time.Now().Add(2 * time.Second); time.Now().Before(deadline); {
		procs, err := b.survivors()
		b.must(err)
		if !slices.ContainsFunc(procs, func(p Survivor) bool { return !waiting(p.PID) && syscall.Kill(p.PID, 0) == nil }) || awake {
			return
		}
	}
}
