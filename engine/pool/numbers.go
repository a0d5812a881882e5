package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
)

// Inode numbers. overlayfs sees all layers of the pool as one file system and
// shows their numbers as they are, but each subvolume starts counting at 256:
// two layers, or a layer and an upper, would show different files with one
// (st_dev, st_ino), and cp, mv and find then take them for the same file.
//
// So the pool has one number line. The subvolume "numbers" is all but empty; its
// file "last" has a number above that of every file of every layer there ever
// was. btrfs goes on counting above the highest number that a subvolume holds,
// also in a snapshot of it, so
//
//   - a layer starts as a snapshot of "numbers" and is filled. Then "numbers"
//     becomes a snapshot of that layer, emptied but for a "last" made after all
//     else. No two layers share a number, in whatever order they are stacked;
//   - a base starts as a snapshot of "numbers" as well: whatever is written into
//     an upper, in a clone of a clone of it too, gets a number above all those of
//     the stack, which was complete when the base was made.
//
// Uppers share numbers with each other; no two of them are ever in one stack. A
// node that becomes a layer is copied into one by AddLayer, and so renumbered.
//
// "numbers" moves on before a layer is published: a crash between the two only
// skips numbers.
const (
	numbersName = "numbers"
	lastName    = "last"
)

func (p *Btrfs) startNumbers() error {
	if _, err := os.Lstat(filepath.Join(p.root, numbersName)); err == nil {
		return nil
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	tmp := newPrefix + numbersName
	if err := btrfs.Create(p.top, tmp); errors.Is(err, unix.EEXIST) {
		// Left by a crash before the rename: it is empty.
	} else if err != nil {
		return err
	}
	if err := touchLast(filepath.Join(p.root, tmp)); err != nil {
		return err
	}
	return os.Rename(filepath.Join(p.root, tmp), filepath.Join(p.root, numbersName))
}

// touchLast gives the file "last" the next, and so the highest, number.
func touchLast(dir string) error {
	path := filepath.Join(dir, lastName)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// fromNumbers makes name in dir a writable snapshot of "numbers".
func (p *Btrfs) fromNumbers(dir *os.File, name string) error {
	src, err := os.Open(filepath.Join(p.root, numbersName))
	if err != nil {
		return err
	}
	defer src.Close()
	return btrfs.Snapshot(dir, name, src, false)
}

// advanceNumbers moves "numbers" above all files of a filled layer; layerMu is
// held.
func (p *Btrfs) advanceNumbers(layer string) error {
	if err := touchLast(layer); err != nil {
		return err
	}
	src, err := os.Open(layer)
	if err != nil {
		return err
	}
	defer src.Close()
	tmp := temporary(newPrefix, numbersName)
	if err := btrfs.Snapshot(p.top, tmp, src, false); err != nil {
		return err
	}
	defer p.sweep.add(p.top, tmp) // after the exchange: the one before
	at := filepath.Join(p.root, tmp)
	if err := os.RemoveAll(filepath.Join(at, layerRoot)); err != nil {
		return fmt.Errorf("emptying a copy of the layer: %w", err)
	}
	p.opts.hook("numbers emptied")
	fd := int(p.top.Fd())
	return unix.Renameat2(fd, tmp, fd, numbersName, unix.RENAME_EXCHANGE)
}
