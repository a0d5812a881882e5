package box

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Who doesn't read doesn't hold up who writes for ever, and one that is slow is waited for.
func TestAWireThatNobodyReads(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[1])
	w, err := newWire(pair[0])
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	w.writeLimit = 100 * time.Millisecond
	part := make([]byte, chunk)
	packets := 0
	for err == nil {
		if packets++; packets > 10_000 {
			t.Fatal("10,000 packets that nobody reads fit")
		}
		err = w.sendAs(1, opStdin, more, part)
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("after %d packets: %v", packets, err)
	}
	w.writeLimit = 20 * time.Second
	read := make(chan error, 1)
	go func() {
		buf := make([]byte, headSize+chunk)
		for range packets - 1 {
			if _, err := unix.Read(pair[1], buf); err != nil {
				read <- err
				return
			}
		}
		read <- nil
	}()
	if err := w.sendAs(1, opStdin, 0, part); err != nil {
		t.Errorf("to one that reads again: %v", err)
	}
	if err := <-read; err != nil {
		t.Error(err)
	}
}
