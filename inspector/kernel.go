package inspector

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/bpf"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// Options of a Kernel.
type Options struct {
	// MaxEntries bounds how many directory entries one barrier compares; past it
	// the files count as changed. 0: 200,000.
	MaxEntries int
	// blind makes the programs miss a class of events. Only tests set it.
	blind uint32
	// without are optional tracepoints that count as absent. Only tests set it.
	without []string
}

// blindTransaction makes them miss the file system's transactions and times of change.
const blindTransaction = 1 << 2 // bpf/box.h: B_TXN

// Kernel is the Inspector of this host: programs that are loaded once, and one
// slot of shared memory per watched sandbox. Safe for concurrent use.
type Kernel struct {
	opts  Options
	objs  bpf.InspectorObjects
	links []link.Link
	progs []*ebpf.Program
	// absent are the optional tracepoints that this kernel doesn't have.
	absent []string
	// tellsDirs: the programs name each directory whose entries may have changed.
	tellsDirs bool
	mem       []byte
	bases     *bases
	clock     *clock

	missed atomic.Uint64 // recursion misses of the programs, as last read
	gone   atomic.Uint64 // lost events of watches that are closed

	survivors survivors

	groups *groups

	mu      sync.Mutex
	used    []bool // by slot
	next    uint32 // where a slot is looked for if the one that is asked for is taken
	watches map[*watch]struct{}
	level   uint32
	closed  bool
}

const boxSize = unsafe.Sizeof(bpf.InspectorBox{})

// Open loads the programs and attaches them. Nothing is watched yet.
func Open(o Options) (*Kernel, error) {
	if o.MaxEntries == 0 {
		o.MaxEntries = 200_000
	}
	k := &Kernel{opts: o, bases: newBases(), watches: map[*watch]struct{}{}}
	var err error
	if k.groups, err = openGroups(); err != nil {
		return nil, err
	}
	if k.clock, err = openClock(); err != nil {
		return nil, errors.Join(err, k.groups.close())
	}
	if err := k.load(); err != nil {
		k.Close()
		return nil, err
	}
	return k, nil
}

// optional programs, the tracepoints they need, and the variable that tells the others, if they ask: without
// one, the rule that stands in for it is stricter (see docs/INSPECTOR.md, "Kernels").
var optional = []struct{ program, tracepoint, variable string }{
	{bpf.InspectorProgDirectIo, "iomap_dio_rw_begin", bpf.InspectorVarHaveDio},
	{bpf.InspectorProgCapable, "cap_capable", bpf.InspectorVarHaveCap},
	{bpf.InspectorProgCtimeMoves, "ctime_ns_xchg", ""},
	{bpf.InspectorProgCtimeStays, "ctime_xchg_skip", ""},
}

func (k *Kernel) load() error {
	spec, err := bpf.LoadInspector()
	if err != nil {
		return fmt.Errorf("reading the programs: %w", err)
	}
	var classes [512]uint16
	var reaches [512]bool
	for _, c := range calls {
		classes[c.nr] = uint16(c.class | bitNamed)
		reaches[c.nr] = slices.Contains(reaching, c.name)
	}
	blind := k.opts.blind // as in enum blindness of bpf/box.h
	if sabotage.On("events") {
		blind |= 1<<0 | 1<<2 // pages and transactions
	}
	if sabotage.On("survivor") {
		blind |= 1 << 6 // calls that reach a survivor
	}
	if err := errors.Join(
		spec.Variables[bpf.InspectorVarCalls].Set(classes),
		spec.Variables[bpf.InspectorVarReaching].Set(reaches),
		spec.Variables[bpf.InspectorVarBlind].Set(blind),
	); err != nil {
		return fmt.Errorf("setting the table of calls: %w", err)
	}
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return unsupported("its type information (BTF) can't be read", err)
	}
	for _, o := range optional {
		there := hasTracepoint(kernel, o.tracepoint) && !slices.Contains(k.opts.without, o.tracepoint)
		if o.variable != "" {
			if err := spec.Variables[o.variable].Set(there); err != nil {
				return fmt.Errorf("setting %s: %w", o.variable, err)
			}
		}
		if !there {
			k.absent = append(k.absent, o.tracepoint)
			// The generated struct wants every program, so it stays as one that
			// does nothing on a tracepoint that is there.
			p := spec.Programs[o.program]
			p.AttachTo = "sched_process_exit"
			p.Instructions = inert()
		}
	}
	// Before Linux 6.3 it had another name.
	if !hasTracepoint(kernel, "io_uring_submit_req") {
		spec.Programs[bpf.InspectorProgUring].AttachTo = "io_uring_submit_sqe"
	}
	if err := spec.LoadAndAssign(&k.objs, nil); err != nil {
		return unsupported("it refuses the programs", err)
	}
	k.progs = []*ebpf.Program{
		k.objs.DirtyFolio, k.objs.DirectIo, k.objs.InodeNew,
		k.objs.Uring, k.objs.Capable, k.objs.CtimeMoves, k.objs.CtimeStays, k.objs.Started, k.objs.SysExit,
	}
	tellsTimes := !slices.Contains(k.absent, "ctime_ns_xchg") && !slices.Contains(k.absent, "ctime_xchg_skip")
	if !tellsTimes {
		k.progs = append(k.progs, k.objs.Transaction)
	}
	if k.links, err = attach(k.progs...); err != nil {
		return err
	}
	k.tellsDirs = k.opts.blind&blindTransaction == 0 && tellsTimes
	n := k.objs.Boxes.MaxEntries()
	k.mem, err = unix.Mmap(k.objs.Boxes.FD(), 0, int(n)*int(boxSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mapping the boxes: %w", err)
	}
	k.used = make([]bool, n)
	if err := k.survivors.open(k.objs.Drowsy); err != nil {
		return err
	}
	return nil
}

func attach(progs ...*ebpf.Program) (links []link.Link, err error) {
	for _, p := range progs {
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			return links, unsupported("it refuses to attach "+p.String(), err)
		}
		links = append(links, l)
	}
	return links, nil
}

func hasTracepoint(kernel *btf.Spec, name string) bool {
	var t *btf.Typedef
	return kernel.TypeByName("btf_trace_"+name, &t) == nil
}

func unsupported(why string, err error) error {
	return fault.New(fault.Unsupported, "inspector", "this kernel can't be watched: %s: %w", why, err).
		WithHint("Boxwood needs root, BTF and raw tracepoints (Linux 6.1 and 6.18 are tested)")
}

// Supported says why this host can't be watched, or nil. It loads and attaches
// the programs, because nothing less proves it.
func Supported() error {
	k, err := Open(Options{})
	if err != nil {
		return err
	}
	return k.Close()
}

// Watch begins an epoch for a sandbox. It costs one map update.
func (k *Kernel) Watch(s Subject) (Watch, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil, fault.New(fault.Unavailable, "inspector", "the inspector is closed")
	}
	if err := k.atLevel(s.Cgroup); err != nil {
		return nil, err
	}
	slot, ok := k.slot(s.Cgroup)
	if !ok {
		return nil, fault.New(fault.Exhausted, "watches", "%d sandboxes are watched, which is all there is room for", len(k.watches))
	}
	w := newWatch(k, s, slot)
	if err := k.objs.Slots.Update(&s.Cgroup, &slot, ebpf.UpdateNoExist); err != nil {
		atomic.StoreUint64(&w.box.Cgroup, 0)
		return nil, fault.New(fault.Internal, "inspector", "watching control group %d: %w", s.Cgroup, err)
	}
	k.used[slot] = true
	k.watches[w] = struct{}{}
	return w, nil
}

// slot finds a free one: where the programs look first for that control group, or
// else the next after the last one found so. Both ways it is long until one is used
// again, so that a late event doesn't hit a new watch.
func (k *Kernel) slot(cgroup uint64) (uint32, bool) {
	n := uint32(len(k.used))
	if first := uint32(cgroup % uint64(n)); !k.used[first] {
		return first, true
	}
	for range n {
		k.next = (k.next + 1) % n
		if !k.used[k.next] {
			return k.next, true
		}
	}
	return 0, false
}

// atLevel makes sure that the programs look at the level this group is on. The
// first watch sets it. A group on another level would never be seen, so it is
// refused.
func (k *Kernel) atLevel(cgroup uint64) error {
	level, err := k.groups.level(cgroup)
	if err != nil {
		return err
	}
	if k.level == 0 {
		if err := k.objs.Level.Set(level); err != nil {
			return fmt.Errorf("setting the level of the control groups: %w", err)
		}
		k.level = level
	}
	if level != k.level {
		return fault.New(fault.Invalid, "cgroup", "control group %d lies on level %d, those watched so far on level %d", cgroup, level, k.level)
	}
	return nil
}

func (k *Kernel) box(slot uint32) *bpf.InspectorBox {
	return (*bpf.InspectorBox)(unsafe.Pointer(&k.mem[uintptr(slot)*boxSize]))
}

func (k *Kernel) drop(w *watch) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.watches[w]; !ok {
		return
	}
	delete(k.watches, w)
	w.wake()
	k.gone.Add(atomic.LoadUint64(&w.box.Lost))
	atomic.StoreUint64(&w.box.Cgroup, 0)
	_ = k.objs.Slots.Delete(&w.subject.Cgroup)
	k.used[w.slot] = false
}

// misses counts runs of a program that the kernel skipped because the same
// program was running on that CPU. They belong to no sandbox: every watch whose
// epoch saw the number grow has lost something.
func (k *Kernel) misses() (uint64, error) {
	var sum uint64
	for _, p := range append(k.progs[:len(k.progs):len(k.progs)], k.objs.Beside, k.objs.Signalled) {
		s, err := p.Stats()
		if err != nil {
			return 0, err
		}
		sum += s.RecursionMisses
	}
	k.missed.Store(sum)
	return sum, nil
}

// LostEvents counts what was lost since Open.
func (k *Kernel) LostEvents() uint64 {
	missed, err := k.misses()
	if err != nil {
		missed = k.missed.Load()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	sum := missed + k.gone.Load()
	for w := range k.watches {
		sum += atomic.LoadUint64(&w.box.Lost)
	}
	return sum
}

// Close detaches the programs. Watches that are still there report changed.
func (k *Kernel) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil
	}
	k.closed = true
	for w := range k.watches {
		w.orphaned.Store(true)
	}
	var errs []error
	for _, l := range append(k.links, k.survivors.close()...) {
		errs = append(errs, l.Close())
	}
	errs = append(errs, k.objs.Close(), k.groups.close(), k.clock.close())
	// The mapping stays: a watch may be reading it, and it ends with the process.
	return errors.Join(errs...)
}
