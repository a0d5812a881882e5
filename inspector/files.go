package inspector

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/tree"
)

// comparison is what the last comparison of upper with the base found. It stays
// true until the kernel side flags something new.
type comparison struct {
	names []named             // names that differ
	metas map[string]metadata // inodes that differ, by path
	// copies are files of the image that were copied up and still show what the image
	// shows, with their time of change. They are new inodes, whose content raises no
	// flag, so each barrier has to look at them again.
	copies map[string]int64
	// partial: attributes weren't compared, so there may be more.
	partial bool
	// settled is the stamp before which a time of change told all.
	settled int64
}

// named is a name that differs, as an effect of the turn that made it so.
type named struct {
	kind   tree.EffectKind
	path   string
	detail string
}

// maxContent is how much one barrier reads to tell a file that looks changed from
// one that is. 4 MiB take about a millisecond.
const maxContent = 4 << 20

type metadata struct {
	kind  tree.EffectKind
	ctime int64
}

// judgeFiles decides the file half. Flags come first, since most turns set none;
// names and attributes are compared only when a flag asks for it.
//
// epoch are all flags since the epoch began, fresh those since the last barrier.
func (w *watch) judgeFiles(ctx context.Context, epoch, fresh signs, all, turn *finding) {
	if epoch&fileFlags == 0 {
		return
	}
	asked := fresh&(sawNames|sawMeta|sawMoved|sawNewMeta|sawTimes) != 0 || w.stale || len(w.files.copies) > 0
	var base, live *folder
	var err error
	if asked {
		base, live, err = w.list(ctx, epoch)
	}
	w.judgeOld(live, all, turn)
	if asked {
		was := w.files
		if err == nil {
			err = w.compare(ctx, base, live, epoch, all.files)
		}
		if err != nil {
			w.stale, w.blurred = true, true
			w.files = was
			all.file("the files can't be compared: " + err.Error())
			turn.file("")
			return
		}
		// A process that ran meanwhile may have been in the middle of a change, flagged
		// but not yet to be seen.
		w.stale, w.blurred = w.running, false
		w.fresh(was, turn)
	}
	if n := len(w.files.names) + len(w.files.metas); n > 0 {
		all.file(plural(n, "file differs", "files differ"))
	}
}

// judgeOld deals with inodes that are older than the epoch and were changed. Even
// if the change is undone, its time has moved. live is upper as it is, if it was listed.
func (w *watch) judgeOld(live *folder, all, turn *finding) {
	n := atomic.LoadUint32(&w.box.Ninodes)
	from := atomic.LoadUint32(&w.box.TurnFrom)
	kept := min(n, uint32(len(w.box.Inodes)))
	inodes := make([]uint64, kept)
	wanted := make(map[uint64]bool, kept)
	for i := range inodes {
		inodes[i] = atomic.LoadUint64(&w.box.Inodes[i]) // 0: counted, but not yet written by its task
		wanted[inodes[i]] = true
	}
	changed := 0
	told := map[uint64]bool{}
	find := w.finder(live, wanted)
	defer find.close()
	for i, ino := range inodes {
		path, aside, ok := find.where(ino)
		if ok && aside {
			continue // overlayfs's own folder
		}
		changed++
		if uint32(i) < from || told[ino] {
			continue
		}
		told[ino] = true
		if !ok {
			path = fmt.Sprintf("inode %d", ino)
		}
		turn.change(tree.FileChanged, path)
	}
	if n > kept {
		changed += int(n - kept)
		if from < n {
			turn.files = true
			turn.count += int64(n - max(kept, from))
		}
	}
	if changed > 0 {
		all.file(plural(changed, "older file changed", "older files changed"))
	}
}

// fewNames is how large a sandbox may be so that attributes are compared for the
// report alone: 2,000 take about 2 ms.
const fewNames = 2000

// list lists the base and upper.
func (w *watch) list(ctx context.Context, epoch signs) (base, live *folder, err error) {
	base, err = w.base.list(ctx, w.k.opts.MaxEntries)
	if err != nil {
		return nil, nil, err
	}
	at := stamp()
	like := w.seen
	if like.tree == nil {
		like = listing{tree: base, at: w.began}
	}
	if w.k.clock.setSince(w.mark) {
		like = listing{} // times of change tell nothing
	}
	l := lister{ctx: ctx, settled: like.at, left: w.k.opts.MaxEntries}
	if w.k.tellsDirs && epoch&sawWide == 0 && len(w.taint) == 0 {
		l.moved, l.firstNew = w.timesMoved(), atomic.LoadUint64(&w.box.FirstNew)
	}
	live, err = l.list(w.subject.Upper, like.tree)
	if err != nil {
		return nil, nil, err
	}
	w.seen = listing{live, at, w.k.opts.MaxEntries - l.left}
	return base, live, nil
}

// compare finds how upper differs from the base. decided: the files have changed for certain,
// whatever it finds.
func (w *watch) compare(ctx context.Context, base, live *folder, epoch signs, decided bool) error {
	was := w.files
	w.files = comparison{copies: map[string]int64{}, settled: w.seen.at}
	d := compare(base, live)
	w.files.names = w.namesThatDiffer(d, live, epoch, was)
	decided = decided || len(w.files.names) > 0
	if epoch&sawMeta != 0 && (!decided || w.seen.size <= fewNames) {
		return w.compareAttrs(ctx, base, live, d.moved, epoch&sawTimes != 0)
	}
	w.files.partial = epoch&sawMeta != 0
	if epoch&sawMoved != 0 {
		return w.compareMoved(base, live, w.timesMoved().attrs(), epoch&sawTimes != 0)
	}
	return nil
}

// movedTimes are inodes older than the epoch whose time of change moved in it, as the kernel
// side keeps them: directories, and with true those that a call by path changed.
type movedTimes map[uint64]bool

func (w *watch) timesMoved() movedTimes {
	const attrs = 1 << 31 // bpf/box.h: MOVED_ATTRS
	m := movedTimes{}
	for i := range w.box.Moved {
		if e := atomic.LoadUint32(&w.box.Moved[i]); e != 0 {
			m[uint64(e&^attrs)] = e&attrs != 0
		}
	}
	return m
}

// attrs are those that a call by path changed.
func (m movedTimes) attrs() map[uint64]bool {
	out := maps.Clone(m)
	maps.DeleteFunc(out, func(_ uint64, attrs bool) bool { return !attrs })
	return out
}

func (w *watch) namesThatDiffer(d difference, live *folder, epoch signs, was comparison) []named {
	out := make([]named, 0, len(was.names)+16)
	add := func(kind tree.EffectKind, path, detail string) {
		out = append(out, named{kind, path, detail})
	}
	limit := int64(maxContent)
	for _, m := range d.moved {
		add(tree.FileRenamed, m[1].path, "from "+strconv.Quote(m[0].path))
	}
	for _, p := range d.replaced {
		add(tree.FileChanged, p.path, "")
	}
	for _, p := range d.come {
		switch {
		case p.kind == unix.DT_CHR: // a whiteout
			add(tree.FileDeleted, p.path, "")
		case p.in != live && p.in.marks&copiedUp == 0:
			// Overlayfs copies into copies of directories, and into the top.
			add(tree.FileCreated, p.path, "")
		case !w.onlyCopiedUp(p, epoch, was, &limit):
			add(tree.FileCreated, p.path, "")
		}
	}
	for _, p := range d.gone {
		if p.kind == unix.DT_CHR && slices.ContainsFunc(out, func(e named) bool { return e.path == p.path }) {
			continue // a whiteout that made room for what is told already
		}
		add(tree.FileDeleted, p.path, "")
	}
	return out
}

// onlyCopiedUp says that a new entry of upper shows what the image showed. Making
// a file in a directory of the image, even one that is deleted again, leaves a copy
// of that directory behind.
func (w *watch) onlyCopiedUp(p place, epoch signs, was comparison, limit *int64) bool {
	if p.dir == nil {
		return p.kind == unix.DT_REG && w.sameFileAsBelow(p.path, was, limit)
	}
	if p.dir.marks != copiedUp {
		return false
	}
	if epoch&(sawMeta|sawMoved|sawNewMeta) == 0 {
		return true
	}
	return sameAsBelow(w.subject.Lower, w.subject.Upper, p.path, true, epoch&sawTimes != 0, limit)
}

// sameFileAsBelow compares a copied file with the image's, unless it was found equal
// before and its time of change tells that it still is. That time moves with the
// first store through a mapping as it does with a write; only a process that mapped
// the file before, and is still there, can store without moving it.
func (w *watch) sameFileAsBelow(path string, was comparison, limit *int64) bool {
	fd, err := beneath(w.subject.Upper, path, unix.O_RDONLY)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	// Most new files are no copies, and need no look at the layers.
	if _, err := unix.Fgetxattr(fd, "trusted.overlay.origin", nil); err != nil {
		return false
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false
	}
	ctime := st.Ctim.Nano()
	before, known := was.copies[path]
	still := known && before == ctime && ctime < was.settled && len(w.last) == 0
	if !still && !sameAsBelow(w.subject.Lower, w.subject.Upper, path, false, false, limit) {
		return false
	}
	w.files.copies[path] = ctime
	return true
}

// compareAttrs finds inodes of the base that changed in any way. It needs to look only at those
// whose time of change lies in this epoch, if the clock counted up all the time; else at
// all. An inode whose time of change is the base's hasn't changed, unless that time is too
// near to the epoch's beginning to tell.
func (w *watch) compareAttrs(ctx context.Context, base, live *folder, moved [][2]place, times bool) error {
	err := w.compareSince(ctx, w.began-int64(clockSlack), base, live, moved, times)
	if err == nil && w.k.clock.setSince(w.mark) {
		err = w.compareSince(ctx, math.MinInt64, base, live, moved, times)
	}
	return err
}

func (w *watch) compareSince(ctx context.Context, from int64, base, live *folder, moved [][2]place, times bool) error {
	top, err := unix.Open(w.base.path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(top)
	w.files.metas = map[string]metadata{}
	limit := int64(maxContent)
	p := pairs{ctx: ctx, base: top, from: from, visit: func(basePath, path string, was, is attrs) {
		if is.ctime != was.ctime || is.ctime >= w.began {
			w.compareInode(basePath, path, was, is, times, &limit)
		}
	}}
	if err := p.all(w.subject.Upper, base, live); err != nil {
		return err
	}
	for _, m := range moved {
		if err := p.moved(w.subject.Upper, m[0], m[1]); err != nil {
			return err
		}
	}
	return nil
}

// compareInode compares what the base and upper have at these paths, one inode, by everything.
func (w *watch) compareInode(basePath, path string, was, is attrs, times bool, limit *int64) {
	if is.mode&unix.S_IFMT == unix.S_IFCHR { // a whiteout's inode shows nowhere
		return
	}
	if same(w.base.path, basePath, w.subject.Upper, path, was, is, times, limit) {
		return
	}
	kind := tree.FileMetadata
	if is.mode&unix.S_IFMT != unix.S_IFDIR && (is.size != was.size || is.mtime != was.mtime) {
		kind = tree.FileChanged
	}
	if path == "" {
		path = "/"
	}
	w.files.metas[path] = metadata{kind, is.ctime}
}

// compareMoved finds which of these inodes of the base changed in any way; no others did.
func (w *watch) compareMoved(base, live *folder, inodes map[uint64]bool, times bool) error {
	w.files.metas = map[string]metadata{}
	limit := int64(maxContent)
	top, err := unix.Open(w.base.path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(top)
	was := base.paths(inodes)
	for ino, paths := range live.paths(inodes) {
		if len(was[ino]) == 0 {
			continue // no inode of the base, so that its names tell
		}
		for _, path := range paths {
			basePath := was[ino][0]
			if slices.Contains(was[ino], path) {
				basePath = path
			}
			var before, now unix.Stat_t
			if err := statAt(top, strings.TrimPrefix(basePath, "/"), &before); err != nil {
				return err
			}
			if err := statBeneath(w.subject.Upper, path, &now); err != nil || now.Ino != ino {
				continue // gone meanwhile: the next barrier's
			}
			w.compareInode(basePath, path, attrsOf(&before), attrsOf(&now), times, &limit)
		}
	}
	return nil
}

// fresh reports what the last comparison found and the one before didn't.
func (w *watch) fresh(was comparison, turn *finding) {
	// Most names that differed still do, in the same order.
	same := 0
	for same < len(was.names) && same < len(w.files.names) && was.names[same] == w.files.names[same] {
		same++
	}
	before := make(map[string]tree.EffectKind, len(was.names)-same)
	for _, e := range was.names[same:] {
		before[e.path] = e.kind
	}
	for _, e := range w.files.names[same:] {
		if kind, ok := before[e.path]; ok {
			delete(before, e.path)
			if kind == e.kind {
				continue
			}
		}
		turn.files = true
		turn.effect(e.kind, []byte(e.path), e.detail)
	}
	for path, kind := range before {
		// It differed before and no longer does: undone, which is a change of this turn.
		turn.files = true
		undone := tree.FileDeleted
		if kind == tree.FileDeleted {
			undone = tree.FileCreated
		}
		turn.effect(undone, []byte(path), "")
	}
	for path, m := range w.files.metas {
		if was.metas[path] != m {
			turn.change(m.kind, path)
		}
	}
}
