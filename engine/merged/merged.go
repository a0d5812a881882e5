// Package merged compares two states of a sandbox's files as the sandbox sees them:
// the image's layers with one or the other folder of changes on top. It looks only
// where the folders of changes differ, so it costs what was changed since the image,
// not the image.
//
// Audits call it, so it shares no code with the inspector. Modification times of
// folders are left out: they move with entries that are gone again.
package merged

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/treewalk"
)

// Differ says where two folders of changes above the same layers (lowest first) show
// something else, in words; nothing: nowhere. The process must be root in a mount
// namespace of its own. Both folders must stand still.
func Differ(ctx context.Context, layers []string, was, is string) ([]string, error) {
	places, err := differing(ctx, was, is)
	if err != nil || len(places) == 0 {
		return nil, err
	}
	a, err := mount(layers, was)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	b, err := mount(layers, is)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	var out []string
	for place, whole := range places {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		x, y := describe(a, place, whole), describe(b, place, whole)
		out = append(out, treewalk.Diff(x, y, 10)...)
	}
	slices.Sort(out)
	return out, nil
}

// differing gives the places at which two folders of changes differ, and of each whether everything below must be looked at.
func differing(ctx context.Context, was, is string) (map[string]bool, error) {
	o := treewalk.Options{IgnoreDirTimes: true, Err: ctx.Err}
	before, _, err := treewalk.Digest(was, o)
	if err != nil {
		return nil, err
	}
	after, _, err := treewalk.Digest(is, o)
	if err != nil {
		return nil, err
	}
	// Names of lower layers may have been hidden or put elsewhere by an overlay's mark.
	places := map[string]bool{}
	for _, line := range treewalk.Diff(before, after, len(before)+len(after)) {
		quoted, err := strconv.QuotedPrefix(line[2:])
		if err != nil {
			return nil, fmt.Errorf("reading %q: %w", line, err)
		}
		place, err := strconv.Unquote(quoted)
		if err != nil {
			return nil, fmt.Errorf("reading %q: %w", line, err)
		}
		places[place] = places[place] || strings.Contains(line, " trusted.overlay.opaque=") || strings.Contains(line, " trusted.overlay.redirect=")
	}
	return places, nil
}

// describe gives the lines of one place in a root; a folder's tell its names, or
// (whole) everything below it.
func describe(root *os.File, place string, whole bool) []string {
	parent, name := path.Split(place)
	o := treewalk.Options{IgnoreDirTimes: true}
	o.Skip = func(p string) bool { return p != "." && p != name }
	if place == "." {
		o.Skip = func(p string) bool { return p != "." }
	} else if whole {
		o.Skip = func(p string) bool { return p != "." && p != name && !strings.HasPrefix(p, name+"/") }
	}
	dir, err := within(root, parent)
	if err != nil {
		return absent(place, err)
	}
	defer dir.Close()
	lines, _, err := treewalk.DigestAt(dir, o)
	if err != nil {
		return absent(place, err)
	}
	if place != "." {
		lines = slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, `"." `) })
	}
	for i := range lines {
		lines[i] = strconv.Quote(place) + ": " + linksCut(lines[i])
	}
	if whole || len(lines) == 0 {
		return lines
	}
	folder, err := within(root, place)
	if err != nil {
		return lines // no folder
	}
	defer folder.Close()
	names, err := folder.Readdirnames(-1)
	if err != nil {
		return append(lines, fmt.Sprintf("%q: %v", place, err))
	}
	for _, n := range names {
		lines = append(lines, fmt.Sprintf("%q holds %q", place, n))
	}
	return lines
}

// linksCut takes away which names of a file were met: what wasn't looked at can't be.
func linksCut(line string) string {
	before, after, found := strings.Cut(line, ` links="`)
	if !found {
		return line
	}
	quoted, err := strconv.QuotedPrefix(`"` + after)
	if err != nil {
		return line
	}
	return before + after[len(quoted)-1:]
}

func absent(place string, err error) []string {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	return []string{fmt.Sprintf("%q: %v", place, err)}
}

// within opens a folder of a root, following nothing out of it.
func within(root *os.File, place string) (*os.File, error) {
	if place = strings.TrimSuffix(place, "/"); place == "" {
		place = "."
	}
	fd, err := unix.Openat2(int(root.Fd()), place, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: place, Err: err}
	}
	return os.NewFile(uintptr(fd), place), nil
}

// mount shows layers and a folder of changes, read-only. The mount is gone when the
// file is closed.
func mount(layers []string, upper string) (*os.File, error) {
	at, err := os.MkdirTemp("", "boxwood-audit-")
	if err != nil {
		return nil, err
	}
	defer os.Remove(at)
	lower := upper
	for _, l := range slices.Backward(layers) {
		lower += ":" + l
	}
	options := "redirect_dir=follow,metacopy=off,index=off,xino=off,lowerdir=" + lower
	if len(options) >= os.Getpagesize() {
		return nil, fmt.Errorf("mounting %d layers to look at: their paths are too long", len(layers))
	}
	if err := unix.Mount("overlay", at, "overlay", unix.MS_RDONLY|unix.MS_NOATIME, options); err != nil {
		return nil, fmt.Errorf("mounting %s to look at: %w", upper, err)
	}
	f, err := os.Open(at)
	if uerr := unix.Unmount(at, unix.MNT_DETACH); err == nil && uerr != nil {
		f.Close()
		return nil, fmt.Errorf("unmounting %s: %w", at, uerr)
	}
	return f, err
}
