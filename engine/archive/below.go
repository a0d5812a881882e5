package archive

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// beneath: what an archive says of files is done in the folder of changes and nowhere else (law 8).
func beneath() uint64 {
	if sabotage.On("beneath") {
		return 0
	}
	return unix.RESOLVE_NO_XDEV | unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS
}

// Below opens what a path names below an open folder, whatever has been made of that: it follows no link, and enters no other
// file system. The path may be longer than the kernel takes at once; empty: the folder itself.
func Below(dir int, name string, flags int) (*os.File, error) {
	const atOnce = unix.PathMax / 2
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: beneath()}
	rest, at := name, dir
	for len(rest) > atOnce {
		cut := strings.LastIndexByte(rest[:atOnce], '/')
		if cut < 0 {
			return nil, &os.PathError{Op: "open", Path: name, Err: unix.ENAMETOOLONG}
		}
		fd, err := unix.Openat2(at, rest[:cut], &how)
		if at != dir {
			unix.Close(at)
		}
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: name, Err: err}
		}
		at, rest = fd, rest[cut+1:]
	}
	if rest == "" {
		rest = "."
	}
	how.Flags = uint64(flags) | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat2(at, rest, &how)
	if at != dir {
		unix.Close(at)
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// missing: Below found nothing of that name, or something else than a folder on the way.
func missing(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

// Copy is io.Copy that ends with ctx: a few bytes of an archive, or one call in a sandbox, make a hole of 8 EiB.
func Copy(ctx context.Context, w io.Writer, r io.Reader) error {
	_, err := io.Copy(struct{ io.Writer }{w}, within{ctx, r})
	return err
}

type within struct {
	ctx context.Context
	r   io.Reader
}

func (r within) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}
