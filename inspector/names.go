package inspector

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// folder is one directory as it was when it was listed. It is a constant: two
// listings that found the same share it, so equal pointers mean equal subtrees.
type folder struct {
	ino     uint64
	ctime   int64
	entries []entry   // by name
	subs    []*folder // of the entries that are directories, in their order
	marks   overlayMarks
	size    int // of the whole subtree: directories and names
}

type entry struct {
	name string
	ino  uint64
	kind uint8 // unix.DT_*
}

// overlayMarks are what overlayfs has written on a directory.
type overlayMarks uint8

const (
	copiedUp   overlayMarks = 1 << iota // it was made to hold a change below it
	hidesLower                          // opaque
	redirected
)

var (
	errTooMany = errors.New("there are too many files to compare")
	errTooDeep = errors.New("directories are nested too deeply to compare")
	errMoving  = errors.New("directories were moved meanwhile")
	errNoKinds = errors.New("the file system doesn't tell kinds of entries")
)

// lister lists a tree, reusing what it can of an earlier listing.
type lister struct {
	ctx context.Context
	// settled is the stamp of the earlier listing: a directory whose time of change
	// is older, and still the same, has the same entries.
	settled int64
	// moved, unless it is nil, has every directory whose entries or attributes may have
	// changed since the earlier listing, but those that are numbered from firstNew on.
	moved    movedTimes
	firstNew uint64
	stale    map[*folder]bool // of the earlier listing: those, and what leads to them
	left     int              // entries that may still be read or walked
	depth    int
	buf      []byte // for readNames
}

// maxDepth bounds the descriptors and the stack that one listing takes: a sandbox
// can nest directories without end.
const maxDepth = 256

// stamp is the time that the kernel would at least give to a change made now. It
// ticks every few milliseconds, so a time of change at or after a stamp may stand
// for several changes, some before and some after. One before it can't.
func stamp() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &t); err != nil {
		return 0 // nothing is settled
	}
	return t.Nano()
}

func (l *lister) list(path string, was *folder) (*folder, error) {
	if l.moved != nil && was != nil {
		l.stale = map[*folder]bool{}
		l.find(was)
	}
	return l.walk(unix.AT_FDCWD, path, was)
}

// find fills stale, and says whether f belongs there.
func (l *lister) find(f *folder) bool {
	_, stale := l.moved[f.ino]
	stale = stale || f.ino >= l.firstNew
	for _, sub := range f.subs {
		stale = l.find(sub) || stale
	}
	if stale {
		l.stale[f] = true
	}
	return stale
}

// walk lists the directory at name below the one open at dir.
func (l *lister) walk(dir int, name string, was *folder) (*folder, error) {
	if err := l.ctx.Err(); err != nil {
		return nil, err
	}
	if l.stale != nil && was != nil && !l.stale[was] {
		if l.left -= was.size; l.left < 0 {
			return nil, errTooMany
		}
		return was, nil
	}
	var st unix.Stat_t
	// Most directories have none below them and didn't change: one call each.
	if was != nil && len(was.subs) == 0 && l.stale == nil {
		if err := statAt(dir, name, &st); err != nil {
			return nil, err
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR && l.unchanged(was, &st) {
			if l.left -= 1 + len(was.entries); l.left < 0 {
				return nil, errTooMany
			}
			return was, nil
		}
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if was != nil && was.ino != st.Ino {
		was = nil
	}
	f := &folder{ino: st.Ino, ctime: st.Ctim.Nano()}
	same := was != nil && l.unchanged(was, &st)
	if same {
		f.entries, f.marks = was.entries, was.marks
	} else {
		var err error
		if f.entries, err = l.readNames(fd); err != nil {
			return nil, err
		}
		if was != nil && f.ino < l.firstNew && l.stale != nil {
			f.marks = was.marks // of an old directory only copiedUp is asked, which stays
		} else {
			f.marks = marksOf(fd)
		}
	}
	if l.left -= 1 + len(f.entries); l.left < 0 {
		return nil, errTooMany
	}
	if l.depth++; l.depth > maxDepth {
		return nil, errTooDeep
	}
	defer func() { l.depth-- }()
	f.size = 1 + len(f.entries)
	earlier := was.finder()
	for _, e := range f.entries {
		if e.kind != unix.DT_DIR {
			continue
		}
		sub, err := l.walk(fd, e.name, earlier(e))
		if err != nil {
			return nil, err
		}
		if sub.ino != e.ino {
			return nil, errMoving
		}
		f.subs = append(f.subs, sub)
		f.size += sub.size
	}
	if same && slices.Equal(f.subs, was.subs) {
		return was, nil
	}
	return f, nil
}

// unchanged says that a directory has the entries that it had.
func (l *lister) unchanged(was *folder, st *unix.Stat_t) bool {
	if was.ino != st.Ino {
		return false
	}
	if l.stale != nil && was.ino < l.firstNew {
		_, moved := l.moved[was.ino]
		return !moved
	}
	ctime := st.Ctim.Nano()
	return was.ctime == ctime && ctime < l.settled
}

// paths are where these inodes are.
func (f *folder) paths(inodes map[uint64]bool) map[uint64][]string {
	out := map[uint64][]string{}
	if inodes[f.ino] {
		out[f.ino] = []string{""}
	}
	var path []byte
	var walk func(f *folder)
	walk = func(f *folder) {
		sub, end := 0, len(path)
		for _, e := range f.entries {
			if !inodes[e.ino] && e.kind != unix.DT_DIR {
				continue
			}
			path = append(append(path[:end], '/'), e.name...)
			if inodes[e.ino] {
				out[e.ino] = append(out[e.ino], string(path))
			}
			if e.kind == unix.DT_DIR {
				walk(f.subs[sub])
				sub++
			}
		}
	}
	walk(f)
	return out
}

// finder returns a function that finds a directory below f, or nil. It is asked in the
// order of names.
func (f *folder) finder() func(entry) *folder {
	if f == nil {
		return func(entry) *folder { return nil }
	}
	i, sub := 0, 0
	return func(e entry) *folder {
		for ; i < len(f.entries) && f.entries[i].name < e.name; i++ {
			if f.entries[i].kind == unix.DT_DIR {
				sub++
			}
		}
		if i == len(f.entries) || f.entries[i] != e {
			return nil
		}
		return f.subs[sub]
	}
}

func (l *lister) readNames(fd int) ([]entry, error) {
	var out []entry
	if l.buf == nil {
		l.buf = make([]byte, 32<<10)
	}
	for {
		n, err := unix.ReadDirent(fd, l.buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
		for b := l.buf[:n]; len(b) > 0; {
			// struct linux_dirent64: ino u64, off s64, reclen u16, type u8, name
			d := (*unix.Dirent)(unsafe.Pointer(&b[0]))
			name := b[19:d.Reclen]
			for i, c := range name {
				if c == 0 {
					name = name[:i]
					break
				}
			}
			if d.Type == unix.DT_UNKNOWN {
				return nil, errNoKinds
			}
			if s := string(name); s != "." && s != ".." {
				out = append(out, entry{name: s, ino: d.Ino, kind: d.Type})
			}
			b = b[d.Reclen:]
		}
	}
	slices.SortFunc(out, func(a, b entry) int {
		if a.name < b.name {
			return -1
		}
		return 1
	})
	return out, nil
}

var markNames = []struct {
	name string
	mark overlayMarks
}{
	{"trusted.overlay.origin", copiedUp},
	{"trusted.overlay.opaque", hidesLower},
	{"trusted.overlay.redirect", redirected},
}

func marksOf(fd int) (m overlayMarks) {
	var buf [1 << 10]byte
	n, err := unix.Flistxattr(fd, buf[:])
	if err != nil { // more than that, or none can be listed
		for _, x := range markNames {
			if _, err := unix.Fgetxattr(fd, x.name, nil); err == nil {
				m |= x.mark
			}
		}
		return m
	}
	for list := buf[:n]; len(list) > 0; {
		name, rest, _ := bytes.Cut(list, []byte{0})
		for _, x := range markNames {
			if string(name) == x.name {
				m |= x.mark
			}
		}
		list = rest
	}
	return m
}

// place is a name in one of two listings that are compared.
type place struct {
	path string
	in   *folder // the directory that has the name
	entry
	dir    *folder
	within bool // that directory is in the same list
}

// difference of two listings: names only in the first, only in the second, in
// both but for other inodes, and moved.
type difference struct {
	gone, come, replaced []place
	moved                [][2]place
}

func compare(was, is *folder) difference {
	var d difference
	d.folders("", was, is)
	d.match()
	return d
}

func (d *difference) folders(path string, was, is *folder) {
	if was == is {
		return
	}
	i, j, si, sj := 0, 0, 0, 0
	for i < len(was.entries) || j < len(is.entries) {
		var before, after int
		if i < len(was.entries) && (j == len(is.entries) || was.entries[i].name <= is.entries[j].name) {
			before = 1
		}
		if j < len(is.entries) && (i == len(was.entries) || is.entries[j].name <= was.entries[i].name) {
			after = 1
		}
		if before == 1 && after == 1 && was.entries[i] == is.entries[j] && (was.entries[i].kind != unix.DT_DIR || was.subs[si] == is.subs[sj]) {
			if was.entries[i].kind == unix.DT_DIR {
				si, sj = si+1, sj+1
			}
			i, j = i+1, j+1
			continue
		}
		var p, q place
		if before == 1 {
			p = was.place(path, i, &si)
		}
		if after == 1 {
			q = is.place(path, j, &sj)
		}
		switch {
		case after == 0:
			d.gone = all(d.gone, p)
		case before == 0:
			d.come = all(d.come, q)
		case p.ino == q.ino && p.kind == q.kind:
			if p.dir != nil {
				d.folders(q.path, p.dir, q.dir)
			}
		case p.kind == unix.DT_CHR && q.kind == unix.DT_CHR:
			// One whiteout for another: nobody can make any other device here.
		case p.dir == nil && q.dir == nil && p.kind != unix.DT_CHR && q.kind != unix.DT_CHR:
			d.replaced = append(d.replaced, q)
			d.gone = append(d.gone, p)
		default:
			d.gone = all(d.gone, p)
			d.come = all(d.come, q)
		}
		i += before
		j += after
	}
}

// place is entry i of f; nextSub counts its directories.
func (f *folder) place(path string, i int, nextSub *int) place {
	p := place{path: path + "/" + f.entries[i].name, in: f, entry: f.entries[i]}
	if p.kind == unix.DT_DIR {
		p.dir = f.subs[*nextSub]
		*nextSub++
	}
	return p
}

// all appends p and everything below it.
func all(out []place, p place) []place {
	out = append(out, p)
	if p.dir != nil {
		sub := 0
		for i := range p.dir.entries {
			q := p.dir.place(p.path, i, &sub)
			q.within = true
			out = all(out, q)
		}
	}
	return out
}

// match finds what was moved: the same inode, gone from one name and come to
// another. What only moved along with its directory isn't told.
func (d *difference) match() {
	if len(d.gone) == 0 {
		return
	}
	from := map[uint64]int{}
	for i, p := range d.gone {
		from[p.ino] = i
	}
	used := map[int]bool{}
	move := func(list []place) (rest []place) {
		for _, q := range list {
			i, ok := from[q.ino]
			if !ok || used[i] || q.kind == unix.DT_CHR {
				rest = append(rest, q)
				continue
			}
			used[i] = true
			p := d.gone[i]
			if p.in.ino != q.in.ino || p.name != q.name {
				d.moved = append(d.moved, [2]place{p, q})
			}
			if p.dir != nil && p.dir != q.dir {
				continue // its entries are in gone and come, and match by themselves
			}
		}
		return rest
	}
	d.come = move(d.come)
	replacedInos := map[string]bool{}
	for _, q := range d.replaced {
		replacedInos[q.path] = true
	}
	var gone []place
	for i, p := range d.gone {
		// A name that was replaced is told once, as changed.
		if !used[i] && !replacedInos[p.path] {
			gone = append(gone, p)
		}
	}
	d.gone = gone
}
