package archive

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// sample is a small archive with a frame of each kind.
func sample(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := NewWriter(&b, &pb.ArchiveHeader{Boxwood: "test", Tree: &pb.Tree{Id: "tr_1"}})
	steps := []func() error{
		func() error { return err },
		func() error { return w.Put(File, &pb.ArchiveFile{ProcessId: "ps_1", Name: "images/x", Size: 5}) },
		func() error { return w.Content(bytes.NewReader([]byte("image")), 5) },
		func() error { return w.Put(Checkpoint, &pb.ArchiveCheckpoint{Id: "ck_1", Entries: 2}) },
		func() error { return w.Put(Entry, &pb.ArchiveEntry{Mode: unix.S_IFDIR | 0o755}) },
		func() error { return w.Put(Entry, &pb.ArchiveEntry{Path: []byte("f"), Mode: unix.S_IFREG, Size: 3}) },
		func() error { return w.Content(bytes.NewReader([]byte("abc")), 3) },
		func() error { return w.PutBytes(Payload, []byte("payload")) },
		func() error { return w.Put(Node, &pb.ArchiveNode{Node: &pb.Node{Id: "nd_1"}}) },
		func() error { return w.Close() },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func readAll(archive []byte) (kinds string, err error) {
	r, err := NewReader(bytes.NewReader(archive))
	if err != nil {
		return "", err
	}
	for {
		k, _, err := r.Next()
		if err == io.EOF {
			return kinds, nil
		}
		if err != nil {
			return kinds, err
		}
		kinds += string(k)
	}
}

func TestFrames(t *testing.T) {
	if kinds, err := readAll(sample(t)); err != nil || kinds != "FDCEEDPNZ" {
		t.Fatalf("read %q, %v", kinds, err)
	}
}

// Every prefix of an archive and every changed byte of it is an error, and never
// taken for an end.
func TestEveryDamageIsSeen(t *testing.T) {
	good := sample(t)
	for i := range good {
		if _, err := readAll(good[:i]); !damage(err) {
			t.Fatalf("cut at %d: %v", i, err)
		}
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			if _, err := readAll(bad); !damage(err) {
				t.Fatalf("bit %d of byte %d: %v", bit, i, err)
			}
		}
	}
	if _, err := readAll(append(bytes.Clone(good), 0)); !damage(err) {
		t.Fatalf("a byte more: %v", err)
	}
}

func damage(err error) bool {
	return fault.Is(err, fault.DataLoss) || fault.Is(err, fault.Unsupported)
}

// A newer format is refused by name.
func TestNewerFormat(t *testing.T) {
	var b bytes.Buffer
	h := &pb.ArchiveHeader{}
	w, err := NewWriter(&b, h)
	if err != nil {
		t.Fatal(err)
	}
	b.Reset()
	b.WriteString(magic)
	h.Format = Format + 1
	if err := w.Put(Header, h); err != nil {
		t.Fatal(err)
	}
	if _, err := NewReader(&b); fault.As(err).Reason != "archive_format" {
		t.Fatalf("a newer format: %v", err)
	}
}

// What was written in an older format is read.
func TestOlderFormats(t *testing.T) {
	old, err := os.ReadFile("testdata/format1.tree")
	if err != nil {
		t.Fatal(err)
	}
	if kinds, err := readAll(old); err != nil || kinds != "CEEDPNZ" {
		t.Fatalf("format 1: %q, %v", kinds, err)
	}
}

func FuzzReader(f *testing.F) {
	f.Add(sample(f))
	if old, err := os.ReadFile("testdata/format1.tree"); err == nil {
		f.Add(old)
	}
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, archive []byte) {
		kinds, err := readAll(archive)
		if err == nil && (len(kinds) == 0 || kinds[len(kinds)-1] != byte(End)) {
			t.Fatalf("an archive without an end was read: %q", kinds)
		}
		if err != nil && !damage(err) {
			t.Fatalf("neither damage nor an unknown format: %v", err)
		}
	})
}

// A file of a process state lies in its folder or in the one of images, whatever an
// archive calls it.
func FuzzStateFile(f *testing.F) {
	for name, want := range map[string]bool{"sums": true, "witness.json": true, "images/core-1.img": true, "images": false, "images/": false, "../x": false,
		"images/../x": false, "images/a/b": false, "images//x": false, "": false, ".": false, "..": false, "images/.": false, "images/..": false, "images/images": false,
		"/x": false, "a\x00": false} {
		if StateFile(name) != want {
			f.Errorf("%q: %v", name, !want)
		}
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if at := filepath.Join("/v/id", name); StateFile(name) && (filepath.Dir(at) != "/v/id" && filepath.Dir(at) != "/v/id/images" || at == "/v/id/images") {
			t.Errorf("a process state may have %q", name)
		}
	})
}

// FuzzEntries lays hostile entries, with checksums that are right, over a folder: what
// lies beside it stays as it is, and what is taken is what a walk finds.
func FuzzEntries(f *testing.F) {
	testenv.Require(f, testenv.Root)
	entry := func(e *pb.ArchiveEntry) []byte {
		b, err := proto.Marshal(e)
		if err != nil {
			f.Fatal(err)
		}
		return append([]byte{byte(len(b))}, b...)
	}
	root := entry(&pb.ArchiveEntry{Mode: unix.S_IFDIR | 0o755})
	for _, e := range []*pb.ArchiveEntry{
		{Path: []byte("d"), Mode: unix.S_IFDIR | 0o700}, {Path: []byte("../x"), Mode: unix.S_IFDIR}, {Path: []byte("l"), Mode: unix.S_IFLNK | 0o777, Target: []byte("/")},
		{Path: []byte("l/x"), Mode: unix.S_IFIFO}, {Path: []byte("w"), Mode: unix.S_IFCHR}, {Path: []byte("/etc"), Mode: unix.S_IFDIR},
		{Path: []byte("a/../../x"), Mode: unix.S_IFDIR}, {Path: []byte("h"), Mode: unix.S_IFIFO, Link: []byte("w")}, {Path: []byte("b"), Mode: unix.S_IFBLK},
		{Path: []byte("x"), Mode: unix.S_IFDIR, Attributes: []*pb.ArchiveEntry_Attribute{{Name: "user.a", Value: []byte("b")}}},
	} {
		f.Add(append(bytes.Clone(root), entry(e)...))
	}
	f.Add(append(append(bytes.Clone(root), entry(&pb.ArchiveEntry{Path: []byte("l"), Mode: unix.S_IFLNK | 0o777, Target: []byte("..")})...),
		entry(&pb.ArchiveEntry{Path: []byte("l/x"), Mode: unix.S_IFDIR})...))
	f.Fuzz(func(t *testing.T, in []byte) {
		outer := t.TempDir()
		dir := filepath.Join(outer, "upper")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		l := NewLayer(dir, NewManifest())
		for len(in) > 0 {
			n := min(int(in[0]), len(in)-1)
			e := &pb.ArchiveEntry{}
			if proto.Unmarshal(in[1:1+n], e) != nil {
				break
			}
			in = in[1+n:]
			file, err := l.Put(e)
			if err != nil {
				break
			}
			if file != nil && l.Fill(file, e) != nil {
				break
			}
		}
		if err := l.Close(); err == nil {
			if err := l.Same(); err != nil && len(l.Now().Entries) > 0 && !errors.Is(err, os.ErrNotExist) && !damage(err) {
				t.Fatal(err)
			}
		}
		entries, err := os.ReadDir(outer)
		if err != nil || len(entries) != 1 || entries[0].Name() != "upper" {
			t.Fatalf("beside the folder lies %v, %v", entries, err)
		}
	})
}
