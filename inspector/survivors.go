package inspector

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/bpf"
	"github.com/boxwood-rl/boxwood/tree"
)

// A survivor is unchanged since the epoch began only if two witnesses agree.
//
// Events: since then no call of it ended other than to be started again (which
// freezing does to it), no signal reached it, and nobody made a call that can reach
// it otherwise (bpf/survivors.h).
//
// Position: each of its threads is in the same call, entered from the same place with
// the same stack and arguments, as when it was saved.
//
// Whatever can't be found out about one counts as changed.

// sleep is what is known of the processes that were there when an epoch began.
type sleep struct {
	all []*sleeper
	// unlisted: they couldn't be listed, so nobody knows what was saved.
	unlisted error
	objects  []uint64 // keys in the kernel's map of holdings
}

// sleeper is one such process.
type sleeper struct {
	Survivor
	why     string // it wasn't asleep, or can't be watched; empty: it was
	start   uint64
	threads map[uint32]bpf.InspectorThread
	inodes  map[uint64]bool // of the sandbox's subvolume, open or mapped
	bound   []string        // where its unix sockets are bound, as it was then
	unbound bool            // that isn't known of all of them
	watched bool            // by the programs
}

// What a sleeper holds that a call can reach without opening it; as enum holding of
// bpf/survivors.h.
const (
	holdsStream = 1 << iota
	holdsDgram
	holdsShared
)

// Why the kernel says a sleeper has changed; as enum stir there.
const (
	stirRan = 1 << iota
	stirSignal
)

// wake forgets the sleepers of the epoch that ends.
func (w *watch) wake() {
	if len(w.sleep.all) == 0 {
		w.sleep = sleep{}
		return
	}
	atomic.StoreUint32(&w.box.Asleep, 0)
	for _, s := range w.sleep.all {
		if s.watched {
			w.k.awake(uint32(s.HostPID))
		}
	}
	for _, o := range w.sleep.objects {
		_ = w.k.objs.Holdings.Delete(&o)
	}
	w.sleep = sleep{}
}

// fallAsleep looks at the processes that are there when an epoch begins. None of
// them runs meanwhile.
func (w *watch) fallAsleep() {
	now, err := w.survivors()
	w.sleep.unlisted = err
	w.last = now
	if err != nil || len(now) == 0 {
		return
	}
	var others []*sleeper // those that are judged elsewhere
	holds := holdings{}
	for _, p := range now {
		s := &sleeper{Survivor: p}
		w.sleep.all = append(w.sleep.all, s)
		s.look(w.k)
		if p.Elsewhere {
			others = append(others, s)
			if held, err := w.k.heldBy(p.HostPID); err != nil || s.why != "" {
				holds.others = append(holds.others, nil) // unknown: all is shared
			} else {
				holds.others = append(holds.others, held)
			}
		}
	}
	for _, s := range w.sleep.all {
		if s.Elsewhere || s.why != "" {
			continue
		}
		held, err := w.k.heldBy(s.HostPID)
		if err != nil {
			s.why = err.Error()
			continue
		}
		s.why = holds.add(s, held, w.box.Root)
		s.findBound(held)
		for _, o := range others {
			if s.why == "" && s.sharesTaskWith(o) {
				s.why = "it shares its memory, descriptors or folder with " + o.String()
			}
		}
	}
	asleep := uint32(0)
	if err := w.k.watchSurvivors(); err != nil {
		w.sleep.giveUp("it can't be watched: " + err.Error())
		return
	}
	for o := range holds.objects {
		if err := w.k.objs.Holdings.Put(&o, &w.slot); err != nil {
			w.sleep.giveUp("what it holds can't be kept: " + err.Error())
			return
		}
		w.sleep.objects = append(w.sleep.objects, o)
	}
	for _, s := range w.sleep.all {
		if s.Elsewhere || s.why != "" {
			continue
		}
		if err := w.k.asleep(uint32(s.HostPID)); err != nil {
			s.why = "it can't be watched: " + err.Error()
			continue
		}
		s.watched = true
		asleep++
	}
	atomic.StoreUint32(&w.box.Holds, holds.reachable)
	atomic.StoreUint32(&w.box.Asleep, asleep)
}

func (s *sleep) giveUp(why string) {
	for _, p := range s.all {
		p.why = why
	}
}

// look finds the threads of a process and whether they are asleep.
func (s *sleeper) look(k *Kernel) {
	threads, err := k.threadsOf(s.HostPID)
	switch {
	case s.HostPID == 0:
		s.why = "its process id isn't known"
	case err != nil:
		s.why = err.Error()
	case len(threads) == 0:
		s.why = "it has ended"
	}
	s.threads = map[uint32]bpf.InspectorThread{}
	for _, t := range threads {
		if t.Exiting != 0 {
			continue
		}
		if t.Tid == uint32(s.HostPID) {
			s.start = t.Start
		}
		rests, ok := atRest(t)
		if !ok && s.why == "" && !s.Elsewhere {
			s.why = "it wasn't waiting in a call when it was saved"
		}
		s.threads[t.Tid] = rests
	}
}

// Results of a call, as it stands in a register.
const (
	eintr            = -4
	enosys           = -38 // what is there while the call lasts
	erestartsys      = -512
	erestartBlock    = -516
	nrRestartSyscall = 219
)

func restarts(result int64) bool { return result <= erestartsys && result >= erestartBlock }

// atRest says whether a thread that stands still does so in a call that will go on,
// and returns it as it will be found then. Besides the plain case it may be about to
// make the call, again or for the first time: that is how a dump leaves and has it that was taken
// in one.
func atRest(t bpf.InspectorThread) (bpf.InspectorThread, bool) {
	switch {
	case t.Nr >= 0 && (restarts(t.Ax) || t.Ax == eintr || t.Ax == enosys):
		return t, true
	case t.Ax >= 0 && isSyscall(t.Tid, t.Ip):
		t.Nr, t.Ax = t.Ax, enosys
		t.Ip += 2
		return t, true
	case t.Nr < 0 && t.Ax == eintr && isSyscall(t.Tid, t.Ip-2):
		return t, true
	}
	return t, false // it came back and is on its way
}

// isSyscall says whether the instruction syscall is at an address of a thread.
func isSyscall(tid uint32, at uint64) bool {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mem", tid))
	if err != nil {
		return false
	}
	defer f.Close()
	var op [2]byte
	_, err = f.ReadAt(op[:], int64(at))
	return err == nil && op == [2]byte{0x0f, 0x05}
}

// stillThere says whether a thread is in the call that it was in. Registers that
// hold no argument of most calls aren't compared: a loop that repeats a call which
// was interrupted may leave other values in them.
func stillThere(was, is bpf.InspectorThread) bool {
	if was.Start != is.Start || was.Ip != is.Ip || was.Sp != is.Sp || [4]uint64(was.Args[:4]) != [4]uint64(is.Args[:4]) {
		return false
	}
	if is.Nr == was.Nr && is.Ax == was.Ax {
		return true // it hasn't been started again yet
	}
	if is.Nr < 0 || is.Ax != enosys && is.Ax != eintr && !restarts(is.Ax) {
		return false
	}
	return was.Nr < 0 || is.Nr == was.Nr || is.Nr == nrRestartSyscall || was.Nr == nrRestartSyscall
}

func (s *sleeper) sharesTaskWith(o *sleeper) bool {
	for _, t := range s.threads {
		for _, u := range o.threads {
			if t.Mm == u.Mm || t.Files == u.Files || t.Fs == u.Fs {
				return true
			}
		}
	}
	return false
}

// holdings sums up what the sleepers of one sandbox hold.
type holdings struct {
	objects   map[uint64]bool // addresses of inodes that others can open
	reachable uint32
	others    [][]bpf.InspectorHeld // of processes that are judged elsewhere
}

// Descriptors without a file that change only by calls of those who have them, or
// with time alone. Others (inotify, io_uring, userfaultfd) fill up by themselves.
var calm = []string{"[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "[pidfd]"}

const (
	magicAnon      = 0x09041934
	magicTmpfs     = 0x01021994
	magicHugetlbfs = 0x958458f6
	magicSecretmem = 0x5345434d
	mapping        = ^uint32(0) // in place of a descriptor
)

func isTerminal(h *bpf.InspectorHeld) bool {
	major := h.Rdev >> 20
	return h.Mode&unix.S_IFMT == unix.S_IFCHR && major >= 136 && major <= 143
}

func isMaster(h *bpf.InspectorHeld) bool {
	return h.Mode&unix.S_IFMT == unix.S_IFCHR && h.Rdev == 5<<20|2
}

// add notes what one sleeper holds, and says why it can't be called asleep, if so.
func (l *holdings) add(s *sleeper, held []bpf.InspectorHeld, root uint64) (why string) {
	if l.objects == nil {
		l.objects = map[uint64]bool{}
	}
	s.inodes = map[uint64]bool{}
	for i := range held {
		h := &held[i]
		if h.Root == root && h.Ino != 0 {
			s.inodes[h.Ino] = true
		}
		if h.Shared != 0 {
			l.reachable |= holdsShared
		}
		if with := l.sharedWithOthers(h); with != "" {
			return with
		}
		internal := h.Internal != 0 && (h.Magic == magicTmpfs || h.Magic == magicHugetlbfs)
		switch kind := h.Mode & unix.S_IFMT; {
		case kind == unix.S_IFSOCK && h.Family == unix.AF_PACKET:
			return "it holds a packet socket"
		case kind == unix.S_IFSOCK && (h.Type == unix.SOCK_STREAM || h.Type == unix.SOCK_SEQPACKET):
			l.reachable |= holdsStream
		case kind == unix.S_IFSOCK:
			l.reachable |= holdsDgram
		case kind == unix.S_IFIFO || internal || h.Magic == magicSecretmem:
			l.objects[h.Inode] = true
		case isTerminal(h) && !l.held(h.Inode):
			l.objects[h.Inode] = true
		case h.Magic == magicAnon && !slices.Contains(calm, nameOf(h)):
			return "it holds " + nameOf(h) + ", which changes by itself"
		}
	}
	return ""
}

// whatIs names something that a process holds.
func whatIs(h *bpf.InspectorHeld) string {
	switch h.Mode & unix.S_IFMT {
	case unix.S_IFIFO:
		return "a pipe"
	case unix.S_IFSOCK:
		return "a socket"
	}
	return strconv.Quote(nameOf(h))
}

// held says whether a process that is judged elsewhere holds this, too.
func (l *holdings) held(inode uint64) bool {
	return slices.ContainsFunc(l.others, func(of []bpf.InspectorHeld) bool {
		return slices.ContainsFunc(of, func(h bpf.InspectorHeld) bool { return h.Inode == inode })
	})
}

// sharedWithOthers says whether a process that is judged elsewhere, and so may run,
// holds the same or the other end. A terminal of theirs is judged with them.
func (l *holdings) sharedWithOthers(h *bpf.InspectorHeld) string {
	kind := h.Mode & unix.S_IFMT
	if isTerminal(h) || kind == unix.S_IFCHR && !isMaster(h) || h.Fd == mapping && h.Shared == 0 {
		return ""
	}
	for _, of := range l.others {
		if of == nil {
			return "what a shell holds isn't known"
		}
		for i := range of {
			o := &of[i]
			if o.Fd == mapping && o.Shared == 0 {
				continue
			}
			ends := kind == unix.S_IFSOCK && o.Mode&unix.S_IFMT == unix.S_IFSOCK || isMaster(h) && isTerminal(o)
			if ends || h.Inode == o.Inode {
				return fmt.Sprintf("it shares %s with a shell", whatIs(h))
			}
		}
	}
	return ""
}

// fate says what became of a process that is there now.
func (w *watch) fate(p Survivor, touched string, moved *moved) Fate {
	f := Fate{Survivor: p}
	i := slices.IndexFunc(w.sleep.all, func(s *sleeper) bool { return s.PID == p.PID && s.HostPID == p.HostPID })
	if i < 0 {
		f.Changed = "it wasn't there when the epoch began"
		return f
	}
	s := w.sleep.all[i]
	switch {
	case s.why != "":
		f.Changed = s.why
	case s.Elsewhere:
	default:
		f.Changed = w.stirred(s)
	}
	if f.Changed == "" && !s.Elsewhere {
		f.Changed = touched
	}
	if f.Changed == "" && !s.Elsewhere && moved != nil {
		f.Changed = moved.of(s)
	}
	return f
}

// stirred says why a sleeper has changed by itself or by a signal.
func (w *watch) stirred(s *sleeper) string {
	now := &sleeper{Survivor: s.Survivor}
	now.look(w.k)
	if now.start != s.start || len(now.threads) == 0 {
		return "it has ended"
	}
	pid := uint32(s.HostPID)
	var k bpf.InspectorSleeper
	if err := w.k.objs.Sleepers.Lookup(&pid, &k); err != nil {
		return "its events can't be read: " + err.Error()
	}
	switch {
	case k.Why&stirSignal != 0:
		return "it got " + signalName(k.Signal)
	case k.Why&stirRan != 0:
		return "it ran (" + callName(k.Call) + ")"
	}
	for tid, is := range now.threads {
		was, ok := s.threads[tid]
		if !ok || !stillThere(was, is) {
			return "it isn't in the call that it was in"
		}
	}
	if len(now.threads) != len(s.threads) {
		return "a thread of it has ended"
	}
	return ""
}

func signalName(nr uint32) string {
	if name := unix.SignalName(unix.Signal(nr)); name != "" {
		return name
	}
	return "signal " + strconv.FormatUint(uint64(nr), 10)
}

// judgeSurvivors decides what the processes that are there, and those that are not
// any more, mean for the process half. Files were judged before.
func (w *watch) judgeSurvivors(epoch signs, now []Survivor, err error, all, turn *finding) {
	if err != nil {
		all.processes("the survivors can't be listed: " + err.Error())
		turn.processes("")
		return
	}
	all.fates = w.fates(epoch, now, all)
	var changed []Fate
	for _, f := range all.fates {
		if f.Changed != "" && !f.Elsewhere {
			changed = append(changed, f)
		}
	}
	if len(changed) > 0 {
		all.processes(plural(len(changed), "process survives: ", "processes survive, the first: ") + changed[0].String() + ": " + changed[0].Changed)
		turn.process = true
	}
	for _, s := range now {
		if s.Ignored == "" && !slices.ContainsFunc(w.last, s.is) {
			turn.effect(tree.ProcessSurvived, s.Cmdline, "")
		}
	}
	for _, s := range w.last {
		if s.Ignored == "" && !slices.ContainsFunc(now, s.is) {
			turn.process = true
			turn.effect(tree.ProcessEnded, s.Cmdline, "")
		}
	}
	w.missing(now, all)
	w.last = now
}

// missing tells of processes that were there when the epoch began.
func (w *watch) missing(now []Survivor, all *finding) {
	if w.sleep.unlisted != nil {
		all.processes("what was saved of the processes isn't known: " + w.sleep.unlisted.Error())
	}
	ended := 0
	for _, s := range w.sleep.all {
		if s.Ignored == "" && !slices.ContainsFunc(now, func(p Survivor) bool { return p.PID == s.PID && p.HostPID == s.HostPID }) {
			ended++
		}
	}
	if ended > 0 {
		all.processes(plural(ended, "process of an earlier turn has ended", "processes of earlier turns have ended"))
	}
}

// fates says what became of each process that is there.
func (w *watch) fates(epoch signs, now []Survivor, all *finding) (out []Fate) {
	if len(now) == 0 {
		return nil
	}
	touched := ""
	if epoch&sawTouched != 0 {
		touched = "it may have been reached (" + callName(uint32(atomic.LoadUint64(&w.box.TouchNr))) + ")"
	}
	if touched == "" && epoch&sawTerminal != 0 {
		touched = "the settings of a terminal changed"
	}
	var moved *moved
	if all.files {
		moved = w.moved(epoch)
	}
	for _, p := range now {
		out = append(out, w.fate(p, touched, moved))
	}
	return out
}

// ProcessChanges is told in the contract.
func (w *watch) ProcessChanges() []string {
	now, err := w.survivors()
	epoch := signsIn(atomic.LoadUint64(&w.box.Epoch))
	all, turn := &finding{}, &finding{}
	if w.orphaned.Load() {
		all.processes("the inspector is closed")
	}
	if missed, err := w.k.misses(); err != nil || missed != w.missed || epoch&eitherHalf != 0 {
		all.processes("lost, or not understood")
	}
	if w.taintAll {
		all.processes(strings.Join(w.taint, "; "))
	}
	if signsIn(atomic.LoadUint64(&w.box.Turn))&fileFlags != 0 {
		// No barrier has looked at these yet, so which files they are isn't known.
		all.processes("files changed since the barrier")
	}
	all.files = epoch&fileFlags != 0 || len(w.taint) > 0
	last := w.last
	w.judgeProcesses(epoch, now, err, all, turn)
	w.last = last // effects are the next barrier's to tell
	if !all.process {
		return nil
	}
	return all.reasons
}

// moved is what changed of the files, for asking whether a process has any of it.
type moved struct {
	unknown bool
	inodes  map[uint64]bool
	paths   []string
}

// moved collects it from the last comparison.
func (w *watch) moved(epoch signs) *moved {
	m := &moved{inodes: map[uint64]bool{}}
	n := atomic.LoadUint32(&w.box.Ninodes)
	kept := min(n, uint32(len(w.box.Inodes)))
	m.unknown = n > kept || w.blurred || w.files.partial || len(w.taint) > 0 || epoch&eitherHalf != 0
	find := w.finder(nil, nil)
	defer find.close()
	for i := range kept {
		ino := atomic.LoadUint64(&w.box.Inodes[i])
		if ino == 0 {
			m.unknown = true
			continue
		}
		m.inodes[ino] = true
		if path, aside, ok := find.where(ino); ok && !aside {
			m.paths = append(m.paths, path)
		}
	}
	for _, e := range w.files.names {
		m.paths = append(m.paths, e.path)
		if from, ok := strings.CutPrefix(e.detail, "from "); ok {
			if path, err := strconv.Unquote(from); err == nil {
				m.paths = append(m.paths, path)
			} else {
				m.unknown = true
			}
		}
	}
	for path := range w.files.metas {
		m.paths = append(m.paths, path)
	}
	return m
}

// of says which changed file a process has open, mapped, or as its folder, root or
// program, or what component of their paths changed.
func (m *moved) of(s *sleeper) string {
	if m.unknown {
		return "files changed, not known which"
	}
	for ino := range s.inodes {
		if m.inodes[ino] {
			return "a file that it has open or mapped changed"
		}
	}
	paths, err := s.paths()
	if err != nil {
		return "its files can't be listed: " + err.Error()
	}
	if s.unbound {
		return "files changed, and it isn't known where its sockets are bound"
	}
	for _, p := range append(paths, s.bound...) {
		for _, changed := range m.paths {
			if p == changed || strings.HasPrefix(p, strings.TrimSuffix(changed, "/")+"/") {
				return "a file that it uses changed: " + strconv.Quote(changed)
			}
		}
	}
	return ""
}

// deleted ends the name of what has none any more.
const deleted = " (deleted)"

// placesOf are the places in a sandbox that a link of /proc may mean: a name from the root of its
// mounts on, or, in a process whose root lies elsewhere, from there on.
func placesOf(link, root string) (out []string) {
	for _, from := range []string{"", strings.TrimSuffix(root, "/")} {
		path, ok := strings.CutPrefix(link, from)
		if path = cmp.Or(path, "/"); ok && path[0] == '/' && !slices.Contains(out, path) {
			out = append(out, path)
		}
	}
	return out
}

// paths lists what a process has open, mapped, and as its folder, root and program.
// Any thread will do, and the first may have ended.
func (s *sleeper) paths() (out []string, err error) {
	proc := ""
	for tid := range s.threads {
		proc = fmt.Sprintf("/proc/%d/", tid)
	}
	root, err := os.Readlink(proc + "root")
	if err != nil {
		return nil, err
	}
	add := func(link string) error {
		path, err := os.Readlink(link)
		if os.IsNotExist(err) {
			return nil
		}
		for _, place := range placesOf(path, root) {
			out = append(out, place)
			if name, ok := strings.CutSuffix(place, deleted); ok { // or it is called so
				out = append(out, name)
			}
		}
		return err
	}
	for _, link := range []string{"root", "cwd", "exe"} {
		if err := add(proc + link); err != nil {
			return nil, err
		}
	}
	for _, dir := range []string{"fd", "map_files"} {
		names, err := os.ReadDir(proc + dir)
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			if err := add(proc + dir + "/" + n.Name()); err != nil {
				return nil, err
			}
		}
	}
	return append(out, "/"), nil
}
