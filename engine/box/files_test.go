package box

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

func TestReadAndWriteFile(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	ctx := context.Background()
	data := bytes.Repeat([]byte{0, 1, 0xff, '\n'}, 1<<20) // 4 MiB
	if err := b.WriteFile(ctx, "/tmp/f", data, 0o751, false); err != nil {
		t.Fatal(err)
	}
	got, size, mode, err := b.ReadFile(ctx, "/tmp/f", 0, int64(len(data)))
	if err != nil || !bytes.Equal(got, data) || size != int64(len(data)) || mode != 0o751 {
		t.Errorf("%d bytes of %d, mode %o, %v", len(got), size, mode, err)
	}
	if err := b.WriteFile(ctx, "/tmp/f", []byte("end"), 0o751, true); err != nil {
		t.Fatal(err)
	}
	if got, size, _, err := b.ReadFile(ctx, "/tmp/f", int64(len(data))-1, 3); err != nil || string(got) != "\nen" || size != int64(len(data))+3 {
		t.Errorf("part: %q of %d, %v", got, size, err)
	}
	if got, _, _, err := b.ReadFile(ctx, "/tmp/f", 1<<40, 10); err != nil || len(got) != 0 {
		t.Errorf("behind the end: %q, %v", got, err)
	}
	if err := b.WriteFile(ctx, "/tmp/empty", nil, 0, false); err != nil || must(t, b, "stat -c %s-%a /tmp/empty") != "0-644" {
		t.Errorf("an empty file: %v", err)
	}
	must(t, b, "mkfifo /tmp/fifo; ln -s /tmp/f /tmp/link; ln -s loop /tmp/loop")
	if got, _, _, err := b.ReadFile(ctx, "/tmp/link", 0, 2); err != nil || len(got) != 2 {
		t.Errorf("through a link: %v", err)
	}
	for _, c := range []struct {
		name string
		kind fault.Kind
		err  error
	}{
		{"missing", fault.NotFound, func() error { _, _, _, err := b.ReadFile(ctx, "/tmp/missing", 0, 1); return err }()},
		{"folder", fault.Invalid, func() error { _, _, _, err := b.ReadFile(ctx, "/tmp", 0, 1); return err }()},
		{"fifo", fault.Invalid, func() error { _, _, _, err := b.ReadFile(ctx, "/tmp/fifo", 0, 1); return err }()},
		{"loop", fault.Invalid, func() error { _, _, _, err := b.ReadFile(ctx, "/tmp/loop", 0, 1); return err }()},
		{"relative", fault.Invalid, func() error { _, _, _, err := b.ReadFile(ctx, "tmp/f", 0, 1); return err }()},
		{"negative", fault.Invalid, func() error { _, _, _, err := b.ReadFile(ctx, "/tmp/f", -1, 1); return err }()},
		{"write to fifo", fault.Invalid, b.WriteFile(ctx, "/tmp/fifo", []byte("x"), 0, false)},
		{"write to folder", fault.Invalid, b.WriteFile(ctx, "/tmp", nil, 0, false)},
		{"write into nothing", fault.NotFound, b.WriteFile(ctx, "/no/such/file", nil, 0, false)},
		{"write read-only", fault.Denied, b.WriteFile(ctx, "/etc/machine-id", []byte("x"), 0, false)},
		{"bad mode", fault.Invalid, b.WriteFile(ctx, "/tmp/f", nil, 0o70000, false)},
	} {
		if !fault.Is(c.err, c.kind) {
			t.Errorf("%s: %v", c.name, c.err)
		}
	}
}

func tarOf(t *testing.T, entries ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range entries {
		content := h.Xattrs["content"] //nolint:staticcheck // a place for it in the table
		h.Xattrs = nil
		h.Size = int64(len(content))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, content)
	}
	w.Close()
	return buf.Bytes()
}

func content(s string) map[string]string { return map[string]string{"content": s} }

func TestUnpackAndPack(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	ctx := context.Background()
	when := time.Unix(1_000_000_000, 0)
	big := strings.Repeat("0123456789", 100_000)
	archive := tarOf(t,
		tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755, ModTime: when},
		tar.Header{Typeflag: tar.TypeDir, Name: "d/", Mode: 0o750, Uid: 1000, Gid: 50, ModTime: when},
		tar.Header{Typeflag: tar.TypeReg, Name: "d/big", Mode: 0o640, Uid: 1000, ModTime: when, Xattrs: content(big)},
		tar.Header{Typeflag: tar.TypeReg, Name: "new/parents/setuid", Mode: 0o4755, ModTime: when, Xattrs: content("x")},
		tar.Header{Typeflag: tar.TypeSymlink, Name: "d/link", Linkname: "/etc/passwd", ModTime: when},
		tar.Header{Typeflag: tar.TypeLink, Name: "hard", Linkname: "d/big", ModTime: when},
		tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o600, ModTime: when},
		tar.Header{Typeflag: tar.TypeReg, Name: "empty", Mode: 0o600, ModTime: when},
	)
	entries, size, err := b.Unpack(ctx, "/srv/into", bytes.NewReader(archive))
	if err != nil || entries != 8 || size != int64(len(big)+1) {
		t.Fatalf("%d entries, %d bytes, %v", entries, size, err)
	}
	got := must(t, b, "cd /srv/into && stat -c '%n %F %a %u:%g %s %h %Y' d d/big d/link new/parents/setuid hard fifo empty && readlink d/link")
	want := `d directory 750 1000:50 4096 1 S
d/big regular file 640 1000:0 1000000 2 1000000000
d/link symbolic link 777 0:0 11 1 1000000000
new/parents/setuid regular file 4755 0:0 1 1 1000000000
hard regular file 640 1000:0 1000000 2 1000000000
fifo fifo 600 0:0 0 1 1000000000
empty regular empty file 600 0:0 0 1 1000000000
/etc/passwd`
	lines := strings.SplitN(got, "\n", 2)
	if !strings.HasPrefix(lines[0], "d directory 750 1000:50 ") || lines[1] != strings.SplitN(want, "\n", 2)[1] {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if _, _, err := b.Unpack(ctx, "/srv/into", bytes.NewReader(archive)); err != nil {
		t.Errorf("once more over it: %v", err)
	}
	var packed bytes.Buffer
	if err := b.Pack(ctx, "/srv/into", &packed); err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	for r := tar.NewReader(&packed); ; {
		e, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		n, _ := io.Copy(io.Discard, r)
		seen[e.Name] = fmt.Sprintf("%c %o %d:%d %d %s", e.Typeflag, e.Mode, e.Uid, e.Gid, n, e.Linkname)
	}
	for name, want := range map[string]string{
		"into/": "5 755 0:0 0 ", "into/d/big": "0 640 1000:0 1000000 ", "into/d/link": "2 777 0:0 0 /etc/passwd",
		"into/new/parents/setuid": "0 4755 0:0 1 ", "into/fifo": "6 600 0:0 0 ", "into/d/": "5 750 1000:50 0 ",
	} {
		if seen[name] != want {
			t.Errorf("%s: got %q, want %q", name, seen[name], want)
		}
	}
	if err := b.Pack(ctx, "/no/such", io.Discard); !fault.Is(err, fault.NotFound) {
		t.Errorf("what isn't there: %v", err)
	}
	if err := b.Pack(ctx, "/srv/into", failingWriter{}); err == nil || !strings.Contains(err.Error(), "no more") {
		t.Errorf("a writer that fails: %v", err)
	}
	if err := b.Pack(ctx, "/etc/passwd", &packed); err != nil {
		t.Errorf("one file: %v", err)
	}
	if must(t, b, "echo fine") != "fine" {
		t.Error("the box is of no use after a failed transfer")
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("no more") }

func TestBadArchives(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	whole := tarOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "a", Mode: 0o600, Xattrs: content(strings.Repeat("x", 300_000))})
	for name, archive := range map[string][]byte{
		"leads out":      tarOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "../x", Mode: 0o600}),
		"links out":      tarOf(t, tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "../../etc/passwd"}),
		"device":         tarOf(t, tar.Header{Typeflag: tar.TypeBlock, Name: "sda", Mode: 0o600, Devmajor: 8}),
		"cut in content": whole[:200_000],
		"cut early":      whole[:1000],
		"garbage":        bytes.Repeat([]byte("garbage!"), 1000),
	} {
		if _, _, err := b.Unpack(context.Background(), "/srv", bytes.NewReader(archive)); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n, _, err := b.Unpack(context.Background(), "/srv", bytes.NewReader(nil)); n != 0 || err != nil {
		t.Errorf("nothing at all: %d, %v", n, err)
	}
}
