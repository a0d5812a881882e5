// Package archive reads and writes a tree with its checkpoints as one stream of
// bytes, which any host with the same image can make the same nodes of.
//
// File state goes in a portable form, not as btrfs send streams. A
// snapshot is an overlay's folder of changes: what it is made of (whiteouts, opaque and
// redirected folders, hard links, sparse files, owners, modes, times in ns,
// attributes) fits in an entry a file. That form needs no
// btrfs on either side, is checked entry by entry before anything is trusted, hides no
// inode numbers or subvolume ids of the host it comes from (the pool gives its own, above
// those of the image: see the pool's numbers), and shares as well: a checkpoint is laid over
// its parent, and a content that the archive had before is named, not repeated. The kernel's receiving end of
// a send stream would be run as root over bytes of unknown origin.
//
// The format is drawn in docs/TREE.md. A reader gives nothing of a frame whose
// checksum is wrong, and the whole is good only when End has been read.
package archive

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"hash/crc32"
	"io"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// magic begins every archive.
const magic = "boxwood tree archive\n"

// Format is what this package writes. It reads those up to it.
//
//	1  no dumps; a header without processor
//	2  dumps
//	3  trees whose programs may gain rights name setuid; before, all could
const Format = 3

// Kind of a frame.
type Kind byte

const (
	Header     Kind = 'H' // ArchiveHeader, first
	File       Kind = 'F' // ArchiveFile: a file of a process state; its Data follow
	Checkpoint Kind = 'C' // ArchiveCheckpoint; its Entries follow
	Entry      Kind = 'E' // ArchiveEntry; its Data follow, if they do
	Data       Kind = 'D' // ArchiveData
	Payload    Kind = 'P' // bytes of a payload, which a later node names
	Node       Kind = 'N' // ArchiveNode, parents first, siblings in order
	End        Kind = 'Z' // ArchiveEnd, last
)

// The bounds of one frame.
const (
	maxFrame = 16 << 20
	// Piece is how much content one Data frame holds at most.
	Piece = 256 << 10
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Writer writes frames: kind, length (varint), crc32c of kind and body, body.
type Writer struct {
	w   io.Writer
	sum hash.Hash
	err error
}

// NewWriter begins an archive.
func NewWriter(w io.Writer, h *pb.ArchiveHeader) (*Writer, error) {
	a := &Writer{w: w, sum: sha256.New()}
	a.write([]byte(magic))
	h.Format = Format
	return a, a.Put(Header, h)
}

func (a *Writer) write(p []byte) {
	if a.err == nil {
		a.sum.Write(p)
		_, a.err = a.w.Write(p)
	}
}

// Put writes a message as a frame.
func (a *Writer) Put(k Kind, m proto.Message) error {
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return err
	}
	return a.PutBytes(k, body)
}

// PutBytes writes a frame.
func (a *Writer) PutBytes(k Kind, body []byte) error {
	if len(body) > maxFrame {
		return fault.New(fault.Invalid, "archive_frame", "a frame of %d bytes is over %d", len(body), maxFrame)
	}
	head := binary.AppendUvarint([]byte{byte(k)}, uint64(len(body)))
	head = binary.BigEndian.AppendUint32(head, checksum(k, body))
	a.write(head)
	a.write(body)
	return a.err
}

// Content writes what a file holds as Data; holes are left out.
func (a *Writer) Content(ctx context.Context, f io.Reader, size int64) error {
	buf := make([]byte, Piece)
	for at := int64(0); at < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := io.ReadFull(f, buf[:min(int64(len(buf)), size-at)])
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		if !zero(buf[:n]) {
			if err := a.Put(Data, &pb.ArchiveData{Offset: at, Data: buf[:n]}); err != nil {
				return err
			}
		}
		at += int64(n)
	}
	return nil
}

func zero(p []byte) bool { return len(bytes.TrimLeft(p, "\x00")) == 0 }

// Close writes End.
func (a *Writer) Close() error {
	if a.err != nil {
		return a.err
	}
	return a.Put(End, &pb.ArchiveEnd{Sha256: a.sum.Sum(nil)})
}

func checksum(k Kind, body []byte) uint32 {
	return crc32.Update(crc32.Update(0, castagnoli, []byte{byte(k)}), castagnoli, body)
}

// Reader reads frames that Writer wrote. Every failure of it is fault.DataLoss
// "archive_damaged", Unsupported "archive_format", or the source's own.
type Reader struct {
	r    *bufio.Reader
	sum  hash.Hash
	at   int64
	Head *pb.ArchiveHeader
	done bool
}

// NewReader reads the header, and no more.
func NewReader(r io.Reader) (*Reader, error) {
	a := &Reader{r: bufio.NewReaderSize(r, 64<<10), sum: sha256.New(), Head: &pb.ArchiveHeader{}}
	var start [len(magic)]byte
	if err := a.read(start[:]); err != nil || string(start[:]) != magic {
		return nil, a.damaged("it doesn't begin as an archive of a tree does")
	}
	k, body, err := a.Next()
	if err != nil {
		return nil, err
	}
	if k != Header || proto.Unmarshal(body, a.Head) != nil {
		return nil, a.damaged("its first frame is no header")
	}
	if a.Head.Format < 1 || a.Head.Format > Format {
		return nil, fault.New(fault.Unsupported, "archive_format", "the archive has format %d, written by boxwood %q; this one reads formats up to %d",
			a.Head.Format, a.Head.Boxwood, Format).WithHint("use the boxwood that wrote it, or a newer one")
	}
	return a, nil
}

func (a *Reader) damaged(format string, args ...any) error {
	return Damaged(format, args...).WithHint("at byte %d; get the archive again", a.at)
}

// Damaged is the failure of an archive that isn't as it was written.
func Damaged(format string, args ...any) *fault.Error {
	return fault.New(fault.DataLoss, "archive_damaged", "the archive is damaged: "+format, args...)
}

func (a *Reader) read(p []byte) error {
	n, err := io.ReadFull(a.r, p)
	a.at += int64(n)
	a.sum.Write(p[:n])
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return a.damaged("it ends too early, it was cut off")
	}
	return err
}

// ReadByte is for binary.ReadUvarint.
func (a *Reader) ReadByte() (byte, error) {
	var b [1]byte
	err := a.read(b[:])
	return b[0], err
}

// Next gives the next frame; the body is the caller's. After End, which it checks
// against all that was read, it gives io.EOF.
func (a *Reader) Next() (Kind, []byte, error) {
	if a.done {
		return 0, nil, io.EOF
	}
	before := a.sum.Sum(nil)
	k, err := a.ReadByte()
	if err != nil {
		return 0, nil, err
	}
	size, err := a.size()
	if err != nil {
		return 0, nil, err
	}
	var crc [4]byte
	if err := a.read(crc[:]); err != nil {
		return 0, nil, err
	}
	body, err := a.body(size)
	if err != nil {
		return 0, nil, err
	}
	if checksum(Kind(k), body) != binary.BigEndian.Uint32(crc[:]) && !sabotage.On("archive") {
		return 0, nil, a.damaged("the checksum of a frame is wrong")
	}
	if Kind(k) == End {
		return End, body, a.end(body, before)
	}
	return Kind(k), body, nil
}

// size is a frame's length. ReadUvarint has an error of its own for a number that no 64 bits hold.
func (a *Reader) size() (int, error) {
	size, err := binary.ReadUvarint(a)
	var own *fault.Error
	switch {
	case err != nil && !errors.As(err, &own) && !sabotage.On("frames"):
		return 0, a.damaged("a frame's length is no number: %v", err)
	case err != nil:
		return 0, err
	case size > maxFrame && !sabotage.On("frames"):
		return 0, a.damaged("a frame says it has %d bytes", size)
	}
	return int(size), nil
}

// body grows with what is there, not with what a length says.
func (a *Reader) body(size int) ([]byte, error) {
	var out []byte
	for len(out) < size {
		piece := make([]byte, min(size-len(out), 1<<20))
		if err := a.read(piece); err != nil {
			return nil, err
		}
		out = append(out, piece...)
	}
	return out, nil
}

func (a *Reader) end(body, before []byte) error {
	var m pb.ArchiveEnd
	if proto.Unmarshal(body, &m) != nil || !bytes.Equal(m.Sha256, before) && !sabotage.On("archive") {
		return a.damaged("its digest is wrong")
	}
	if _, err := a.r.ReadByte(); err != io.EOF {
		return a.damaged("something follows its end")
	}
	a.done = true
	return nil
}

// StateFile says whether a process state may have a file of this name: one that lies in its
// folder, or in the folder images there.
func StateFile(name string) bool {
	base := strings.TrimPrefix(name, "images/")
	return filepath.IsLocal(base) && filepath.Base(base) == base && base != "images" && base != "." && !strings.ContainsRune(base, 0)
}
