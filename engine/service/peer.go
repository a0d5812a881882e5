package service

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// client is who is at the other end of a unix socket, as the kernel knows it: it was so when he connected.
type client struct {
	credentials.CommonAuthInfo
	uid, pid int
	name     string // of the account, if it is held to one
	*refusals
}

func (client) AuthType() string { return "SO_PEERCRED" }

// nobody is the client of a connection that the kernel says nothing of.
var nobody = client{uid: -1, pid: -1}

func clientOf(ctx context.Context) client {
	if p, ok := peer.FromContext(ctx); ok {
		if c, ok := p.AuthInfo.(client); ok {
			return c
		}
	}
	return nobody
}

// peerCredentials asks the kernel, and the connection nothing.
type peerCredentials struct{}

func (peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, err := askKernel(conn)
	if err != nil {
		return nil, nil, fmt.Errorf("asking who has connected: %w", err)
	}
	c.refusals = &refusals{conn: conn}
	return conn, c, nil
}

// overTLS is a connection on TCP.
type overTLS struct {
	credentials.TLSInfo
	*refusals
}

// tlsCredentials are those of TLS, of a connection that ends after so many refusals.
type tlsCredentials struct {
	credentials.TransportCredentials
}

func (c tlsCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	t, ok := info.(credentials.TLSInfo)
	if !ok {
		return nil, nil, fmt.Errorf("a handshake that came to a %T", info)
	}
	return conn, overTLS{t, &refusals{conn: raw}}, nil
}

func (c tlsCredentials) Clone() credentials.TransportCredentials {
	return tlsCredentials{c.TransportCredentials.Clone()}
}

// refusals counts the calls of a connection that were refused for want of an account. Each costs the server some memory until
// the connection ends.
type refusals struct {
	conn net.Conn
	n    atomic.Int32
}

const maxRefusals = 100

func (r *refusals) refuse() {
	if r.n.Add(1) >= maxRefusals {
		_ = r.conn.Close()
	}
}

func askKernel(conn net.Conn) (client, error) {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return nobody, fmt.Errorf("a connection of %T", conn)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nobody, err
	}
	var cred *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) { cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nobody, err
	}
	if failed != nil {
		return nobody, failed
	}
	return client{uid: int(cred.Uid), pid: int(cred.Pid)}, nil
}

func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, fmt.Errorf("these are a server's")
}
func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "SO_PEERCRED"}
}
func (p peerCredentials) Clone() credentials.TransportCredentials { return p }
func (peerCredentials) OverrideServerName(string) error           { return nil }

// Imports are folders of the host that clients other than root may have images read from. The daemon reads as root, so
// that nobody else may be able to write there: he could put a link to what he may not read.
type Imports []string

// Check refuses what others could write to.
func (i Imports) Check() error {
	for _, dir := range i {
		bad := func(format string, args ...any) error {
			return fault.New(fault.Invalid, "bad_import_folder", "%.4096s can't be imported from: "+format, append([]any{dir}, args...)...)
		}
		if !filepath.IsAbs(dir) {
			return bad("it must be an absolute path of a folder that is root's, and that nobody else can write to")
		}
		for at := filepath.Clean(dir); ; at = filepath.Dir(at) {
			var st unix.Stat_t
			if err := unix.Lstat(at, &st); err != nil {
				return bad("%w", err)
			}
			others := st.Uid != 0 || st.Mode&0o022 != 0
			if at != filepath.Clean(dir) && st.Uid == 0 && st.Mode&unix.S_ISVTX != 0 {
				others = false // in a folder like /tmp nobody moves what is root's
			}
			if others || st.Mode&unix.S_IFMT != unix.S_IFDIR {
				return bad("%s must be a folder, not a link to one, that is root's, and that nobody else can write to", at)
			}
			if at == "/" {
				break
			}
		}
	}
	return nil
}

// open gives a path that leads to what a client names, whatever becomes of links on the way, and to nothing else. done
// ends that.
func (i Imports) open(c client, path string) (opened string, done func(), err error) {
	if c.uid == 0 {
		return path, func() {}, nil
	}
	denied := fault.New(fault.Denied, "import_denied", "images can be imported by root, or from these folders: %s", strings.Join(i, ", ")).
		WithHint("an administrator allows more: boxwood serve --import-from FOLDER")
	for _, dir := range i {
		below, ok := strings.CutPrefix(filepath.Clean(path)+"/", filepath.Clean(dir)+"/")
		if !ok {
			continue
		}
		top, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", nil, fmt.Errorf("opening %s: %w", dir, err)
		}
		how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
		fd, err := unix.Openat2(top, "./"+strings.TrimSuffix(below, "/"), &how)
		unix.Close(top)
		if err == unix.ENOENT {
			return "", nil, fault.New(fault.NotFound, "no_file", "there is no %s", path)
		}
		if err != nil {
			return "", nil, denied
		}
		f := os.NewFile(uintptr(fd), path)
		opened = fmt.Sprintf("/proc/self/fd/%d", fd)
		if st, err := f.Stat(); err == nil && st.IsDir() {
			opened += "/." // the folder, not the link to it
		}
		return opened, func() { f.Close() }, nil
	}
	return "", nil, denied
}
