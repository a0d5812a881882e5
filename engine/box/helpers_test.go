package box

import (
	"archive/tar"
	"io"
	"testing"

	"golang.org/x/sys/unix"
)

func newTarDiscard() *tar.Writer { return tar.NewWriter(io.Discard) }

func ownerOf(t *testing.T, path string) uint32 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return st.Uid
}

func makeWhiteout(t *testing.T, path string) {
	t.Helper()
	if err := unix.Mknod(path, unix.S_IFCHR, 0); err != nil {
		t.Fatal(err)
	}
}
