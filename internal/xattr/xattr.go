// Package xattr reads the extended attributes of a path, without following it if it is a
// symlink, or of what a descriptor stands for, which may be one that only names it (O_PATH).
package xattr

import (
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const largest = 64 << 10 // the kernel's bound, for a list as for a value

// List names the attributes of a path, in no order. A file system that has none gives none.
func List(path string) ([]string, error) {
	names, err := list(unix.Llistxattr, path)
	if err != nil {
		return nil, &os.PathError{Op: "listxattr", Path: path, Err: err}
	}
	return names, nil
}

// Get reads one attribute of a path.
func Get(path, name string) ([]byte, error) {
	value, err := get(unix.Lgetxattr, path, name)
	if err != nil {
		return nil, &os.PathError{Op: "getxattr " + name, Path: path, Err: err}
	}
	return value, nil
}

// ListFD names the attributes of what a descriptor stands for, in no order.
func ListFD(fd int) ([]string, error) { return list(unix.Listxattr, self(fd)) }

// GetFD reads one attribute of what a descriptor stands for.
func GetFD(fd int, name string) ([]byte, error) { return get(unix.Getxattr, self(fd), name) }

// self follows to what fd stands for: the calls by descriptor refuse O_PATH.
func self(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

func list(call func(string, []byte) (int, error), path string) ([]string, error) {
	buf := make([]byte, largest)
	n, err := call(path, buf)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return strings.FieldsFunc(string(buf[:n]), func(r rune) bool { return r == 0 }), nil
}

func get(call func(string, string, []byte) (int, error), path, name string) ([]byte, error) {
	buf := make([]byte, largest)
	n, err := call(path, name, buf)
	if err != nil {
		return nil, err
	}
	return buf[:n], nil
}
