package archive

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
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
		func() error { return w.Content(context.Background(), bytes.NewReader([]byte("image")), 5) },
		func() error { return w.Put(Checkpoint, &pb.ArchiveCheckpoint{Id: "ck_1", Entries: 2}) },
		func() error { return w.Put(Entry, &pb.ArchiveEntry{Mode: unix.S_IFDIR | 0o755}) },
		func() error { return w.Put(Entry, &pb.ArchiveEntry{Path: []byte("f"), Mode: unix.S_IFREG, Size: 3}) },
		func() error { return w.Content(context.Background(), bytes.NewReader([]byte("abc")), 3) },
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
	a, err := NewReader(bytes.NewReader(old))
	if err != nil {
		t.Fatal(err)
	}
	// Its sandboxes' programs could gain rights; those of a tree that doesn't say so now can't.
	for format, want := range map[int32]seccomp.Groups{a.Head.Format: seccomp.Setuid, Format: 0} {
		a.Head.Format = format
		if got, err := TreeRecord(a.Head); err != nil || got.Defaults.Limits.Calls != want {
			t.Errorf("format %d allows %q, %v", format, got.Defaults.Limits.Calls, err)
		}
	}
}

// endless counts what is read of it.
type endless struct{ n int }

func (e *endless) Read(p []byte) (int, error) {
	if e.n += len(p); e.n > 64<<20 {
		return 0, io.EOF
	}
	return len(p), nil
}

// A frame says how long it is before it is there. More than a frame may have is damage, before it is read.
func TestLengthsOfFramesAreBounded(t *testing.T) {
	for name, length := range map[string][]byte{
		"one byte too many": binary.AppendUvarint(nil, maxFrame+1), "a large number": binary.AppendUvarint(nil, 1<<62), "no number": bytes.Repeat([]byte{0xff}, 11),
	} {
		rest := &endless{}
		_, err := NewReader(io.MultiReader(strings.NewReader(magic+"H"+string(length)), rest))
		if fault.As(err) == nil || fault.As(err).Reason != "archive_damaged" || rest.n > 1<<20 {
			t.Errorf("%s: %v, when %d bytes behind it had been read", name, err, rest.n)
		}
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

// What is a folder in one checkpoint is a link in the next one: what lies at its end stays as it is.
func TestNothingLeadsOutOfALayer(t *testing.T) {
	testenv.Require(t, testenv.Root)
	dir, pipe := uint32(unix.S_IFDIR|0o755), uint32(unix.S_IFIFO|0o600)
	for _, c := range []struct {
		name string
		was  []*pb.ArchiveEntry
		is   func(outside string) []*pb.ArchiveEntry
	}{
		{"a folder becomes a link", []*pb.ArchiveEntry{{Path: []byte("d"), Mode: dir}, {Path: []byte("d/kept"), Mode: pipe}, {Path: []byte("d/sub"), Mode: dir}, {Path: []byte("d/sub/kept"), Mode: pipe}},
			func(outside string) []*pb.ArchiveEntry {
				return []*pb.ArchiveEntry{{Path: []byte("d"), Mode: unix.S_IFLNK | 0o777, Target: []byte(outside)}}
			}},
		{"a folder becomes a file", []*pb.ArchiveEntry{{Path: []byte("d"), Mode: dir}, {Path: []byte("d/kept"), Mode: pipe}},
			func(string) []*pb.ArchiveEntry { return []*pb.ArchiveEntry{{Path: []byte("d"), Mode: pipe}} }},
		{"a link becomes a folder", []*pb.ArchiveEntry{{Path: []byte("d"), Mode: unix.S_IFLNK | 0o777, Target: []byte("..")}},
			func(string) []*pb.ArchiveEntry {
				return []*pb.ArchiveEntry{{Path: []byte("d"), Mode: dir}, {Path: []byte("d/outside"), Mode: dir}, {Path: []byte("d/outside/new"), Mode: pipe}}
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			top := t.TempDir()
			outside := filepath.Join(top, "outside")
			for _, d := range []string{outside, filepath.Join(outside, "sub"), filepath.Join(top, "upper")} {
				if err := os.Mkdir(d, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			for _, f := range []string{"kept", "sub/kept"} {
				if err := os.WriteFile(filepath.Join(outside, f), []byte("of the host"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			root := &pb.ArchiveEntry{Mode: dir}
			before := laid(t, filepath.Join(top, "upper"), NewManifest(), append([]*pb.ArchiveEntry{root}, c.was...))
			laid(t, filepath.Join(top, "upper"), before, append([]*pb.ArchiveEntry{root}, c.is(outside)...))
			var there []string
			if err := filepath.WalkDir(outside, func(path string, _ os.DirEntry, err error) error {
				there = append(there, strings.TrimPrefix(path, outside))
				return err
			}); err != nil || !slices.Equal(there, []string{"", "/kept", "/sub", "/sub/kept"}) {
				t.Fatalf("beside the folder lies %q, %v", there, err)
			}
		})
	}
}

// laid makes a folder what entries say, from what it is, and gives what it is then.
func laid(t testing.TB, dir string, old *Manifest, entries []*pb.ArchiveEntry) *Manifest {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l := NewLayer(f, old)
	for _, e := range entries {
		if _, err := l.Put(e); err != nil {
			t.Fatalf("%s: %v", e.Path, err)
		}
	}
	if err := errors.Join(l.Close(), l.Same(context.Background())); err != nil {
		t.Fatal(err)
	}
	return l.Now()
}

// A path is as long as the sandbox has made it, also beyond what the kernel takes at once.
func TestLongPaths(t *testing.T) {
	testenv.Require(t, testenv.Root)
	top := t.TempDir()
	entries := []*pb.ArchiveEntry{{Mode: unix.S_IFDIR | 0o755}}
	for path := strings.Repeat("n", 250); len(path) < 3*unix.PathMax; path += "/" + strings.Repeat("n", 250) {
		entries = append(entries, &pb.ArchiveEntry{Path: []byte(path), Mode: unix.S_IFDIR | 0o700})
	}
	long := laid(t, top, NewManifest(), entries)
	deepest := string(entries[len(entries)-1].Path)
	dir, err := os.Open(top)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	f, err := Below(int(dir.Fd()), deepest, unix.O_RDONLY)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	laid(t, top, long, entries[:1])
}

// A file that says it is as large as files can be is given up with the call that brings it.
func TestAHoleEndsWithItsCall(t *testing.T) {
	testenv.Require(t, testenv.Root)
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	f, err := os.Create(filepath.Join(dir.Name(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	e := &pb.ArchiveEntry{Path: []byte("f"), Mode: unix.S_IFREG | 0o600, Size: 1 << 43, Digest: make([]byte, 32)}
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(10*time.Millisecond, cancel)
	if err := NewLayer(dir, NewManifest()).Fill(ctx, f, e); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := Walk(ctx, dir, func(*pb.ArchiveEntry, *os.File) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

// FuzzEntries lays hostile entries, with checksums that are right, over a folder, and others over what that came to: what
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
	f.Add(slices.Concat(root, entry(&pb.ArchiveEntry{Path: []byte("d"), Mode: unix.S_IFDIR | 0o700}), entry(&pb.ArchiveEntry{Path: []byte("d/beside"), Mode: unix.S_IFIFO}),
		[]byte{0}, root, entry(&pb.ArchiveEntry{Path: []byte("d"), Mode: unix.S_IFLNK | 0o777, Target: []byte("..")})))
	f.Fuzz(func(t *testing.T, in []byte) {
		outer := t.TempDir()
		path := filepath.Join(outer, "upper")
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(outer, "beside"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		dir, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		l := NewLayer(dir, NewManifest())
		for len(in) > 0 {
			n := min(int(in[0]), len(in)-1)
			if n == 0 { // the next checkpoint
				if l.Close() != nil || l.Same(context.Background()) != nil {
					break
				}
				l, in = NewLayer(dir, l.Now()), in[1:]
				continue
			}
			e := &pb.ArchiveEntry{}
			if proto.Unmarshal(in[1:1+n], e) != nil {
				break
			}
			in = in[1+n:]
			file, err := l.Put(e)
			if err != nil {
				break
			}
			if file != nil && l.Fill(context.Background(), file, e) != nil {
				break
			}
		}
		if err := l.Close(); err == nil {
			if err := l.Same(context.Background()); err != nil && len(l.Now().Entries) > 0 && !errors.Is(err, os.ErrNotExist) && !damage(err) {
				t.Fatal(err)
			}
		}
		entries, err := os.ReadDir(outer)
		if err != nil || len(entries) != 2 || entries[0].Name() != "beside" || entries[1].Name() != "upper" {
			t.Fatalf("beside the folder lies %v, %v", entries, err)
		}
	})
}
