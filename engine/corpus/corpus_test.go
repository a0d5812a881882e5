package corpus

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/inspector"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/wilson"
	"github.com/boxwood-rl/boxwood/tree"
)

var (
	corpusN    = flag.Int64("corpus.n", 150, "turns to run")
	corpusRow  = flag.Int64("corpus.row", 0, "go on until each row has changed something in so many turns")
	corpusFor  = flag.Duration("corpus.for", 0, "stop after this long, done or not; 0: never")
	corpusSeed = flag.Uint64("corpus.seed", 0, "seed; 0 takes one from the clock")
	corpusOut  = flag.String("corpus.out", "", "file for the counts, as JSON; what it has already is added to, so that a long run can be made in pieces")
)

// outcome is one turn, judged twice.
type outcome struct {
	verdict        tree.Verdict
	files, process []string // what the oracle found changed since the last capture
	status         []string // of the steps
	reasons        []string
}

// missed says which half changed and was judged unchanged.
func (o outcome) missed() (half string) {
	switch {
	case len(o.files) > 0 && o.verdict != tree.Files && o.verdict != tree.Both:
		return "files"
	case len(o.process) > 0 && o.verdict != tree.Process && o.verdict != tree.Both:
		return "process"
	}
	return ""
}

func (o outcome) changed() bool { return len(o.files)+len(o.process) > 0 }

func (s *sandbox) run(p program) outcome {
	t := s.t
	t.Helper()
	r, err := s.h.e.RunTurn(s.ctx, s.id, engine.Command{Argv: []string{"bash", "-c", p.script()}, Deadline: 5 * time.Minute}, engine.NodeInput{}, 0, nil)
	if err != nil {
		t.Fatalf("%v\n%s", err, p)
	}
	if r.Node.TurnStatus == tree.TimedOut {
		t.Fatalf("a program doesn't end:\n%s", p)
	}
	o := outcome{verdict: r.Node.Verdict, reasons: r.Node.Reasons, status: strings.Fields(string(r.Node.Observation.Stdout))}
	captured := o.verdict == tree.Files || p.stays() && o.verdict == tree.Both
	if captured {
		// The capture is over before anyone looks: it must not change anything.
		n, err := s.h.e.WaitCaptured(s.ctx, []ids.Node{r.Node.ID})
		must(t, err)
		if n[0].Capture == tree.Withheld {
			t.Fatalf("a capture failed: %s\n%s", n[0].WithheldReason, p)
		}
	}
	now := s.look()
	o.files, o.process = changed(s.base, now)
	if captured {
		objects, tasks := s.base.kernel, s.base.tasks
		s.base = now
		if len(o.process) > 0 && o.verdict == tree.Files {
			s.base.kernel, s.base.tasks = objects, tasks
		}
	}
	return o
}

// count is of one stratum: turns in which it was tried, ran and said it worked, those in
// which something had changed, and those that were missed.
type count struct{ Tried, Ran, Changed, Missed int64 }

type tally struct {
	Turns, Unchanged, Missed, FalsePositives int64
	Mixed, MixedUnchanged                    int64 // before the run was about idle rows alone
	Rows                                     map[stratum]*count
}

// tallyOf reads the counts of earlier pieces of a run, if there were any.
func tallyOf(path string) (*tally, error) {
	c := &tally{}
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, c)
	}
	if path != "" && err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("reading what was counted before: %w", err)
	}
	had := c.Rows
	c.Rows = map[stratum]*count{}
	for _, s := range strata() {
		c.Rows[s] = &count{}
		if had[s] != nil {
			c.Rows[s] = had[s]
		}
	}
	return c, nil
}

func (c *tally) add(p program, o outcome) {
	c.Turns++
	switch {
	case !o.changed():
		c.Unchanged++
		if o.verdict != tree.None {
			c.FalsePositives++
		}
	case o.missed() != "":
		c.Missed++
	}
	for i, s := range p.steps {
		if s.still || s.way == "" {
			continue
		}
		row := c.Rows[s.stratum]
		row.Tried++
		if !p.together && i < len(o.status) && o.status[i] == "0" || s.origin == raced {
			row.Ran++
		}
		if o.changed() {
			row.Changed++
		}
		if o.missed() != "" {
			row.Missed++
		}
	}
}

func (c *tally) write(t *testing.T, path string) {
	if path == "" {
		return
	}
	data, err := json.Marshal(c)
	if err == nil {
		err = errors.Join(os.WriteFile(path+".new", data, 0o644), os.Rename(path+".new", path))
	}
	if err != nil {
		t.Errorf("keeping the counts: %v", err)
	}
}

// keepEvery is how often the counts are written while a run lasts.
const keepEvery = 30 * time.Second

// sampling is one run of the corpus, shared by what runs sandboxes side by side.
type sampling struct {
	h     *host
	seed  uint64
	began time.Time

	mu   sync.Mutex
	g    *generator
	c    *tally
	done bool
	kept time.Time
}

// next gives out the life of another sandbox, until there is enough.
func (r *sampling) next() []program {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done || *corpusFor > 0 && time.Since(r.began) >= *corpusFor {
		return nil
	}
	if r.c.Turns >= *corpusN {
		idle := r.c.idle()
		if r.done = len(idle) == 0 || *corpusRow == 0 && (len(idle) > len(r.c.Rows)/4 || r.c.Turns >= 2**corpusN); r.done {
			return nil
		}
		return r.g.about(idle)
	}
	return r.g.life()
}

func (r *sampling) add(t *testing.T, p program, o outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.c.add(p, o)
	if r.c.Turns <= *corpusN {
		r.c.Mixed, r.c.MixedUnchanged = r.c.Turns, r.c.Unchanged
	}
	if time.Since(r.kept) >= keepEvery {
		r.c.write(t, *corpusOut)
		r.kept = time.Now()
	}
}

// sandboxes runs one after the other.
func (r *sampling) sandboxes(t *testing.T, stop func() bool) {
	for turns := r.next(); len(turns) > 0 && !stop(); turns = r.next() {
		s := r.h.sandbox(t)
		for i := range turns {
			o := s.run(turns[i])
			r.add(t, turns[i], o)
			if half := o.missed(); half != "" {
				s.report(half, turns[:i+1], o, r.seed)
				break
			}
			if !o.changed() && o.verdict != tree.None {
				t.Logf("a false positive, %q:\n%s", o.reasons, history(turns[:i+1]))
			}
			if o.verdict == tree.Both && !turns[i].stays() {
				break // nothing is captured, so the next verdict would be no news
			}
		}
		s.release()
	}
}

// Random programs as turns of sandboxes, each half's verdict against the oracle. As many
// sandboxes run side by side as the flag -parallel says.
func TestCorpus(t *testing.T) {
	r := &sampling{seed: *corpusSeed, began: time.Now(), kept: time.Now()}
	if r.seed == 0 {
		r.seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d (repeat with -corpus.seed)", r.seed)
	r.h = mustHost(t, options{audit: .1})
	r.g = &generator{r: rand.New(rand.NewPCG(r.seed, 3))}
	var err error
	r.c, err = tallyOf(*corpusOut)
	must(t, err)
	defer func() { r.c.write(t, *corpusOut) }() // also if the run breaks off
	beside, err := strconv.Atoi(flag.Lookup("test.parallel").Value.String())
	must(t, err)
	t.Run("sandboxes", func(t *testing.T) {
		for i := range beside {
			t.Run(strconv.Itoa(i+1), func(one *testing.T) {
				one.Parallel()
				r.sandboxes(one, t.Failed)
			})
		}
	})
	r.h.audited(t)
	r.c.judge(t, r.done)
}

// report fails with the shortest program that is still missed.
func (s *sandbox) report(half string, turns []program, o outcome, seed uint64) {
	t := s.t
	t.Errorf("a change of %s was judged unchanged (verdict %d, %q), seed %d:\n%s\n%q", half, o.verdict, o.reasons, seed, history(turns), append(o.files, o.process...))
	again := func(turns []program) bool {
		fresh := s.h.sandbox(t)
		defer fresh.release()
		for _, p := range turns {
			if fresh.run(p).missed() != "" {
				return true
			}
		}
		return false
	}
	if !again(turns) {
		t.Log("it doesn't happen each time")
		return
	}
	t.Logf("shrunk:\n%s", history(shrink(turns, again)))
}

// shrink drops turns, then steps, as long as it still fails.
func shrink(turns []program, fails func([]program) bool) []program {
	for i := 0; i < len(turns); {
		if less := append(turns[:i:i], turns[i+1:]...); len(less) > 0 && fails(less) {
			turns = less
		} else {
			i++
		}
	}
	for i := range turns {
		for j := 0; j < len(turns[i].steps); {
			less := slices.Clone(turns)
			if less[i] = turns[i].without(j); len(less[i].steps) > 0 && fails(less) {
				turns = less
			} else {
				j++
			}
		}
	}
	return turns
}

// enough turns that every row should have had its turn.
func (c *tally) enough() bool { return c.Turns >= 3*int64(len(c.Rows)) }

// idle are the rows of which nothing is known, or too little: there were too few turns in
// which they changed something, or, if a sandbox is refused them, in which they were tried.
func (c *tally) idle() (out []stratum) {
	for s, row := range c.Rows {
		n, enough := row.Changed, max(*corpusRow, 1)
		if slices.Contains(refused, s.way) {
			n, enough = row.Tried, *corpusRow
		}
		if n < enough {
			out = append(out, s)
		}
	}
	return out
}

// judge prints the table and says whether the corpus shows what it claims to; as far as it got,
// if it isn't done.
func (c *tally) judge(t *testing.T, done bool) {
	if t.Failed() {
		return
	}
	t.Logf("%d turns, %d unchanged, missed %s, false positives %s", c.Turns, c.Unchanged,
		wilson.String(c.Missed, c.Turns-c.Unchanged), wilson.String(c.FalsePositives, c.Unchanged))
	var b strings.Builder
	fmt.Fprintf(&b, "%-18s %-4s %-10s %6s %8s %7s %s\n", "way", "lang", "descriptor", "ran", "changed", "missed", "missed at most (95 %)")
	idle := c.idle()
	for _, s := range slices.SortedFunc(maps.Keys(c.Rows), func(a, b stratum) int {
		return strings.Compare(a.way+" "+a.lang+a.origin, b.way+" "+b.lang+b.origin)
	}) {
		row := c.Rows[s]
		_, high := wilson.Interval(row.Missed, row.Changed)
		fmt.Fprintf(&b, "%-18s %-4s %-10s %6d %8d %7d %.1f %%\n", s.way, s.lang, s.origin, row.Ran, row.Changed, row.Missed, 100*high)
		switch {
		case slices.Contains(refused, s.way):
			if row.Changed > 0 && row.Ran > 0 {
				t.Errorf("%s in %s works in a sandbox; it is listed as refused", s.way, s.lang)
			}
		case done && row.Changed == 0 && c.enough():
			t.Errorf("%s in %s, descriptor %s: it never changed anything, so nothing is known (ran %d times)", s.way, s.lang, s.origin, row.Ran)
		}
	}
	t.Logf("%d rows, %d of them not reached, or not often enough:\n%s", len(c.Rows), len(idle), &b)
	if !done {
		t.Logf("stopped after %v, before it was done", *corpusFor)
	}
	share := float64(c.MixedUnchanged) / float64(c.Mixed)
	if c.Mixed >= 1000 && (share < .4 || share > .6) {
		t.Errorf("%.0f %% of the turns changed nothing; the corpus should hold 40 to 60 %%", 100*share)
	}
}

// Every call that can change something is tried by a row, or is named here with
// the reason why a sandbox can't get anywhere with it.
func TestEveryCallHasARow(t *testing.T) {
	tried := map[string]bool{}
	for _, r := range rows {
		for _, name := range strings.Fields(r.calls) {
			tried[name] = true
		}
	}
	for _, name := range inspector.CallsThatChange() {
		why, named := untried[name]
		switch {
		case tried[name] && named:
			t.Errorf("%s has a row and a reason to have none: %s", name, why)
		case !tried[name] && !named:
			t.Errorf("%s can change something, and no row tries it", name)
		}
	}
}

// untried are calls that no row can try, and why that is no hole.
var untried = reasons(map[string]string{
	"needs rights over the host that no sandbox has": `uselib acct swapon swapoff reboot iopl ioperm init_module finit_module delete_module
		kexec_load kexec_file_load quotactl quotactl_fd adjtimex clock_adjtime clock_settime settimeofday syslog vhangup bpf open_by_handle_at`,
	"the kernel has it no more": "create_module nfsservctl",
	"undoes or reads what another row makes, and counts as a change by itself":    "umount2 sched_setattr mq_unlink mq_getsetattr shmctl msgctl pivot_root",
	"another way to what another row does, by the same rule":                      "io_uring_register fsconfig move_mount mount_setattr open_tree_attr",
	"only a mark (external), or sendmsg's rule; TestExternalIsAMarkOnly shows it": "connect sendmmsg",
	"acts on pid 1, which its own rights keep it from, or shows nowhere outside":  "ptrace ioprio_set migrate_pages move_pages process_vm_writev pidfd_getfd setsockopt",
	"keyrings can't be seen from outside; the inspector's own test has them":      "add_key request_key keyctl",
})

func reasons(why map[string]string) map[string]string {
	out := map[string]string{}
	for reason, names := range why {
		for _, name := range strings.Fields(names) {
			out[name] = reason
		}
	}
	return out
}

// What one piece of a long run counted, the next goes on with, until no row has too few turns.
func TestPiecesAddUp(t *testing.T) {
	defer func(n int64) { *corpusRow = n }(*corpusRow)
	*corpusRow = 2
	path := filepath.Join(t.TempDir(), "counts")
	write, refusal := stratum{"write_", "c", survivors}, stratum{refused[0], "c", own}
	for piece := range 2 {
		c, err := tallyOf(path)
		must(t, err)
		idle := c.idle()
		if len(idle) != len(strata()) || !slices.Contains(idle, write) || !slices.Contains(idle, refusal) {
			t.Fatalf("piece %d: %d of %d rows are idle", piece+1, len(idle), len(strata()))
		}
		c.add(program{steps: []step{{write, false}}}, outcome{verdict: tree.Files, files: []string{"x"}, status: []string{"0"}})
		c.add(program{steps: []step{{refusal, false}}}, outcome{status: []string{"1"}})
		c.write(t, path)
	}
	c, err := tallyOf(path)
	must(t, err)
	if idle := c.idle(); len(idle) != len(strata())-2 || slices.Contains(idle, write) || slices.Contains(idle, refusal) {
		t.Errorf("%d of %d rows are idle", len(idle), len(strata()))
	}
	if got := *c.Rows[write]; got != (count{2, 2, 2, 0}) || c.Turns != 4 || c.Unchanged != 2 {
		t.Errorf("counted %+v, %d turns, %d unchanged", got, c.Turns, c.Unchanged)
	}
}

// The shrinker finds the one step that matters.
func TestShrink(t *testing.T) {
	guilty := step{stratum{"write_", "c", own}, false}
	quiet := step{stratum{"quiet", "c", own}, true}
	turns := []program{{steps: []step{quiet}}, {steps: []step{quiet, guilty, quiet}}, {steps: []step{quiet}}}
	got := shrink(turns, func(ps []program) bool {
		return slices.ContainsFunc(ps, func(p program) bool { return slices.Contains(p.steps, guilty) })
	})
	if len(got) != 1 || len(got[0].steps) != 1 || got[0].steps[0] != guilty {
		t.Errorf("shrunk to\n%s", history(got))
	}
}
