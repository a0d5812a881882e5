package service

import (
	"net"
	"os"
	"path/filepath"
)

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
