package box

import (
	"archive/tar"
	"encoding/binary"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// struct record of init/files.c
const recordSize = 40

const pathMax = 4096

var recordTypes = map[byte]byte{
	tar.TypeDir: 'd', tar.TypeReg: 'f', tar.TypeSymlink: 'l', tar.TypeLink: 'h', tar.TypeFifo: 'p',
}

// unpacker reads a tar stream and gives the records that the box unpacks.
type unpacker struct {
	tar            *tar.Reader
	pending        []byte
	left           int64 // of the present file
	over           bool
	entries, bytes int64
}

func (u *unpacker) Read(p []byte) (int, error) {
	for {
		switch {
		case len(u.pending) > 0:
			n := copy(p, u.pending)
			u.pending = u.pending[n:]
			return n, nil
		case u.left > 0:
			n, err := u.tar.Read(p[:min(int64(len(p)), u.left)])
			u.left -= int64(n)
			u.bytes += int64(n)
			if err == io.EOF && u.left == 0 {
				err = nil
			} else if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			if err != nil {
				return n, badTar(err)
			}
			if n > 0 {
				return n, nil
			}
		case u.over:
			return 0, io.EOF
		default:
			if err := u.next(); err != nil {
				return 0, err
			}
		}
	}
}

func badTar(err error) error {
	return fault.New(fault.Invalid, "bad_tar", "the tar stream is broken or cut off: %w", noEOF{err})
}

// noEOF hides that an error is an end of file, which would end the stream well.
type noEOF struct{ err error }

func (e noEOF) Error() string { return e.err.Error() }

func (u *unpacker) next() error {
	h, err := u.tar.Next()
	if err == io.EOF {
		u.over = true
		u.pending = make([]byte, recordSize)
		return nil
	}
	if err != nil {
		return badTar(err)
	}
	kind, ok := recordTypes[h.Typeflag]
	if !ok {
		return fault.New(fault.Invalid, "bad_entry", "entry %q: a device or an unknown kind can't be unpacked", h.Name)
	}
	name, err := cleanName(h.Name)
	if err != nil {
		return err
	}
	link := h.Linkname
	if kind == 'h' {
		if link, err = cleanName(link); err != nil {
			return err
		}
	}
	if len(link) > pathMax || strings.IndexByte(link, 0) >= 0 {
		return fault.New(fault.Invalid, "bad_entry", "entry %q: the link's target is too long or holds a NUL byte", h.Name)
	}
	b := make([]byte, recordSize, recordSize+len(name)+len(link))
	b[0] = kind
	le := binary.LittleEndian
	le.PutUint32(b[4:], uint32(h.Mode)&0o7777)
	le.PutUint32(b[8:], uint32(h.Uid))
	le.PutUint32(b[12:], uint32(h.Gid))
	le.PutUint32(b[16:], uint32(len(name)))
	le.PutUint32(b[20:], uint32(len(link)))
	le.PutUint64(b[24:], uint64(h.ModTime.UnixNano()))
	if kind == 'f' {
		le.PutUint64(b[32:], uint64(h.Size))
		u.left = h.Size
	}
	u.pending = append(append(b, name...), link...)
	u.entries++
	return nil
}

// cleanName refuses what points out of the folder; "" is the folder itself.
func cleanName(name string) (string, error) {
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", fault.New(fault.Invalid, "bad_entry", "entry %q leads out of the folder", name)
		}
	}
	if len(clean) > pathMax || strings.IndexByte(clean, 0) >= 0 {
		return "", fault.New(fault.Invalid, "bad_entry", "entry %.40q: the name is too long or holds a NUL byte", name)
	}
	if clean == "" {
		clean = "."
	}
	return clean, nil
}

// packer takes records from a box, which is hostile, and writes a tar stream.
type packer struct {
	tar  *tar.Writer
	held []byte // an incomplete record
	left int64  // of the present file
	over bool
}

func (p *packer) take(b []byte) error {
	for len(b) > 0 {
		if p.over {
			return errProtocol
		}
		if p.left > 0 {
			n := min(int64(len(b)), p.left)
			if _, err := p.tar.Write(b[:n]); err != nil {
				return err
			}
			b, p.left = b[n:], p.left-n
			continue
		}
		need := recordSize
		if len(p.held) >= recordSize {
			var err error
			if need, err = recordLength(p.held); err != nil {
				return err
			}
		}
		n := min(len(b), need-len(p.held))
		p.held, b = append(p.held, b[:n]...), b[n:]
		if err := p.tryRecord(); err != nil {
			return err
		}
	}
	return nil
}

func recordLength(head []byte) (int, error) {
	name, link := binary.LittleEndian.Uint32(head[16:]), binary.LittleEndian.Uint32(head[20:])
	if name > pathMax || link > pathMax {
		return 0, errProtocol
	}
	return recordSize + int(name) + int(link), nil
}

func (p *packer) tryRecord() error {
	if len(p.held) < recordSize {
		return nil
	}
	length, err := recordLength(p.held)
	if err != nil || len(p.held) < length {
		return err
	}
	r := p.held
	p.held = p.held[:0]
	if r[0] == 0 {
		p.over = true
		return nil
	}
	le := binary.LittleEndian
	end := recordSize + int(le.Uint32(r[16:]))
	h := &tar.Header{
		Format: tar.FormatPAX, Name: string(r[recordSize:end]), Linkname: string(r[end:length]),
		Mode: int64(le.Uint32(r[4:]) & 0o7777), Uid: int(le.Uint32(r[8:])), Gid: int(le.Uint32(r[12:])),
		ModTime: time.Unix(0, int64(le.Uint64(r[24:]))),
	}
	switch r[0] {
	case 'd':
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
	case 'f':
		h.Typeflag, h.Size = tar.TypeReg, int64(le.Uint64(r[32:]))
	case 'l':
		h.Typeflag = tar.TypeSymlink
	case 'p':
		h.Typeflag = tar.TypeFifo
	default:
		return errProtocol
	}
	if h.Size < 0 || h.Name == "" || strings.HasPrefix(h.Name, "/") || strings.Contains("/"+h.Name+"/", "/../") {
		return errProtocol
	}
	p.left = h.Size
	if err := p.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("writing the entry %s: %w", printable(h.Name), err)
	}
	return nil
}
