package box

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// The wire is described in init/wire.h, which must agree with this.

// A box outlives its daemon, so that the next one may be of another release. wireNow is raised whenever a daemon and a
// pid 1 of before and after would misunderstand each other, and wireOldest when this daemon no longer speaks
// what it spoke before. A box of another version is not adopted: it is swept away, and its nodes stay.
//
//	1  records of boxes say no version
//	2  they do
//	3  the daemon interrupts sessions itself, and keys are typed as they are wanted
const (
	wireNow    = 3
	wireOldest = 1
)

type op uint16

const (
	opSpawn op = 1 + iota
	opAttach
	opExec
	opStdin
	opLeaf
	opHello
	opOpen
	opAttend
	opLeave
	opType
	_ // was a signal for a session
	opSessions
	opPart
	opListen
	opGuard
	opLimit
)

type kind uint16

const (
	replySpawned kind = 1 + iota
	replyStaged
	replyReady
	replyError
	replyStdout
	replyStderr
	replyWant
	replyExit
	replyHello
	replyDone
	replyOpened
	replyHeard
	replyLeft
	replySessions
)

const (
	headSize   = 8
	chunk      = 128 << 10 // the largest body of a packet
	requestMax = 4 << 20   // the largest request over all its parts
	wordsMax   = 1 << 18   // arguments and variables of one command
	more       = 1         // flag: another part follows
	fdsMax     = 8
)

// message is one reply. Its body is valid until the next receive.
type message struct {
	id   uint32
	kind kind
	body []byte
	fds  []int
}

func (m message) closeFDs() {
	for _, fd := range m.fds {
		unix.Close(fd)
	}
}

var errProtocol = errors.New("malformed message from pid 1")

// wire is a connection to the nursery or to a pid 1. One goroutine at a time
// uses it, except for Close and SetReadDeadline.
//
// The other side reads within writeLimit, or is taken for stuck: a pid 1 does nothing that blocks.
type wire struct {
	f          *os.File
	last       uint32
	writeLimit time.Duration
}

func newWire(fd int) (*wire, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &wire{f: os.NewFile(uintptr(fd), "box"), writeLimit: stepLimit}, nil
}

func (w *wire) Close() error                      { return w.f.Close() }
func (w *wire) SetReadDeadline(t time.Time) error { return w.f.SetReadDeadline(t) }
func header(id uint32, o op, flags uint16) []byte { return appendHeader(nil, id, o, flags) }
func appendHeader(b []byte, id uint32, o op, flags uint16) []byte {
	b = binary.LittleEndian.AppendUint32(b, id)
	b = binary.LittleEndian.AppendUint16(b, uint16(o))
	return binary.LittleEndian.AppendUint16(b, flags)
}

// send sends a request with a fresh id, in parts if it is large.
func (w *wire) send(o op, body []byte, fds ...int) (uint32, error) {
	w.last++
	return w.last, w.sendAs(w.last, o, 0, body, fds...)
}

func (w *wire) sendAs(id uint32, o op, flags uint16, body []byte, fds ...int) error {
	if len(body) > requestMax {
		return fmt.Errorf("a request of %d bytes: %w", len(body), unix.E2BIG)
	}
	for len(body) > chunk {
		if err := w.packet(header(id, o, more), body[:chunk], nil); err != nil {
			return err
		}
		body = body[chunk:]
	}
	return w.packet(header(id, o, flags), body, fds)
}

func (w *wire) packet(head, body []byte, fds []int) error {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	rc, err := w.f.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	waits := false
	err = rc.Write(func(fd uintptr) bool {
		_, serr = unix.SendmsgBuffers(int(fd), [][]byte{head, body}, rights, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		if serr == unix.EAGAIN && !waits {
			waits = w.f.SetWriteDeadline(time.Now().Add(w.writeLimit)) == nil
		}
		return serr != unix.EAGAIN
	})
	if waits {
		w.f.SetWriteDeadline(time.Time{})
	}
	if err != nil {
		return err
	}
	return serr
}

// receive reads one reply into buf. The end of the connection is io.EOF, the
// read deadline os.ErrDeadlineExceeded.
func (w *wire) receive(buf []byte) (message, error) {
	var control [128]byte
	rc, err := w.f.SyscallConn()
	if err != nil {
		return message{}, err
	}
	var n, cn, flags int
	var serr error
	err = rc.Read(func(fd uintptr) bool {
		for serr = unix.EINTR; serr == unix.EINTR; {
			n, cn, flags, _, serr = unix.Recvmsg(int(fd), buf, control[:], unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		}
		return serr != unix.EAGAIN
	})
	switch {
	case err != nil:
		return message{}, err
	case serr == unix.ECONNRESET || serr == nil && n == 0:
		return message{}, io.EOF
	case serr != nil:
		return message{}, serr
	}
	m := message{}
	if cn > 0 {
		if m.fds, err = parseFDs(control[:cn]); err != nil {
			return message{}, err
		}
	}
	if n < headSize || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		m.closeFDs()
		return message{}, errProtocol
	}
	m.id = binary.LittleEndian.Uint32(buf)
	m.kind = kind(binary.LittleEndian.Uint16(buf[4:]))
	m.body = buf[headSize:n]
	return m, nil
}

// parseFDs takes descriptors out of a control message. A box can send some, too:
// they are closed by whoever doesn't expect them.
func parseFDs(control []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, errProtocol
	}
	var fds []int
	for i := range messages {
		if messages[i].Header.Level == unix.SOL_SOCKET && messages[i].Header.Type == unix.SCM_RIGHTS {
			got, err := unix.ParseUnixRights(&messages[i])
			if err != nil {
				return nil, errProtocol
			}
			fds = append(fds, got...)
		}
	}
	return fds, nil
}

// expect receives one reply of a kind to request id, with n descriptors. An
// error that the other side reports is returned as remoteError.
func (w *wire) expect(buf []byte, id uint32, want kind, n int) (message, error) {
	m, err := w.receive(buf)
	if err != nil {
		return m, err
	}
	switch {
	case m.kind == replyError && len(m.fds) == 0 && (m.id == id || m.id == 0):
		return m, remoteError(m.body)
	case m.id != id || m.kind != want || len(m.fds) != n:
		m.closeFDs()
		return m, errProtocol
	}
	return m, nil
}

// remoteError is what the other side says of its own failure.
type remoteError string

func (e remoteError) Error() string { return printable(string(e)) }

// printable makes one short line of text that came from a box.
func printable(s string) string {
	b := []byte(s[:min(len(s), 512)])
	for i, c := range b {
		if c < ' ' || c > '~' {
			b[i] = '?'
		}
	}
	return string(b)
}
