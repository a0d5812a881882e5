package box

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// hostile is run inside a box: it tries to be pid 1's daemon.
func hostile() int {
	try := func(name string) string {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err.Error()
		}
		defer unix.Close(fd)
		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: name}); err != nil {
			return err.Error()
		}
		if err := unix.Send(fd, header(1, opHello, 0), unix.MSG_NOSIGNAL); err != nil {
			return "sending: " + err.Error()
		}
		buf := make([]byte, 64)
		n, err := unix.Read(fd, buf)
		return fmt.Sprintf("connected: %d bytes, %v", n, err)
	}
	fmt.Println(try("/run/box/init.sock"))
	return 0
}

// installSelf puts the test program into a box as /tmp/hostile.
func installSelf(t *testing.T, b *box) {
	t.Helper()
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := b.WriteFile(context.Background(), "/tmp/hostile", self, 0o755, false); err != nil {
		t.Fatal(err)
	}
}

func TestHostileClientIsRefused(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h, nesting)
	installSelf(t, b)
	env := []string{"PATH=/bin", "BOXWOOD_TEST_HOSTILE=1"}
	if r := run(t, b, Command{Argv: []string{"/tmp/hostile"}, Env: env}); r.out != "permission denied\n" {
		t.Errorf("root of the box: %q, %q", r.out, r.err)
	}
	// Were the socket open to it, the peer's pid would give it away, also from a
	// pid namespace of its own, and also while no daemon is connected.
	sock := filepath.Join(h.controlDir(b.rec.Slot), "init.sock")
	if err := os.Chmod(sock, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, argv := range [][]string{{"/tmp/hostile"}, {"unshare", "-Urpf", "/tmp/hostile"}} {
		r := run(t, b, Command{Argv: argv, Env: env})
		if r.out != "connected: 0 bytes, <nil>\n" && !strings.Contains(r.out, "reset") && !strings.HasPrefix(r.out, "sending: broken pipe") {
			t.Errorf("%q: %q, %q", argv, r.out, r.err)
		}
	}
	if got := must(t, b, "rm -f /run/box/init.sock /run/box/x; echo >/run/box/x; echo fine"); got != "fine" {
		t.Error(got)
	}
	if _, err := os.Stat(sock); err != nil {
		t.Errorf("the box removed its socket: %v", err)
	}
	if _, err := os.Stat(filepath.Join(h.controlDir(b.rec.Slot), "x")); err == nil {
		t.Error("the box wrote into its control folder")
	}
	// A second daemon waits while there is one: pid 1 reads nothing from it.
	w, err := dial(h.controlDir(b.rec.Slot))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.send(opHello, nil); err != nil {
		t.Fatal(err)
	}
	must(t, b, "echo pid 1 has been round its loop")
	var buf [64]byte
	w.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if m, err := w.receive(buf[:]); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a second daemon got %+v, %v", m, err)
	}
	if must(t, b, "echo fine") != "fine" {
		t.Error("the first daemon lost its box")
	}
}

// fakeBox is a box whose pid 1 is the test, to see what the daemon makes of
// malformed replies.
func FuzzReplies(f *testing.F) {
	f.Add(uint32(1), uint16(replyExit), make([]byte, 24))
	f.Add(uint32(1), uint16(replyExit), []byte{1})
	f.Add(uint32(1), uint16(replyStdout), []byte("x"))
	f.Add(uint32(2), uint16(replyWant), []byte(nil))
	f.Add(uint32(1), uint16(99), []byte("text\x00\xff"))
	f.Fuzz(func(t *testing.T, id uint32, k uint16, body []byte) {
		out := 0
		r := &running{b: &box{}, id: 1, job: job{stdout: func(p []byte) error { out += len(p); return nil }, stderr: func(p []byte) error { return nil }}}
		over, err := r.handle(message{id: id, kind: kind(k), body: body}, make([]byte, headSize+chunk))
		if id != 1 && err == nil {
			t.Error("a reply to something else was taken")
		}
		if kind(k) == replyExit && over && err == nil && (r.exit.Code < -1 || r.exit.Code > 255) {
			t.Errorf("exit %+v", r.exit)
		}
	})
}

func FuzzPacker(f *testing.F) {
	record := make([]byte, recordSize)
	f.Add(record, 7)
	record[0], record[16], record[32] = 'f', 3, 2
	f.Add(append(record, "abcxy"...), 3)
	f.Fuzz(func(t *testing.T, stream []byte, step int) {
		p := &packer{tar: newTarDiscard()}
		for step = max(1, step%100); len(stream) > 0; {
			n := min(step, len(stream))
			if p.take(stream[:n]) != nil {
				return
			}
			stream = stream[n:]
			if len(p.held) > recordSize+2*pathMax {
				t.Fatalf("%d bytes are held", len(p.held))
			}
		}
	})
}

func TestRecordsThatAreNone(t *testing.T) {
	h := openHost(t)
	for _, text := range []string{"", "{}", `{"slot":-1,"pid":5}`, `{"slot":1,"pid":1}`, `{"slot":99999999,"pid":5}`, "\xff"} {
		if _, err := h.Adopt(context.Background(), []byte(text)); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", text, err)
		}
	}
	other, _ := json.Marshal(record{Slot: 3, PID: os.Getpid(), Start: 1})
	if _, err := h.Adopt(context.Background(), other); !fault.Is(err, fault.NotFound) {
		t.Errorf("a pid that is another process now: %v", err)
	}
}
