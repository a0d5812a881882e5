package engine

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

const (
	imagesDir = "images"
	dumpsDir  = "dumps" // of the run folder
	sumsName  = "sums"
)

// seal writes the sums of a complete dump and returns its digest and how large it is.
func seal(dir string) (digest string, size int64, err error) {
	names, err := sortedNames(dir)
	if err != nil {
		return "", 0, err
	}
	var sums bytes.Buffer
	for _, name := range names {
		sum, n, err := sumFile(filepath.Join(dir, name))
		if err != nil {
			return "", 0, err
		}
		size += n
		fmt.Fprintf(&sums, "%s %d %s\n", sum, n, name)
	}
	all := sha256.Sum256(sums.Bytes())
	return hex.EncodeToString(all[:]), size, os.WriteFile(filepath.Join(dir, sumsName), sums.Bytes(), 0o600)
}

// checkSeal holds every file of a dump against its sum, and the sums against the
// digest on record.
func checkSeal(dir, digest string) error {
	sums, err := os.ReadFile(filepath.Join(dir, sumsName))
	if err != nil {
		return err
	}
	if all := sha256.Sum256(sums); hex.EncodeToString(all[:]) != digest {
		return errors.New("its list of sums isn't the one on record")
	}
	names, err := sortedNames(dir)
	if err != nil {
		return err
	}
	scan := bufio.NewScanner(bytes.NewReader(sums))
	for _, name := range names {
		if !scan.Scan() {
			return fmt.Errorf("%s wasn't saved", name)
		}
		sum, n, err := sumFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if scan.Text() != fmt.Sprintf("%s %d %s", sum, n, name) {
			return fmt.Errorf("%s has other bytes than were saved", name)
		}
	}
	if scan.Scan() {
		return fmt.Errorf("a file is missing: %s", scan.Text())
	}
	return nil
}

func sumFile(path string) (sum string, n int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	if n, err = io.CopyBuffer(struct{ io.Writer }{h}, f, make([]byte, 256<<10)); err != nil {
		return "", 0, err
	}
	return hex.EncodeToString(h.Sum(nil)), n, nil
}

// dumpStore keeps dumps: in memory from the freeze on, while there is room, and in
// the vault from a little later. A restore takes the one in memory if it is there.
// Whoever restores has links of his own to the files (package criu), so that nothing has to wait for him.
type dumpStore struct {
	vault  *vault
	memory string // folder on a tmpfs; empty: none
	limit  int64  // bytes in memory
	log    func(msg string, args ...any)

	mu      sync.Mutex
	held    map[ids.Process]*heldDump // those in memory
	bytes   int64
	copying sync.WaitGroup
	closed  bool
}

type heldDump struct {
	bytes  int64
	onDisk bool
	used   time.Time
}

// openDumpStore takes over what a former daemon left in memory. limit 0: an eighth of
// the host's memory.
func openDumpStore(v *vault, run string, limit int64, log func(string, ...any)) (*dumpStore, error) {
	s := &dumpStore{vault: v, limit: limit, log: log, held: map[ids.Process]*heldDump{}}
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
		s.held[id] = &heldDump{bytes: size, used: time.Now()}
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
		case h != nil:
			s.copy(id)
		}
	}
	return lost, nil
}

func dumpBytes(dir string) (n int64, err error) {
	names, err := sortedNames(dir)
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
		s.held[id] = &heldDump{bytes: about, used: time.Now()}
	}
	s.mu.Unlock()
	if !room {
		return s.vault.make(id)
	}
	dir = filepath.Join(s.memory, string(id))
	if err := os.Mkdir(dir, 0o755); err != nil { // CRIU reads as root of a box, too
		s.drop(id)
		return "", err
	}
	return dir, nil
}

// makeRoom lets go of the dumps that were used least lately and are on the disk.
func (s *dumpStore) makeRoom(want int64) bool {
	for s.bytes+want > s.limit {
		var oldest ids.Process
		for id, h := range s.held {
			if h.onDisk && (oldest == "" || h.used.Before(s.held[oldest].used)) {
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

// complete takes a sealed dump in.
func (s *dumpStore) complete(id ids.Process, bytes int64) error {
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
	s.copy(id)
	return nil
}

// copy brings a dump to the disk behind whoever asked for it.
func (s *dumpStore) copy(id ids.Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.copying.Go(func() {
		if err := s.copyNow(id); err != nil && !errors.Is(err, os.ErrNotExist) { // removed meanwhile
			s.log("copying a dump to the disk", "state", id, "error", err)
		}
	})
}

func (s *dumpStore) copyNow(id ids.Process) error {
	from, to := filepath.Join(s.memory, string(id)), s.vault.folder(id)
	tmp := to + ".new"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(tmp, imagesDir), 0o755); err != nil {
		return err
	}
	err := copyDump(from, tmp)
	if err == nil {
		err = flushTree(tmp)
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
	return flush(s.vault.dir)
}

func copyDump(from, to string) error {
	names, err := sortedNames(from)
	if err != nil {
		return err
	}
	for _, name := range append(names, sumsName) {
		if err := copyFile(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) error {
	src, err := os.Open(from)
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
	names, err := sortedNames(dir)
	if err != nil {
		return err
	}
	for _, name := range append(names, sumsName, imagesDir, "") {
		if err := flush(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return flush(filepath.Dir(dir))
}

func flush(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// find gives the folder of a dump.
func (s *dumpStore) find(id ids.Process) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.held[id]; h != nil {
		h.used = time.Now()
		return filepath.Join(s.memory, string(id)), nil
	}
	dir := s.vault.folder(id)
	_, err := os.Lstat(filepath.Join(dir, sumsName))
	return dir, err
}

// letGo removes a dump, or what there is of one, from memory.
func (s *dumpStore) letGo(id ids.Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(id)
}

// drop removes it from the disk, too.
func (s *dumpStore) drop(id ids.Process) {
	s.letGo(id)
	if err := s.vault.remove(id); err != nil {
		s.log("removing a dump", "state", id, "error", err)
	}
}

// close waits until all is on the disk, and lets go of the memory.
func (s *dumpStore) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.copying.Wait()
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
