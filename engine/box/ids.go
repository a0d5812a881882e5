package box

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Slots are shared out among the daemons of a host in blocks. A daemon has a block while it holds the lock on the block's file,
// and takes one more when its own are full. The file names the run folder of who had it last: while boxes of a daemon that was
// killed live on there, nobody else takes their ids.
const (
	slotsEach = 500
	blocksMax = slotsMax / slotsEach
)

// idBlocks are those that a host holds. Who holds the host's mu uses them.
type idBlocks struct {
	dir, runDir string
	held        []int // in the order in which they were taken
	files       []*os.File
}

func openBlocks(dir, runDir string) (*idBlocks, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the folder in which the daemons of a host share ids out: %w", err)
	}
	// Anybody may make a folder beside it, and could lead what is written there to a file of root's.
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return nil, fmt.Errorf("opening the folder in which the daemons of a host share ids out: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return nil, fault.New(fault.Precondition, "foreign_folder", "%s, in which the daemons of a host share ids out, is somebody else's", dir).
			WithHint("find out whose it is, and remove it")
	}
	return &idBlocks{dir: dir, runDir: runDir}, nil
}

// take takes a block, unless another daemon has it, or has left boxes in it.
func (b *idBlocks) take(block int) (bool, error) {
	if slices.Contains(b.held, block) {
		return true, nil
	}
	path := filepath.Join(b.dir, strconv.Itoa(block))
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return false, fmt.Errorf("taking a block of ids: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			return false, nil
		}
		return false, fmt.Errorf("locking %s: %w", path, err)
	}
	last, err := os.ReadFile(path)
	if err == nil && string(last) != b.runDir && len(last) > 0 && leftIn(string(last), block) {
		f.Close()
		return false, nil
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt([]byte(b.runDir), 0)
	}
	if err != nil {
		f.Close()
		return false, fmt.Errorf("taking a block of ids: %w", err)
	}
	b.held, b.files = append(b.held, block), append(b.files, f)
	return true, nil
}

// leftIn reports whether a run folder has boxes in a block.
func leftIn(runDir string, block int) bool {
	entries, _ := os.ReadDir(filepath.Join(runDir, controlFolder))
	for _, e := range entries {
		if slot, err := strconv.Atoi(e.Name()); err == nil && slot/slotsEach == block {
			return true
		}
	}
	return false
}

// more takes any block that is free.
func (b *idBlocks) more() error {
	had := len(b.held)
	for block := range blocksMax {
		if slices.Contains(b.held, block) {
			continue
		}
		if _, err := b.take(block); err != nil {
			return err
		}
		if len(b.held) > had {
			return nil
		}
	}
	return fault.New(fault.Exhausted, "no_slot", "no block of host ids is free: this daemon has %d boxes and zygotes at most, and others have the rest of %d", had*slotsEach, slotsMax).
		WithHint("release sandboxes, or stop another daemon of this host")
}

// slot is the i-th of those in the blocks.
func (b *idBlocks) slot(i int) int { return b.held[i/slotsEach]*slotsEach + i%slotsEach }

func (b *idBlocks) slots() int { return len(b.held) * slotsEach }

func (b *idBlocks) close() {
	for _, f := range b.files {
		f.Close()
	}
	b.held, b.files = nil, nil
}
