package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/sched"
)

const (
	imagesDir = "images"
	dumpsDir  = "dumps" // of the run folder
	sumsName  = "sums"
)

// seal writes the sums of a complete dump and returns its digest and how large it is.
func seal(dir string) (digest string, size int64, err error) {
	names, err := dumpNames(dir)
	if err != nil {
		return "", 0, err
	}
	var sums bytes.Buffer
	buf := make([]byte, sumBuffer)
	for _, name := range names {
		line, n, err := sumFile(dir, name, buf)
		if err != nil {
			return "", 0, err
		}
		size += n
		sums.WriteString(line + "\n")
	}
	all := sha256.Sum256(sums.Bytes())
	return hex.EncodeToString(all[:]), size, os.WriteFile(filepath.Join(dir, sumsName), sums.Bytes(), 0o600)
}

// sealed is a dump whose list of sums is the one on record.
type sealed struct {
	dir   string
	names []string
	sums  []string // lines, one for each name
}

// openSeal holds the list of sums against the digest on record, and what files there are against the list.
func openSeal(dir, digest string) (*sealed, error) {
	sums, err := os.ReadFile(filepath.Join(dir, sumsName))
	if err != nil {
		return nil, err
	}
	if all := sha256.Sum256(sums); hex.EncodeToString(all[:]) != digest {
		return nil, errors.New("its list of sums isn't the one on record")
	}
	s := &sealed{dir: dir}
	if s.names, err = dumpNames(dir); err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(sums)) {
		s.sums = append(s.sums, strings.TrimSuffix(line, "\n"))
	}
	for i, name := range s.names {
		if i >= len(s.sums) || !strings.HasSuffix(s.sums[i], " "+name) {
			return nil, fmt.Errorf("%s wasn't saved, or a file before it is missing", name)
		}
	}
	if len(s.sums) > len(s.names) {
		return nil, fmt.Errorf("a file is missing: %s", s.sums[len(s.names)])
	}
	return s, nil
}

// check holds files against their sums: the pages, or all others.
func (s *sealed) check(pages bool) error {
	buf := make([]byte, sumBuffer)
	for i, name := range s.names {
		if _, ok := numbered(name); ok != pages {
			continue
		}
		line, _, err := sumFile(s.dir, name, buf)
		if err != nil {
			return err
		}
		if s.sums[i] != line {
			return fmt.Errorf("%s has other bytes than were saved", name)
		}
	}
	return nil
}

// checkSeal holds every file of a dump against its sum, and the sums against the
// digest on record.
func checkSeal(dir, digest string) error {
	s, err := openSeal(dir, digest)
	if err != nil {
		return err
	}
	return errors.Join(s.check(false), s.check(true))
}

const sumBuffer = 256 << 10

// sumFile gives a file's line of the sums, and how large it is.
func sumFile(dir, name string, buf []byte) (line string, n int64, err error) {
	f, err := openDumpFile(dir, name)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	if n, err = io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{f}, buf); err != nil {
		return "", 0, err
	}
	return fmt.Sprintf("%x %d %s", h.Sum(nil), n, name), n, nil
}

// dumpStore keeps dumps: in memory from the freeze on, while there is room, and in
// the vault from a little later, without the pages that a dump before them has there (dumppages.go). A
// restore takes the one in memory, and brings it there if need be.
// Whoever restores has links of his own to the files (package criu), so that nothing has to wait for him.
type dumpStore struct {
	vault  *vault
	memory string // folder on a tmpfs; empty: none
	limit  int64  // bytes in memory
	log    func(msg string, args ...any)

	mu       sync.Mutex
	held     map[ids.Process]*heldDump     // those in memory
	bringing map[ids.Process]chan struct{} // those on their way there from the disk
	bytes    int64
	line     *sched.Runner // that dumps wait in for the disk
	copying  sync.WaitGroup
	closed   bool

	// What was brought to the disk so far: dumps, their bytes, and those that are there.
	copied, dumped, stored int64
}

type heldDump struct {
	bytes  int64
	onDisk bool
	copied chan struct{} // closed when its way to the disk is over, however it went
	used   time.Time
	users  int // that it stays in memory for
}

func newHeld(bytes int64) *heldDump {
	return &heldDump{bytes: bytes, used: time.Now(), copied: make(chan struct{})}
}

// copiesAtOnce of dumps to the disk: more only take turns at it.
const copiesAtOnce = 2

// openDumpStore takes over what a former daemon left in memory. limit 0: an eighth of
// the host's memory.
func openDumpStore(v *vault, run string, limit int64, log func(string, ...any)) (*dumpStore, error) {
	s := &dumpStore{vault: v, limit: limit, log: log, held: map[ids.Process]*heldDump{}, bringing: map[ids.Process]chan struct{}{}}
	s.line = sched.NewRunner(sched.Config{Slots: copiesAtOnce})
	if limit == 0 {
		var info unix.Sysinfo_t
		if err := unix.Sysinfo(&info); err == nil {
			s.limit = int64(info.Totalram) * int64(info.Unit) / 8
		}
	}
	if !onTmpfs(run) {
		return s, nil // the run folder is on a disk: no better than the vault
	}
	s.memory = filepath.Join(run, dumpsDir)
	return s, os.MkdirAll(s.memory, 0o700)
}

// reconcile removes what is on no record and copies what isn't on the disk. It
// says which of those on record are nowhere.
func (s *dumpStore) reconcile(known map[ids.Process]bool) (lost []ids.Process, err error) {
	entries, err := os.ReadDir(s.memory)
	if s.memory == "" {
		entries, err = nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, d := range entries {
		id := ids.Process(d.Name())
		dir := filepath.Join(s.memory, d.Name())
		if !known[id] {
			if err := os.RemoveAll(dir); err != nil {
				return nil, err
			}
			continue
		}
		size, err := dumpBytes(dir)
		if err != nil {
			return nil, err
		}
		s.held[id] = newHeld(size)
		s.bytes += size
	}
	for id := range known {
		_, err := os.Lstat(s.vault.folder(id))
		h := s.held[id]
		switch {
		case h == nil && err != nil:
			lost = append(lost, id)
		case h != nil && err == nil:
			h.onDisk = true
			close(h.copied)
		case h != nil:
			s.copy(sched.Work{Class: sched.Persist}, id, "") // which dump was before it is a thing of the body that was dumped
		}
	}
	return lost, nil
}

func dumpBytes(dir string) (n int64, err error) {
	names, err := dumpNames(dir)
	for _, name := range names {
		if st, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			n += st.Size()
		}
	}
	return n, err
}

// begin makes a folder for a dump of about that size.
func (s *dumpStore) begin(id ids.Process, about int64) (dir string, err error) {
	s.mu.Lock()
	room := s.memory != "" && s.makeRoom(about)
	if room {
		s.bytes += about
		s.held[id] = newHeld(about)
	}
	s.mu.Unlock()
	if !room {
		return s.vault.make(id)
	}
	dir = filepath.Join(s.memory, string(id))
	if err := os.Mkdir(dir, 0o755); err != nil { // CRIU reads as root of a box, too
		return "", errors.Join(err, s.drop(id))
	}
	return dir, nil
}

// makeRoom lets go of the dumps that were used least lately and are on the disk.
func (s *dumpStore) makeRoom(want int64) bool {
	for s.bytes+want > s.limit {
		var oldest ids.Process
		for id, h := range s.held {
			if h.onDisk && h.users == 0 && (oldest == "" || h.used.Before(s.held[oldest].used)) {
				oldest = id
			}
		}
		if oldest == "" {
			return false
		}
		s.forget(oldest)
	}
	return true
}

// forget removes a dump from memory. The caller holds mu.
func (s *dumpStore) forget(id ids.Process) {
	h := s.held[id]
	if h == nil {
		return
	}
	delete(s.held, id)
	s.bytes -= h.bytes
	if err := os.RemoveAll(filepath.Join(s.memory, string(id))); err != nil {
		s.log("letting go of a dump in memory", "state", id, "error", err)
	}
}

// complete takes a sealed dump in. before is the one that was there before it on its path; empty: none. w says whose it is.
func (s *dumpStore) complete(w sched.Work, id ids.Process, bytes int64, before ids.Process) error {
	s.mu.Lock()
	h := s.held[id]
	if h != nil {
		s.bytes += bytes - h.bytes
		h.bytes = bytes
	}
	s.mu.Unlock()
	if h == nil {
		return flushTree(s.vault.folder(id))
	}
	s.copy(w, id, before)
	return nil
}

// copy brings a dump to the disk behind whoever asked for it.
func (s *dumpStore) copy(w sched.Work, id, before ids.Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.held[id]
	if s.closed || h == nil {
		return
	}
	s.copying.Go(func() {
		defer close(h.copied)
		if err := s.persist(w, id, before); err != nil && !errors.Is(err, os.ErrNotExist) { // removed meanwhile
			s.log("copying a dump to the disk", "state", id, "error", err)
		}
	})
}

// persist waits for the dump before it outside of the line, where it would keep the one from beginning that it waits for.
func (s *dumpStore) persist(w sched.Work, id, before ids.Process) (err error) {
	s.mu.Lock()
	h := s.held[before]
	s.mu.Unlock()
	if h != nil {
		<-h.copied
	}
	release, err := s.line.Acquire(context.Background(), w)
	if err != nil {
		return err
	}
	err = errUnfinished
	defer func() { release(err) }()
	err = s.copyNow(id, before)
	return err
}

func (s *dumpStore) copyNow(id, before ids.Process) error {
	from, to := filepath.Join(s.memory, string(id)), s.vault.folder(id)
	tmp := to + ".new"
	err := errApart
	if before != "" {
		err = s.copyBeside(from, tmp, before)
	}
	if err != nil { // why ever: a dump that is whole is right, too
		err = copyDump(from, tmp)
	}
	if err == nil {
		err = flushTree(tmp)
	}
	var stored int64
	if err == nil {
		stored, err = storedBytes(tmp)
	}
	if err == nil {
		err = failpoint.Hit("dump copied")
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.held[id]
	if h == nil { // dropped meanwhile
		return os.RemoveAll(tmp)
	}
	if err := os.Rename(tmp, to); err != nil {
		return err
	}
	h.onDisk = true
	s.copied, s.dumped, s.stored = s.copied+1, s.dumped+h.bytes, s.stored+stored
	return flush(s.vault.dir)
}

// copyBeside stores what the dump before it on its path doesn't have, which is in memory and comes to the disk
// before it.
func (s *dumpStore) copyBeside(from, to string, before ids.Process) error {
	s.mu.Lock()
	h := s.held[before]
	s.mu.Unlock()
	if h == nil {
		return errApart
	}
	<-h.copied
	e, err := openElder(before, filepath.Join(s.memory, string(before)), s.vault.folder(before))
	if err != nil {
		return err
	}
	defer e.Close()
	if err := emptyDump(to); err != nil {
		return err
	}
	return copyShared(from, to, e)
}

// emptyDump makes a folder for a dump, whatever was there.
func emptyDump(dir string) error {
	return errors.Join(os.RemoveAll(dir), os.MkdirAll(filepath.Join(dir, imagesDir), 0o755))
}

// storedBytes says what of a dump lies in its folder alone.
func storedBytes(dir string) (stored int64, err error) {
	err = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 1 {
			stored += st.Blocks * 512
		}
		return err
	})
	return stored, err
}

// copyDump makes a whole dump of one that may be stored in parts.
func copyDump(from, to string) error {
	names, err := dumpNames(from)
	if err == nil {
		err = emptyDump(to)
	}
	if err != nil {
		return err
	}
	for _, name := range append(names, sumsName) {
		if err := copyFile(from, name, filepath.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(dir, name, to string) error {
	src, err := openDumpFile(dir, name)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}

// flushTree brings a dump's folder to the disk.
func flushTree(dir string) error {
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return flush(path)
	})
	return errors.Join(err, flush(filepath.Dir(dir)))
}

func flush(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// place is the folder where a dump is, whole or not.
func (s *dumpStore) place(id ids.Process) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dir, _, err := s.locate(id)
	return dir, err
}

// locate is place, and what memory has of it; nil: it is on the disk. The caller holds mu.
func (s *dumpStore) locate(id ids.Process) (dir string, h *heldDump, err error) {
	if h := s.held[id]; h != nil {
		h.used = time.Now()
		return filepath.Join(s.memory, string(id)), h, nil
	}
	dir = s.vault.folder(id)
	_, err = os.Lstat(filepath.Join(dir, sumsName))
	return dir, nil, err
}

// find gives a folder in which a dump is whole, and makes it so if need be.
func (s *dumpStore) find(id ids.Process) (string, error) {
	for {
		dir, err := s.place(id)
		if err != nil {
			return "", err
		}
		if _, err := os.Lstat(filepath.Join(dir, pagesName)); errors.Is(err, os.ErrNotExist) {
			return dir, nil
		} else if err != nil {
			return "", err
		}
		s.mu.Lock()
		if s.held[id] != nil { // it came since
			s.mu.Unlock()
			continue
		}
		under, ok := s.bringing[id]
		if !ok {
			s.bringing[id] = make(chan struct{})
		}
		s.mu.Unlock()
		if ok { // one brings it for all that want it
			<-under
			continue
		}
		err = s.bring(id, dir)
		s.mu.Lock()
		close(s.bringing[id])
		delete(s.bringing, id)
		s.mu.Unlock()
		if err != nil {
			return "", err
		}
	}
}

// bring makes a dump whole: in memory or, if there is no room, where it is. It isn't
// held against its sums here, but by whoever restores it.
func (s *dumpStore) bring(id ids.Process, dir string) error {
	names, err := dumpNames(dir)
	if err != nil {
		return err
	}
	var size int64
	for _, name := range names {
		n, err := dumpFileSize(dir, name)
		if err != nil {
			return err
		}
		size += n
	}
	s.mu.Lock()
	room := s.memory != "" && s.makeRoom(size)
	if room {
		s.bytes += size // until it is there nobody finds it
	}
	s.mu.Unlock()
	to := dir
	if room {
		to = filepath.Join(s.memory, string(id))
	}
	tmp := to + ".new"
	err = copyDump(dir, tmp)
	if err == nil && !room {
		err = flushTree(tmp)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		_, err = os.Lstat(filepath.Join(dir, sumsName)) // or it was dropped meanwhile
	}
	switch {
	case err != nil:
	case room:
		err = os.Rename(tmp, to)
	default:
		// Whoever reads the old one goes on with its files.
		err = unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE)
	}
	if err == nil && room {
		s.held[id] = newHeld(size)
		s.held[id].onDisk = true
		close(s.held[id].copied)
		return nil
	}
	if room {
		s.bytes -= size
	}
	return errors.Join(err, os.RemoveAll(tmp))
}

// use is place for who reads a dump file by file (openDumpFile): it stays there until done is called. Whoever calls it
// sees to it that the dump isn't dropped (Engine.held).
func (s *dumpStore) use(id ids.Process) (dir string, done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dir, h, err := s.locate(id)
	if h == nil {
		return dir, func() {}, err
	}
	h.users++
	return dir, func() {
		s.mu.Lock()
		h.users--
		s.mu.Unlock()
	}, nil
}

// letGo removes a dump, or what there is of one, from memory.
func (s *dumpStore) letGo(id ids.Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(id)
}

// drop removes it from the disk, too, and what is on its way from there to memory.
func (s *dumpStore) drop(id ids.Process) error {
	s.letGo(id)
	err := failpoint.Hit("state removed")
	if err == nil {
		err = s.vault.remove(id)
	}
	s.letGo(id)
	return err
}

// capability tells the figures in Info.
func (s *dumpStore) capability() Capability {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Capability{Name: "dumps", State: 1, Detail: fmt.Sprintf("since the start %d dumps of %d bytes were stored in %d bytes of the disk; %d bytes of dumps are in memory, at most %d",
		s.copied, s.dumped, s.stored, s.bytes, s.limit)}
}

// close waits until all is on the disk, and lets go of the memory.
func (s *dumpStore) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.copying.Wait()
	s.line.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, h := range s.held {
		if h.onDisk {
			s.forget(id)
		}
	}
	if s.memory != "" && len(s.held) == 0 {
		_ = os.Remove(s.memory)
	}
}
