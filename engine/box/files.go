package box

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// ReadMax bounds what ReadFile returns at once.
const ReadMax = 64 << 20

// transfer runs a file helper of pid 1 to its end; see init/files.c for what
// the helpers take and give.
func (b *box) transfer(ctx context.Context, w what, in io.Reader, out func([]byte) error, argv ...string) error {
	var complaint []byte
	exit, err := b.run(ctx, job{what: w, argv: argv, in: in, stdout: out, stderr: func(p []byte) error {
		complaint = append(complaint, p[:min(len(p), 8192-len(complaint))]...)
		return nil
	}})
	switch {
	case err != nil && len(complaint) == 0:
		return err
	case exit.Lost:
		return fault.New(fault.Unavailable, "box_lost", "the box ended while a file was transferred")
	case exit.Cancelled || exit.TimedOut:
		return fault.New(fault.Cancelled, "cancelled", "the transfer was cancelled")
	case exit.OOMKilled:
		return fault.New(fault.Exhausted, "no_memory", "the box has no memory left for the transfer")
	case exit.Code != 0 && len(complaint) > 0 && exit.Code != 126:
		return errnoFault(complaint)
	case exit.Code != 0:
		return fault.New(fault.Exhausted, "transfer", "the box could not start or finish the transfer: %s", printable(string(complaint)))
	}
	return nil
}

func checkPath(path string) error {
	if path == "" || path[0] != '/' || len(path) > 4096 {
		return fault.New(fault.Invalid, "bad_path", "%q is not an absolute path of the box", path)
	}
	return nil
}

func (b *box) ReadFile(ctx context.Context, path string, offset, limit int64) ([]byte, int64, uint32, error) {
	if err := checkPath(path); err != nil {
		return nil, 0, 0, err
	}
	if offset < 0 || limit < 0 || limit > ReadMax {
		return nil, 0, 0, fault.New(fault.Invalid, "bad_range", "offset %d and limit %d: at most %d bytes from 0 on", offset, limit, ReadMax)
	}
	var got bytes.Buffer
	err := b.transfer(ctx, readFile, nil, func(p []byte) error {
		if int64(got.Len()+len(p)) > limit+12 {
			return errProtocol
		}
		got.Write(p)
		return nil
	}, path, strconv.FormatInt(offset, 10), strconv.FormatInt(limit, 10))
	if err != nil {
		return nil, 0, 0, fmt.Errorf("reading %s: %w", path, err)
	}
	head := got.Next(12)
	if len(head) < 12 {
		return nil, 0, 0, fmt.Errorf("reading %s: %w", path, errProtocol)
	}
	return got.Bytes(), int64(binary.LittleEndian.Uint64(head)), binary.LittleEndian.Uint32(head[8:]), nil
}

func (b *box) WriteFile(ctx context.Context, path string, content []byte, mode uint32, appendTo bool) error {
	if err := checkPath(path); err != nil {
		return err
	}
	if mode > 0o7777 {
		return fault.New(fault.Invalid, "bad_mode", "%o is not a file mode", mode)
	}
	if mode == 0 {
		mode = 0o644
	}
	flag := "0"
	if appendTo {
		flag = "1"
	}
	if err := b.transfer(ctx, writeFile, bytes.NewReader(content), discard, path, strconv.FormatUint(uint64(mode), 8), flag); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

func discard([]byte) error { return nil }

func (b *box) Unpack(ctx context.Context, path string, r io.Reader) (entries, bytes int64, err error) {
	if err := checkPath(path); err != nil {
		return 0, 0, err
	}
	u := &unpacker{tar: tar.NewReader(r)}
	if err := b.transfer(ctx, unpack, u, discard, path); err != nil {
		return 0, 0, fmt.Errorf("unpacking into %s: %w", path, err)
	}
	return u.entries, u.bytes, nil
}

func (b *box) Pack(ctx context.Context, path string, w io.Writer) error {
	if err := checkPath(path); err != nil {
		return err
	}
	p := &packer{tar: tar.NewWriter(w)}
	if err := b.transfer(ctx, pack, nil, p.take, path); err != nil {
		return fmt.Errorf("packing %s: %w", path, err)
	}
	if !p.over {
		return fmt.Errorf("packing %s: %w", path, errProtocol)
	}
	return p.tar.Close()
}
