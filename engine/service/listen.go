package service

import (
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// ListenTCP opens a port for as many connections at once as a stranger may have without harm to the daemon; others wait.
func ListenTCP(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fault.New(fault.Invalid, "bad_listen", "listening on %s: %w", address, err)
	}
	return &bounded{Listener: l, slots: make(chan struct{}, maxConnections), closed: make(chan struct{})}, nil
}

// bounded accepts a connection when there is a slot for it.
type bounded struct {
	net.Listener
	slots  chan struct{}
	once   sync.Once
	closed chan struct{}
}

func (b *bounded) Accept() (net.Conn, error) {
	select {
	case b.slots <- struct{}{}:
	case <-b.closed:
		return nil, net.ErrClosed
	}
	conn, err := b.Listener.Accept()
	if err != nil {
		<-b.slots
		return nil, err
	}
	return &slotted{Conn: conn, leave: sync.OnceFunc(func() { <-b.slots })}, nil
}

func (b *bounded) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.Listener.Close()
}

// slotted is a connection that gives its slot back.
type slotted struct {
	net.Conn
	leave func()
}

func (s *slotted) Close() error {
	defer s.leave()
	return s.Conn.Close()
}

// listenMode opens a unix socket that never has wider permissions than mode,
// not even for an instant: it is made inside a private folder and moved out.
func listenMode(path string, mode os.FileMode) (net.Listener, error) {
	private, err := os.MkdirTemp(filepath.Dir(path), ".sock-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(private) }()
	inner := filepath.Join(private, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: inner, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err = os.Chmod(inner, mode); err == nil {
		err = os.Rename(inner, path)
	}
	if err != nil {
		_ = l.Close()
		return nil, err
	}
	return unlinking{l, path}, nil
}

// unlinking removes the socket's name when it is closed.
type unlinking struct {
	net.Listener
	path string
}

func (u unlinking) Close() error {
	_ = os.Remove(u.path)
	return u.Listener.Close()
}
