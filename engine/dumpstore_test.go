package engine

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/sched"
)

// dumps is a store of dumps that are made up: their files are what a dump has, their bytes are anything.
type dumps struct {
	*dumpStore
	t       *testing.T
	state   string
	run     string
	digests map[ids.Process]string
	whole   map[ids.Process][]byte // pages-1.img
	last    ids.Process
}

func newDumps(t *testing.T, limit int64) *dumps {
	run, err := os.MkdirTemp("/dev/shm", "boxwood-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(run) })
	d := &dumps{t: t, state: t.TempDir(), run: run, digests: map[ids.Process]string{}, whole: map[ids.Process][]byte{}}
	d.open(limit)
	return d
}

// open is a start on what there is.
func (d *dumps) open(limit int64) {
	d.t.Helper()
	v, err := openVault(d.state)
	if err != nil {
		d.t.Fatal(err)
	}
	if d.dumpStore, err = openDumpStore(v, d.run, limit, func(msg string, args ...any) { d.t.Error(append([]any{msg}, args...)...) }); err != nil {
		d.t.Fatal(err)
	}
	known := map[ids.Process]bool{}
	for id := range d.digests {
		known[id] = true
	}
	if _, err := v.reconcile(known); err != nil {
		d.t.Fatal(err)
	}
	lost, err := d.reconcile(known)
	if err != nil || len(lost) > 0 {
		d.t.Fatalf("lost: %v, %v", lost, err)
	}
}

// restart is an end and another start, so that nothing is in memory.
func (d *dumps) restart(limit int64) {
	d.close()
	d.open(limit)
}

// add makes a dump after the last one, and waits until it is on the disk.
func (d *dumps) add(pages []byte) ids.Process {
	d.t.Helper()
	id := d.begins(sched.Work{Class: sched.Persist}, pages, d.last)
	d.copying.Wait()
	d.last = id
	return id
}

// begins makes a dump after another, which goes to the disk when its turn comes.
func (d *dumps) begins(w sched.Work, pages []byte, before ids.Process) ids.Process {
	d.t.Helper()
	id := ids.NewProcess()
	dir, err := d.begin(id, int64(len(pages)))
	if err != nil {
		d.t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, imagesDir), 0o755); err != nil {
		d.t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"images/pages-1.img": pages, "images/pages-2.img": pages[:3*pageSize], "images/pages-3.img": nil, "images/core-1.img": []byte(id),
		"witness.json": []byte("{}"), "dump.json": []byte("{}"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o444); err != nil {
			d.t.Fatal(err)
		}
	}
	digest, size, err := seal(dir)
	if err != nil {
		d.t.Fatal(err)
	}
	d.digests[id], d.whole[id] = digest, bytes.Clone(pages)
	if err := d.complete(w, id, size, before); err != nil {
		d.t.Fatal(err)
	}
	return id
}

// A dump that waits for the one before it takes no slot that this one needs, although its tree's turn is earlier.
func TestDumpsOfOtherTreesWaitForTheirElders(t *testing.T) {
	d := newDumps(t, 1<<20)
	debtor := sched.Work{Class: sched.Persist, Tenant: "debtor", Weight: 1e-9}
	var holds []func(error)
	for range copiesAtOnce {
		release, err := d.line.Acquire(t.Context(), debtor)
		if err != nil {
			t.Fatal(err)
		}
		holds = append(holds, release)
	}
	all := []ids.Process{d.begins(debtor, make([]byte, 4*pageSize), "")}
	for i := range 2 * copiesAtOnce {
		all = append(all, d.begins(sched.Work{Class: sched.Persist, Tenant: fmt.Sprint(i)}, make([]byte, 5*pageSize), all[0]))
	}
	for _, release := range holds {
		release(nil)
	}
	done := make(chan struct{})
	go func() { d.copying.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("they wait for each other")
	}
	for _, id := range all {
		d.check(id)
	}
}

// check demands that a dump is found whole and as it was saved.
func (d *dumps) check(id ids.Process) {
	d.t.Helper()
	if err := checkSeal(d.vault.folder(id), d.digests[id]); err != nil {
		d.t.Errorf("%s on the disk: %v", id, err)
	}
	dir, err := d.find(id)
	if err == nil {
		err = checkSeal(dir, d.digests[id])
	}
	if err != nil {
		d.t.Errorf("%s: %v", id, err)
		return
	}
	got, err := os.ReadFile(filepath.Join(dir, "images/pages-1.img"))
	if err != nil || !bytes.Equal(got, d.whole[id]) {
		d.t.Errorf("%s has other pages, %v", id, err)
	}
}

// own is how many pages lie in a dump's folder for it alone.
func (d *dumps) own(id ids.Process) (pages int64) {
	d.t.Helper()
	files, err := filepath.Glob(d.vault.folder(id) + "/images/pages-*")
	if err != nil {
		d.t.Fatal(err)
	}
	for _, f := range files {
		st, err := os.Stat(f)
		if err != nil {
			d.t.Fatal(err)
		}
		pages += st.Size() / pageSize
	}
	return pages
}

func noise(r *rand.ChaCha8, pages int) []byte {
	b := make([]byte, pages*pageSize)
	r.Read(b)
	return b
}

// If it fails, a dump takes the disk that one with the same pages has taken already, or isn't what was saved when it is
// put together again: after a chain of them, without those between, after a restart, with little memory.
func TestDumpsShareTheirPages(t *testing.T) {
	d := newDumps(t, 0)
	r := rand.NewChaCha8([32]byte{1})
	pages := noise(r, 500)
	copy(pages[100*pageSize:], make([]byte, 50*pageSize)) // alike, and neighbours of theirs
	chain := []ids.Process{d.add(pages)}
	if got := d.own(chain[0]); got != 503 {
		t.Fatalf("the first has %d pages", got)
	}
	for i := range 5 {
		changed := bytes.Clone(pages)
		r.Read(changed[(10+i)*pageSize : (12+i)*pageSize])
		changed[300*pageSize+i] ^= 1                                        // a byte of a page
		changed = slices.Insert(changed, 200*pageSize, noise(r, 1)...)      // all behind it move
		changed = append(changed[:400*pageSize], changed[401*pageSize:]...) // and one goes
		pages = changed
		chain = append(chain, d.add(pages))
		if got := d.own(chain[i+1]); got != 4 {
			t.Errorf("dump %d of the chain has %d pages of its own, and 4 are new", i+1, got)
		}
	}
	for _, id := range chain {
		d.check(id)
	}
	d.restart(0)
	for _, id := range chain {
		d.check(id)
	}
	// Those between go, and the first.
	for _, i := range []int{2, 0, 4} {
		if err := d.drop(chain[i]); err != nil {
			t.Fatal(err)
		}
		delete(d.digests, chain[i])
	}
	d.restart(600 * pageSize) // room for one
	for range 2 {
		for _, i := range []int{1, 3, 5} {
			d.check(chain[i])
		}
	}
	if d.bytes > d.limit {
		t.Errorf("%d bytes are in memory, of at most %d", d.bytes, d.limit)
	}
	d.restart(1) // for none: it is made whole on the disk
	d.check(chain[5])
	if got := d.own(chain[5]); got != 503 {
		t.Errorf("of the whole one %d pages are on the disk", got)
	}
	d.check(chain[3])
	d.close()
}

// If it fails, a byte that changed on the disk is in a child of whichever dump has it.
func TestADamagedPageIsRefusedWhereverItIsUsed(t *testing.T) {
	d := newDumps(t, 0)
	r := rand.NewChaCha8([32]byte{2})
	pages := noise(r, 100)
	a := d.add(pages)
	pages[0] ^= 1
	b := d.add(pages)
	pages[50*pageSize] ^= 1
	c := d.add(pages)
	d.restart(0)
	flip := func(path string, at int64) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var one [1]byte
		_, err = f.ReadAt(one[:], at)
		one[0] ^= 4
		if err == nil {
			_, err = f.WriteAt(one[:], at)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	refused := func(id ids.Process, want bool) {
		t.Helper()
		dir, err := d.find(id)
		if err == nil {
			err = checkSeal(dir, d.digests[id])
		}
		if (err != nil) != want {
			t.Errorf("%s: %v", id, err)
		}
		if err := checkSeal(d.vault.folder(id), d.digests[id]); (err != nil) != want {
			t.Errorf("%s on the disk: %v", id, err)
		}
		d.restart(0)
	}
	flip(d.vault.folder(a)+"/images/pages-1.img", 50*pageSize) // which c has replaced
	refused(a, true)
	refused(b, true)
	refused(c, false)
	flip(d.vault.folder(b)+"/images/pages-1.own", 0)
	flip(d.vault.folder(b)+"/images/pages-2.own", 0) // which has that page, too
	refused(c, true)
	if err := os.WriteFile(d.vault.folder(c)+"/pages", []byte("1 ../../secret 0 100\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(c, true)
	d.close()
}

// If it fails, a long path is put together of ever more files, or keeps ever more of what is gone.
func TestADumpOfTooManyIsWhole(t *testing.T) {
	d := newDumps(t, 0)
	r := rand.NewChaCha8([32]byte{3})
	pages := noise(r, 3*sourcesMax)
	whole := 0
	for i := range 2*sourcesMax + 2 {
		r.Read(pages[i*pageSize : (i+1)*pageSize])
		id := d.add(pages)
		from, err := os.ReadDir(filepath.Join(d.vault.folder(id), fromDir))
		if os.IsNotExist(err) {
			whole++
		} else if err != nil || len(from) > sourcesMax {
			t.Errorf("dump %d is made of %d files, %v", i, len(from), err)
		}
		d.check(id)
	}
	if whole < 2 || whole > 4 {
		t.Errorf("%d of them are whole", whole)
	}
	d.close()
}

// If it fails, 64 children of a dump that isn't in memory bring it there 64 times, or one gets half of it.
func TestADumpIsBroughtOnce(t *testing.T) {
	d := newDumps(t, 0)
	r := rand.NewChaCha8([32]byte{4})
	pages := noise(r, 300)
	d.add(pages)
	pages[0] ^= 1
	id := d.add(pages)
	d.restart(0)
	errs := make(chan error)
	for range 64 {
		go func() {
			dir, err := d.find(id)
			if err == nil {
				err = checkSeal(dir, d.digests[id])
			}
			errs <- err
		}()
	}
	for range 64 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if want, err := dumpBytes(filepath.Join(d.memory, string(id))); err != nil || d.bytes != want {
		t.Errorf("%d bytes are in memory by count, %d in truth, %v", d.bytes, want, err)
	}
	if err := d.drop(id); err != nil || d.bytes != 0 {
		t.Errorf("%d bytes are left in memory, %v", d.bytes, err)
	}
	d.close()
}
