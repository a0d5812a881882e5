package witness

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// HalfClosed lists the names of unix stream sockets around pid1, a host pid, that were accepted and
// whose other end is closed. CRIU makes such a socket again without its name. Most are about to be
// closed, by a server whose client has just gone.
func HalfClosed(pid1 int) (names []string, err error) {
	err = inside(pid1, "net", func() (err error) {
		names, err = halfClosedHere()
		return err
	})
	return names, err
}

// From linux/unix_diag.h and linux/sock_diag.h.
const (
	sockDiagByFamily = 20
	established      = 1
	showName         = 0x1
	showPeer         = 0x4
	diagName         = 0
	diagPeer         = 2
	diagHeader       = 16 // struct unix_diag_msg
)

func halfClosedHere() (names []string, err error) {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("asking for sockets: %w", err)
	}
	defer unix.Close(s)
	const size = unix.SizeofNlMsghdr + 24 // struct unix_diag_req
	req := make([]byte, size)
	binary.NativeEndian.PutUint32(req, size)
	binary.NativeEndian.PutUint16(req[4:], sockDiagByFamily)
	binary.NativeEndian.PutUint16(req[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	req[16] = unix.AF_UNIX
	binary.NativeEndian.PutUint32(req[20:], 1<<established)
	binary.NativeEndian.PutUint32(req[28:], showName|showPeer)
	if err := unix.Sendto(s, req, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("asking for sockets: %w", err)
	}
	buf := make([]byte, 64<<10)
	for {
		n, _, err := unix.Recvfrom(s, buf, 0)
		if err != nil {
			return nil, fmt.Errorf("asking for sockets: %w", err)
		}
		for b := buf[:n]; len(b) >= unix.SizeofNlMsghdr; {
			length, kind := int(binary.NativeEndian.Uint32(b)), binary.NativeEndian.Uint16(b[4:])
			if length < unix.SizeofNlMsghdr || length > len(b) {
				return nil, errors.New("asking for sockets: an answer of a wrong length")
			}
			body := b[unix.SizeofNlMsghdr:length]
			switch kind {
			case unix.NLMSG_DONE:
				return names, nil
			case unix.NLMSG_ERROR:
				if len(body) < 4 {
					return nil, errors.New("asking for sockets: an answer of a wrong length")
				}
				errno := unix.Errno(-int32(binary.NativeEndian.Uint32(body)))
				if errno == unix.ENOENT { // a kernel that can't say
					return nil, nil
				}
				return nil, fmt.Errorf("asking for sockets: %w", os.NewSyscallError("sock_diag", errno))
			case sockDiagByFamily:
				if name, ok := halfClosed(body); ok {
					names = append(names, name)
				}
			}
			b = b[min(len(b), (length+3)&^3):]
		}
	}
}

// halfClosed reads one answer: a header (family, type, state, ...) and attributes.
func halfClosed(b []byte) (name string, yes bool) {
	if len(b) < diagHeader || b[1] != unix.SOCK_STREAM && b[1] != unix.SOCK_SEQPACKET {
		return "", false
	}
	peer := uint32(0)
	for b = b[diagHeader:]; len(b) >= unix.SizeofNlAttr; {
		length, kind := int(binary.NativeEndian.Uint16(b)), binary.NativeEndian.Uint16(b[2:])
		if length < unix.SizeofNlAttr || length > len(b) {
			break
		}
		value := b[unix.SizeofNlAttr:length]
		switch {
		case kind == diagName:
			name = strings.TrimRight(string(value), "\x00")
		case kind == diagPeer && len(value) >= 4:
			peer = binary.NativeEndian.Uint32(value)
		}
		b = b[min(len(b), (length+3)&^3):]
	}
	return name, peer == 0 && name != "" && filepath.Base(name) != "init.sock"
}
