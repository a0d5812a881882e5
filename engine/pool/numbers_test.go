package pool

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// The number line: each layer starts above all layers before it, a base above
// all of them, and "numbers" stays all but empty, or every clone would be slow.
func TestNumberLine(t *testing.T) {
	p := mustOpen(t, testOptions(t.TempDir()))
	highest := func(path string) uint64 {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		n, err := btrfs.HighestInode(f)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	lowest := func(root string) uint64 {
		low := ^uint64(0)
		filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
			var st unix.Stat_t
			if err == nil && unix.Lstat(path, &st) == nil {
				low = min(low, st.Ino)
			}
			return err
		})
		return low
	}
	var before uint64
	var layers []ids.Layer
	for i := range 4 {
		id := ids.Layer(fmt.Sprintf("sha256:%x", sha256.Sum256([]byte{byte(i)})))
		if err := p.AddLayer(t.Context(), id, fillTest); err != nil {
			t.Fatal(err)
		}
		if low := lowest(p.layerDir(id)); low <= before {
			t.Errorf("layer %d starts at %d, the one before ended at %d", i, low, before)
		}
		before = highest(filepath.Dir(p.layerDir(id)))
		layers = append(layers, id)
	}
	if n := highest(filepath.Join(p.root, numbersName)); n < before {
		t.Errorf("numbers go on at %d, a layer has %d", n, before)
	}
	entries, err := os.ReadDir(filepath.Join(p.root, numbersName))
	if err != nil || len(entries) != 1 || entries[0].Name() != lastName {
		t.Errorf("numbers holds %v (%v)", entries, err)
	}
	id := ids.NewSnapshot()
	seal, err := p.AddBase(t.Context(), id, layers[:1]) // the lowest alone
	if err != nil {
		t.Fatal(err)
	}
	up := mustClone(t, p, id, seal, 0)
	if low := lowest(up.Dir); low <= before {
		t.Errorf("an upper starts at %d, a layer has %d", low, before)
	}
}

// A limit can be changed while the sandbox lives, and what it wrote be read.
func TestLimitOfLiveUpper(t *testing.T) {
	p := mustOpen(t, testOptions(t.TempDir()))
	if !p.Quotas() {
		testenv.Require(t, func() string { return "needs btrfs with simple quotas (Linux 6.7)" })
	}
	base, seal := mustBase(t, p)
	up := mustClone(t, p, base, seal, 4<<20)
	data := make([]byte, 16<<20)
	if err := os.WriteFile(up.Dir+"/a", data, 0o644); !errors.Is(err, unix.EDQUOT) {
		t.Errorf("16 MiB into a limit of 4: %v", err)
	}
	if err := btrfs.Limit(p.top, up.Subvolume, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(up.Dir+"/a", data, 0o644); err != nil {
		t.Errorf("16 MiB after lifting the limit: %v", err)
	}
	if err := p.Flush(t.Context(), up.Generation); err != nil {
		t.Fatal(err)
	}
	if err := btrfs.Commit(p.top); err != nil {
		t.Fatal(err)
	}
	if n, ok, err := btrfs.Owned(p.top, up.Subvolume); err != nil || !ok || n < 16<<20 {
		t.Errorf("the upper owns %d (%v, %v), having written 16 MiB", n, ok, err)
	}
}
