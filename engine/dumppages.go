package engine

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// On the disk a dump doesn't hold the pages again that the dump before it on its path has
// already. Its folder then has, beside all other files,
//
//	pages               where each page of images/pages-N.img is: a line for each run of pages,
//	                    "<N> <source> <first page in it> <how many>", in the order of the pages
//	images/pages-N.own  the pages of pages-N.img that are its own, one after another
//	from/<source>       hard links to files of dumps before it, "<state>.pages-N.img"
//	                    or "<state>.pages-N.own". The source "." is pages-N.own
//
// A dump names every file that it has pages of itself, however long the path, so that it
// outlives all others; the file system counts who needs a file. Its sums are those of the whole files:
// a page that has changed, wherever it lies, is found by whoever reads it.
//
// In memory, and wherever CRIU reads it, a dump is whole.
const (
	pagesName = "pages"
	ownSuffix = ".own"
	fromDir   = "from"

	pageSize = 4096
	// sourcesMax bounds of how many files a dump is put together, and how much of dumps that are gone is
	// kept for those that came after them: one that would need more is written whole.
	sourcesMax = 16
)

// run is some pages in a row.
type run struct {
	source string // name in from; ".": own
	first  int64
	pages  int64
}

const own = "."

// pagesMap says where the pages of files images/pages-N.img are, by N. Other files are whole.
type pagesMap map[string][]run

// numbered gives N of "images/pages-N.img".
func numbered(name string) (n string, ok bool) {
	if n, ok = strings.CutPrefix(name, imagesDir+"/pages-"); ok {
		n, ok = strings.CutSuffix(n, ".img")
	}
	return n, ok
}

func ownName(n string) string { return imagesDir + "/pages-" + n + ownSuffix }
func imgName(n string) string { return imagesDir + "/pages-" + n + ".img" }

func (m pagesMap) write(path string) error {
	var b bytes.Buffer
	for n, runs := range m {
		for _, r := range runs {
			fmt.Fprintf(&b, "%s %s %d %d\n", n, r.source, r.first, r.pages)
		}
	}
	return os.WriteFile(path, b.Bytes(), 0o600)
}

func readPages(dir string) (pagesMap, error) {
	f, err := os.Open(filepath.Join(dir, pagesName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	m := pagesMap{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var n string
		var r run
		_, err := fmt.Sscanf(lines.Text(), "%s %s %d %d", &n, &r.source, &r.first, &r.pages)
		if err != nil || r.first < 0 || r.pages < 1 || strings.Contains(n+r.source, "/") {
			return nil, fmt.Errorf("%s has a line %.100q", pagesName, lines.Text())
		}
		m[n] = append(m[n], r)
	}
	return m, lines.Err()
}

// dumpNames are the files of a dump as it was saved, however it is stored.
func dumpNames(dir string) ([]string, error) {
	shared, err := readPages(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for n := range shared {
		names = append(names, imgName(n))
	}
	for _, sub := range []string{"", imagesDir} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			name := filepath.Join(sub, e.Name())
			if e.IsDir() || name == sumsName || shared != nil && (name == pagesName || strings.HasSuffix(name, ownSuffix)) {
				continue
			}
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// openDumpFile opens a file of a dump as it was saved, however it is stored.
func openDumpFile(dir, name string) (io.ReadCloser, error) {
	n, runs, err := runsOf(dir, name)
	if err != nil {
		return nil, err
	}
	if runs == nil {
		return os.Open(filepath.Join(dir, name))
	}
	return openRuns(dir, n, runs)
}

// runsOf says where the pages of a file are; nil: it is whole.
func runsOf(dir, name string) (n string, runs []run, err error) {
	n, ok := numbered(name)
	if !ok {
		return "", nil, nil
	}
	shared, err := readPages(dir)
	return n, shared[n], err
}

// dumpFileSize is how large a file of a dump is as it was saved.
func dumpFileSize(dir, name string) (size int64, err error) {
	_, runs, err := runsOf(dir, name)
	if err != nil {
		return 0, err
	}
	for _, r := range runs {
		size += r.pages * pageSize
	}
	if runs != nil {
		return size, nil
	}
	st, err := os.Lstat(filepath.Join(dir, name))
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// runsFile reads runs as one file.
type runsFile struct {
	io.Reader
	files map[string]*os.File
}

func openRuns(dir, n string, runs []run) (_ *runsFile, err error) {
	r := &runsFile{files: map[string]*os.File{}}
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	parts := make([]io.Reader, len(runs))
	for i, run := range runs {
		f := r.files[run.source]
		if f == nil {
			path := filepath.Join(dir, fromDir, run.source)
			if run.source == own {
				path = filepath.Join(dir, ownName(n))
			}
			if f, err = os.Open(path); err != nil {
				return nil, err
			}
			r.files[run.source] = f
		}
		parts[i] = io.NewSectionReader(f, run.first*pageSize, run.pages*pageSize)
	}
	r.Reader = io.MultiReader(parts...)
	return r, nil
}

func (r *runsFile) Close() error {
	var errs []error
	for _, f := range r.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// elder is a dump whose pages a later one may have, too.
type elder struct {
	whole   []*os.File // its files pages-N.img
	sources []source
	pages   []elderPage
	seed    maphash.Seed
	places  map[uint64]int // in pages, by a hash of what is there
}

// source is a file on the disk that has pages.
type source struct{ name, path string }

type elderPage struct {
	whole, source int
	at, in        int64 // which page of them it is
}

// openElder reads the pages of a dump that is whole in one folder and on the disk in another.
// Either folder may go meanwhile.
func openElder(id ids.Process, whole, disk string) (_ *elder, err error) {
	e := &elder{seed: maphash.MakeSeed(), places: map[uint64]int{}}
	defer func() {
		if err != nil {
			e.Close()
		}
	}()
	shared, err := readPages(disk)
	if err != nil {
		return nil, err
	}
	names, err := dumpNames(whole)
	if err != nil {
		return nil, err
	}
	numbers := map[string]int{} // of sources, by path
	for _, name := range names {
		n, ok := numbered(name)
		if !ok {
			continue
		}
		f, err := os.Open(filepath.Join(whole, name))
		if err != nil {
			return nil, err
		}
		e.whole = append(e.whole, f)
		st, err := f.Stat()
		if err != nil {
			return nil, err
		}
		runs, base := shared[n], ownName(n)
		if runs == nil {
			runs, base = []run{{own, 0, st.Size() / pageSize}}, name
		}
		in, page, at := bufio.NewReaderSize(f, 1<<20), make([]byte, pageSize), int64(0)
		for _, r := range runs {
			from := source{r.source, filepath.Join(disk, fromDir, r.source)}
			if r.source == own {
				from = source{string(id) + "." + filepath.Base(base), filepath.Join(disk, base)}
			}
			number, known := numbers[from.path]
			if !known {
				number = len(e.sources)
				numbers[from.path], e.sources = number, append(e.sources, from)
			}
			for i := range r.pages {
				if _, err := io.ReadFull(in, page); err != nil {
					return nil, err
				}
				e.places[maphash.Bytes(e.seed, page)] = len(e.pages)
				e.pages = append(e.pages, elderPage{len(e.whole) - 1, number, at, r.first + i})
				at++
			}
		}
	}
	return e, nil
}

func (e *elder) Close() {
	for _, f := range e.whole {
		f.Close()
	}
}

// find looks for a page: behind the one that was found last, -1 at first, or anywhere.
func (e *elder) find(page []byte, last int, buf []byte) (at int, ok bool) {
	if last >= 0 && e.has(last+1, page, buf) {
		return last + 1, true
	}
	at, ok = e.places[maphash.Bytes(e.seed, page)]
	return at, ok && e.has(at, page, buf)
}

// has says whether a page has the very same bytes, not whether it is likely to.
func (e *elder) has(at int, page, buf []byte) bool {
	if at >= len(e.pages) {
		return false
	}
	p := e.pages[at]
	_, err := e.whole[p.whole].ReadAt(buf, p.at*pageSize)
	return err == nil && (sabotage.On("pages") || bytes.Equal(buf, page))
}

// errApart: a dump has nothing to share, or with too many.
var errApart = errors.New("it is written whole")

// copyShared stores a dump that is whole in one folder in another, but for what the elder has.
func copyShared(from, to string, e *elder) error {
	names, err := dumpNames(from)
	if err != nil {
		return err
	}
	m, used := pagesMap{}, map[int]bool{}
	for _, name := range append(names, sumsName) {
		n, ok := numbered(name)
		if ok {
			m[n], err = e.divide(filepath.Join(from, name), filepath.Join(to, ownName(n)), used)
		}
		if len(m[n]) == 0 && err == nil {
			err = copyFile(from, name, filepath.Join(to, name))
		}
		if err != nil {
			return err
		}
	}
	if len(used) == 0 || len(used) > sourcesMax {
		return errApart
	}
	if err := os.Mkdir(filepath.Join(to, fromDir), 0o700); err != nil {
		return err
	}
	for number := range used {
		s := e.sources[number]
		if err := os.Link(s.path, filepath.Join(to, fromDir, s.name)); err != nil {
			return err
		}
	}
	return m.write(filepath.Join(to, pagesName))
}

// divide writes those pages of a file that the elder doesn't have to another, and says where all are. It makes none of
// a file without pages.
func (e *elder) divide(from, to string, used map[int]bool) (runs []run, err error) {
	src, err := os.Open(from)
	if err != nil {
		return nil, err
	}
	defer src.Close()
	if st, err := src.Stat(); err != nil || st.Size() == 0 {
		return nil, err
	}
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	in, out := bufio.NewReaderSize(src, 1<<20), bufio.NewWriterSize(dst, 1<<20)
	page, buf := make([]byte, pageSize), make([]byte, pageSize)
	last, owned := -1, int64(0)
	for {
		switch _, err := io.ReadFull(in, page); err {
		case nil:
		case io.EOF:
			return runs, out.Flush()
		case io.ErrUnexpectedEOF: // it isn't made of pages
			return nil, errApart
		default:
			return nil, err
		}
		at := run{own, owned, 1}
		if found, ok := e.find(page, last, buf); ok {
			p := e.pages[found]
			last, used[p.source] = found, true
			at = run{e.sources[p.source].name, p.in, 1}
		} else {
			owned++
			if _, err := out.Write(page); err != nil {
				return nil, err
			}
		}
		if i := len(runs) - 1; i >= 0 && runs[i].source == at.source && runs[i].first+runs[i].pages == at.first {
			runs[i].pages++
		} else {
			runs = append(runs, at)
		}
	}
}
