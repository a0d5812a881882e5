package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/image"
	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/overlay"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
)

var old = time.Unix(1e9, 0)

type entry = tar.Header

func file(name, content string) (entry, string) {
	return entry{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, ModTime: old}, content
}

// tarOf writes entries; a regular file's content is in the PAX record "content",
// which isn't written.
func tarOf(entries ...entry) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		content := h.PAXRecords["content"]
		records := map[string]string{}
		for k, v := range h.PAXRecords {
			if k != "content" {
				records[k] = v
			}
		}
		h.PAXRecords, h.Format = records, tar.FormatPAX
		h.Size = int64(len(content))
		if h.ModTime.IsZero() {
			h.ModTime = old
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if err := w.WriteHeader(&h); err != nil {
			panic(err)
		}
		io.WriteString(w, content)
	}
	w.Close()
	return b.Bytes()
}

func reg(name, content string) entry {
	h, c := file(name, content)
	h.PAXRecords = map[string]string{"content": c}
	return h
}

func dir(name string) entry { return entry{Name: name + "/", Typeflag: tar.TypeDir} }

func imageOf(t testing.TB, layers ...[]byte) v1.Image {
	t.Helper()
	img := v1.Image(empty.Image)
	for _, raw := range layers {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw)), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	img, err := mutate.Config(img, v1.Config{Env: []string{"PATH=/bin", "A=b=c"}, WorkingDir: "/work", User: "1000:1000"})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func saveDocker(t testing.TB, img v1.Image) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.tar")
	tag, err := name.NewTag("boxwood.test/image:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(path, tag, img); err != nil {
		t.Fatal(err)
	}
	return path
}

func saveLayout(t testing.TB, img v1.Image) string {
	t.Helper()
	path := t.TempDir()
	if _, err := layout.Write(path, mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img})); err != nil {
		t.Fatal(err)
	}
	return path
}

// tarDir packs a folder.
func tarDir(t testing.TB, dir string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "packed.tar")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := tar.NewWriter(f)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func gzipFile(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	w.Write(b)
	w.Close()
	if err := os.WriteFile(path+".gz", out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path + ".gz"
}

func openPool(t testing.TB) *pool.Btrfs {
	t.Helper()
	testenv.Require(t, testenv.Btrfs)
	p, err := pool.OpenBtrfs(pool.Options{Dir: t.TempDir(), SizeBytes: 1 << 30, LowWater: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func mustImport(t testing.TB, p pool.Pool, path string) *image.Result {
	t.Helper()
	r, err := (&image.Importer{Pool: p}).Import(t.Context(), path, "test", nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// show mounts an image's merged tree.
func show(t testing.TB, p pool.Pool, r *image.Result) string {
	t.Helper()
	up, err := p.Clone(t.Context(), r.Image.Base, r.Image.BaseSeal, ids.NewGeneration(), 0)
	if err != nil {
		t.Fatal(err)
	}
	m, err := overlay.Mount(overlay.Options{Lower: up.Layers, Upper: up.Dir, Work: up.Work})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	root := t.TempDir()
	if err := unix.MoveMount(int(m.Fd()), "", unix.AT_FDCWD, root, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(root, unix.MNT_DETACH) })
	return root
}

// nothingLeft checks that a failed import left no layer, base or temporary file.
func nothingLeft(t testing.TB, p *pool.Btrfs) {
	t.Helper()
	if err := p.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"layers", "snapshots"} {
		entries, err := os.ReadDir(filepath.Join(p.Dir(), d))
		if err != nil || len(entries) > 0 {
			t.Errorf("left in %s: %v (%v)", d, entries, err)
		}
	}
}

// The same image must arrive the same, whichever way it is packed.
func TestImportKinds(t *testing.T) {
	img := imageOf(t,
		tarOf(dir("etc"), dir("work"), reg("etc/low", "low"), reg("etc/gone", "x"), dir("shut"), reg("shut/old", "x")),
		tarOf(reg("etc/.wh.gone", ""), dir("shut"), reg("shut/.wh..wh..opq", ""), reg("shut/new", "y")))
	docker, oci := saveDocker(t, img), saveLayout(t, img)
	var want []string
	var digest ids.Image
	for _, tc := range []struct{ kind, path string }{
		{"docker", docker}, {"docker.gz", gzipFile(t, docker)}, {"oci", oci}, {"oci tar", tarDir(t, oci)}, {"oci tar.gz", gzipFile(t, tarDir(t, oci))},
	} {
		t.Run(tc.kind, func(t *testing.T) {
			p := openPool(t)
			var steps []string
			r, err := (&image.Importer{Pool: p}).Import(t.Context(), tc.path, "test", func(step string, done, total int64) { steps = append(steps, step) })
			if err != nil {
				t.Fatal(err)
			}
			if r.Image.Env["A"] != "b=c" || r.Image.Cwd != "/work" || r.Image.User != "1000:1000" || len(r.Image.Layers) != 3 || r.LeftOutCount != 0 {
				t.Errorf("the image is %+v", r.Image)
			}
			if len(steps) == 0 || r.NewBase != r.Image.Base || r.Image.Names[0] != "test" {
				t.Errorf("steps %v, base %s of %s", steps, r.NewBase, r.Image.Base)
			}
			root := show(t, p, r)
			for name, there := range map[string]bool{"etc/low": true, "etc/gone": false, "shut/old": false, "shut/new": true, "proc": true, "tmp": true, "run/box": true, "etc/machine-id": true, "etc/.wh.gone": false} {
				if _, err := os.Lstat(filepath.Join(root, name)); (err == nil) != there {
					t.Errorf("%s is there: %v", name, !there)
				}
			}
			lines, _, err := treewalk.Digest(root, treewalk.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if want == nil {
				want, digest = lines, r.Image.Digest
			}
			if d := treewalk.Diff(want, lines, 10); len(d) > 0 || r.Image.Digest != digest {
				t.Errorf("differs from the first kind (%s, %s):\n%s", digest, r.Image.Digest, strings.Join(d, "\n"))
			}
		})
	}
}

// What agents' programs depend on: setuid, owners, links, attributes, holes, times.
func TestContent(t *testing.T) {
	sparse := strings.Repeat("\x00", 8<<20) + "end"
	raw := tarOf(
		entry{Name: "./", Typeflag: tar.TypeDir, Mode: 0o711, ModTime: old.Add(time.Hour)},
		dir("bin"),
		entry{Name: "bin/su", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 0, Gid: 42, PAXRecords: map[string]string{"content": "x", "SCHILY.xattr.user.note": "hi", "SCHILY.xattr.trusted.overlay.redirect": "/etc"}},
		entry{Name: "bin/su2", Typeflag: tar.TypeLink, Linkname: "bin/su"},
		entry{Name: "bin/sh", Typeflag: tar.TypeSymlink, Linkname: "../../../../etc/passwd", Uid: 7},
		entry{Name: "home/me/deep", Typeflag: tar.TypeReg, Mode: 0o600, Uid: 65534, Gid: 65534, ModTime: time.Unix(1234567890, 123456789), PAXRecords: map[string]string{"content": "y"}},
		entry{Name: "dev/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3},
		entry{Name: "pipe", Typeflag: tar.TypeFifo, Mode: 0o640},
		reg("sparse", sparse),
		reg("twice", "first"), reg("twice", "second"),
	)
	p := openPool(t)
	r := mustImport(t, p, saveDocker(t, imageOf(t, raw)))
	root := show(t, p, r)
	stat := func(name string) (st syscall.Stat_t) {
		if err := syscall.Lstat(filepath.Join(root, name), &st); err != nil {
			t.Fatal(err)
		}
		return st
	}
	if st := stat("bin/su"); st.Mode&0o7777 != 0o4755 || st.Uid != 0 || st.Gid != 42 || st.Nlink != 2 || stat("bin/su2").Ino != st.Ino {
		t.Errorf("bin/su: mode %o, %d:%d, %d links", st.Mode, st.Uid, st.Gid, st.Nlink)
	}
	if st := stat("bin/sh"); st.Uid != 7 || st.Mode&syscall.S_IFMT != syscall.S_IFLNK {
		t.Errorf("bin/sh: mode %o, owner %d", st.Mode, st.Uid)
	}
	if st := stat("home/me/deep"); st.Uid != 65534 || st.Mtim.Sec != 1234567890 || st.Mtim.Nsec != 123456789 {
		t.Errorf("home/me/deep: owner %d, time %v", st.Uid, st.Mtim)
	}
	if st := stat("sparse"); st.Size != int64(len(sparse)) || st.Blocks > 64 {
		t.Errorf("sparse: %d bytes in %d blocks", st.Size, st.Blocks)
	}
	if st := stat("."); st.Mode&0o7777 != 0o711 || st.Mtim.Sec != old.Add(time.Hour).Unix() {
		t.Errorf("the root: mode %o, time %v", st.Mode, st.Mtim)
	}
	if st := stat("bin"); st.Mtim.Sec != old.Unix() {
		t.Errorf("bin: time %v: writing into it moved it", st.Mtim)
	}
	if b, err := os.ReadFile(root + "/twice"); err != nil || string(b) != "second" {
		t.Errorf("twice is %q (%v)", b, err)
	}
	note := make([]byte, 8)
	if n, err := unix.Lgetxattr(root+"/bin/su", "user.note", note); err != nil || string(note[:n]) != "hi" {
		t.Errorf("user.note: %q, %v", note[:max(n, 0)], err)
	}
	if _, err := os.Lstat(root + "/dev/null"); err == nil {
		t.Error("a device node was imported")
	}
	left := strings.Join(r.LeftOut, "\n")
	if r.LeftOutCount != 2 || !strings.Contains(left, "dev/null") || !strings.Contains(left, "trusted.overlay.redirect") {
		t.Errorf("left out %d: %s", r.LeftOutCount, left)
	}
}

// An archive is hostile: none of these may touch anything outside its layer, and
// each must be refused by name with nothing left behind.
func TestHostileEntries(t *testing.T) {
	outside := t.TempDir()
	if err := os.WriteFile(outside+"/victim", []byte("safe"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := func(name, to string) entry { return entry{Name: name, Typeflag: tar.TypeSymlink, Linkname: to} }
	hard := func(name, to string) entry { return entry{Name: name, Typeflag: tar.TypeLink, Linkname: to} }
	for name, entries := range map[string][]entry{
		"../escape":              {reg("../escape", "x")},
		"a/../../escape":         {reg("a/../../escape", "x")},
		"in/victim":              {link("in", outside), reg("in/victim", "broken")},
		"up/escape":              {link("up", ".."), reg("up/escape", "x")},
		"in/new":                 {link("in", outside), dir("in/new")},
		"in/.wh.victim":          {link("in", outside), reg("in/.wh.victim", "")},
		"hard":                   {hard("hard", "../../etc/passwd")},
		"hard2":                  {hard("hard2", outside+"/victim")},
		"hard3":                  {link("in", outside), hard("hard3", "in/victim")},
		"hard4":                  {dir("d"), hard("hard4", "d")},
		"d/.wh...":               {dir("d"), reg("d/.wh...", "")},
		"d/.wh..":                {dir("d"), reg("d/.wh..", "")},
		"big-id":                 {{Name: "big-id", Typeflag: tar.TypeReg, Uid: 70000}},
		"below-file/x":           {reg("below-file", "x"), reg("below-file/x", "y")},
		"full":                   {dir("full"), reg("full/x", "y"), reg("full", "z")},
		strings.Repeat("n", 300): {reg(strings.Repeat("n", 300), "x")},
	} {
		t.Run(name[:min(len(name), 20)], func(t *testing.T) {
			p := openPool(t)
			path := saveDocker(t, imageOf(t, tarOf(reg("etc/ok", "x")), tarOf(entries...)))
			_, err := (&image.Importer{Pool: p}).Import(t.Context(), path, "", nil)
			if f := fault.As(err); f == nil || f.Kind != fault.Invalid || !strings.Contains(err.Error(), name) {
				t.Errorf("%v, want a refusal that names the entry", err)
			}
			nothingLeft(t, p)
			if b, err := os.ReadFile(outside + "/victim"); err != nil || string(b) != "safe" {
				t.Fatalf("a file outside was touched: %q, %v", b, err)
			}
			if entries, _ := os.ReadDir(outside); len(entries) != 1 {
				t.Fatalf("a file appeared outside: %v", entries)
			}
		})
	}
}

func TestDamagedArchives(t *testing.T) {
	img := imageOf(t, tarOf(reg("etc/a", strings.Repeat("content", 10000))), tarOf(reg("etc/b", strings.Repeat("b", 50000))))
	docker := saveDocker(t, img)
	whole, err := os.ReadFile(docker)
	if err != nil {
		t.Fatal(err)
	}
	write := func(t *testing.T, b []byte) string {
		path := filepath.Join(t.TempDir(), "x.tar")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, make := range map[string]func(t *testing.T) string{
		"cut in half":    func(t *testing.T) string { return write(t, whole[:len(whole)/2]) },
		"cut in a layer": func(t *testing.T) string { return write(t, whole[:2000]) },
		"cut, gzipped": func(t *testing.T) string {
			b, _ := os.ReadFile(gzipFile(t, docker))
			return write(t, b[:len(b)/2])
		},
		"empty":       func(t *testing.T) string { return write(t, nil) },
		"no archive":  func(t *testing.T) string { return write(t, bytes.Repeat([]byte("no archive"), 1000)) },
		"another tar": func(t *testing.T) string { return write(t, tarOf(reg("readme", "x"))) },
		"a layer's content": func(t *testing.T) string {
			// An uncompressed layer, one byte of which is changed.
			return flipInRootLayer(t, img)
		},
		"a layout's blob": func(t *testing.T) string {
			dir := saveLayout(t, img)
			blobs, _ := filepath.Glob(dir + "/blobs/sha256/*")
			for _, b := range blobs {
				c, _ := os.ReadFile(b)
				if bytes.Contains(c, []byte(`"WorkingDir":"/work"`)) {
					os.WriteFile(b, bytes.Replace(c, []byte(`"/work"`), []byte(`"/evil"`), 1), 0o600)
				}
			}
			return dir
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := openPool(t)
			_, err := (&image.Importer{Pool: p}).Import(t.Context(), make(t), "", nil)
			if !fault.Is(err, fault.Invalid) {
				t.Errorf("%v, want an invalid archive", err)
			} else {
				t.Log(err)
			}
			nothingLeft(t, p)
		})
	}
	p := openPool(t)
	if _, err := (&image.Importer{Pool: p}).Import(t.Context(), "/nonexistent", "", nil); !fault.Is(err, fault.NotFound) {
		t.Errorf("a missing file: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (&image.Importer{Pool: p}).Import(ctx, docker, "", nil); !errors.Is(err, context.Canceled) {
		t.Errorf("after a cancel: %v", err)
	}
	nothingLeft(t, p)
}

// flipInRootLayer saves an image whose second layer isn't what its diff id says.
func flipInRootLayer(t *testing.T, img v1.Image) string {
	dir := saveLayout(t, img)
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	d, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write(tarOf(reg("etc/b", strings.Repeat("c", 50000))))
	w.Close()
	if err := os.WriteFile(filepath.Join(dir, "blobs/sha256", d.Hex), b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Fifty images over one base must cost one base and fifty small layers.
func TestLayersAreShared(t *testing.T) {
	p := openPool(t)
	base := make([]entry, 0, 200)
	for i := range 200 {
		base = append(base, reg(fmt.Sprintf("usr/f%d", i), strings.Repeat(fmt.Sprint(i), 5000)))
	}
	baseTar := tarOf(base...)
	seen := map[ids.Layer]bool{}
	digests := map[ids.Image]bool{}
	used := func() int64 {
		if err := p.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		var total int64
		for l := range seen {
			dir, err := p.OpenLayer(l)
			if err != nil {
				t.Fatal(err)
			}
			filepath.WalkDir(dir.Name(), func(path string, d os.DirEntry, err error) error {
				if fi, ierr := d.Info(); err == nil && ierr == nil && !d.IsDir() {
					total += fi.Size()
				}
				return err
			})
			dir.Close()
		}
		return total
	}
	var one int64
	for i := range 50 {
		r := mustImport(t, p, saveDocker(t, imageOf(t, baseTar, tarOf(reg("etc/delta", fmt.Sprint("image ", i))))))
		digests[r.Image.Digest] = true
		for _, l := range r.Image.Layers {
			seen[l] = true
		}
		if i == 0 {
			one = used()
		}
	}
	if len(seen) != 1+50+1 || len(digests) != 50 { // the base, the deltas, one seal
		t.Errorf("%d layers and %d images", len(seen), len(digests))
	}
	if all := used(); all > one+50*1000 {
		t.Errorf("one image holds %d bytes, fifty %d", one, all)
	}
}

// A folder's digest depends on its content alone, and importing changes nothing.
func TestDirectory(t *testing.T) {
	testenv.Require(t, testenv.Root)
	src := t.TempDir()
	for _, err := range []error{
		os.Chmod(src, 0o755),
		os.MkdirAll(src+"/etc/sub", 0o750),
		os.WriteFile(src+"/etc/f", []byte("x"), 0o600),
		os.WriteFile(src+"/etc/.wh.literal", []byte("a plain file"), 0o600),
		os.Link(src+"/etc/f", src+"/etc/sub/g"),
		os.Symlink("/nowhere", src+"/link"),
		os.Lchown(src+"/link", 5, 6),
		os.Chown(src+"/etc/f", 1000, 1000),
		os.Chmod(src+"/etc/f", os.ModeSetuid|0o755),
		unix.Setxattr(src+"/etc/f", "user.a", []byte("b\x00c"), 0),
		unix.Mkfifo(src+"/pipe", 0o600),
		unix.Mknod(src+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
		os.WriteFile(src+"/not\xffutf8", nil, 0o644),
		os.Chtimes(src+"/etc/sub", time.Unix(1e9, 1), time.Unix(1e9, 123)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	p := openPool(t)
	r := mustImport(t, p, src)
	again := mustImport(t, p, src)
	if r.Image.Digest != again.Image.Digest || r.NewBase == again.NewBase {
		t.Errorf("the same folder is %s and %s", r.Image.Digest, again.Image.Digest)
	}
	if r.LeftOutCount != 1 || !strings.HasPrefix(r.LeftOut[0], "null: ") {
		t.Errorf("left out: %v", r.LeftOut)
	}
	ours := func(path string) bool {
		for _, mp := range []string{"proc", "sys", "dev", "run", "tmp", "etc/machine-id", "null"} {
			if path == mp {
				return true
			}
		}
		return false
	}
	// The seal adds its mount points and alters nothing else, folders' times included.
	want, _, err := treewalk.Digest(src, treewalk.Options{Skip: ours})
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := treewalk.Digest(show(t, p, r), treewalk.Options{Skip: ours})
	if err != nil {
		t.Fatal(err)
	}
	if d := treewalk.Diff(want, got, 10); len(d) > 0 {
		t.Errorf("the image differs from the folder:\n%s", strings.Join(d, "\n"))
	}
	if err := os.Chmod(src+"/etc/f", 0o711); err != nil {
		t.Fatal(err)
	}
	if changed := mustImport(t, p, src); changed.Image.Digest == r.Image.Digest {
		t.Error("a changed mode doesn't change the digest")
	}
}

// A symbolic link in place of a mount point must not lead a mount elsewhere.
func TestMountPointsInPlaceOfLinks(t *testing.T) {
	p := openPool(t)
	r := mustImport(t, p, saveDocker(t, imageOf(t, tarOf(
		entry{Name: "proc", Typeflag: tar.TypeSymlink, Linkname: "/etc"},
		entry{Name: "run", Typeflag: tar.TypeSymlink, Linkname: "/var/run"},
		dir("etc"), dir("var"), dir("var/run")))))
	root := show(t, p, r)
	for _, mp := range []string{"proc", "run", "run/box", "dev/pts", "dev/shm"} {
		if fi, err := os.Lstat(filepath.Join(root, mp)); err != nil || !fi.IsDir() {
			t.Errorf("%s is no folder: %v", mp, err)
		}
	}
	if r.LeftOutCount != 2 {
		t.Errorf("told of %v", r.LeftOut)
	}
	if fi, err := os.Stat(root + "/tmp"); err != nil || fi.Mode() != os.ModeDir|os.ModeSticky|0o777 {
		t.Errorf("/tmp: %v, %v", fi.Mode(), err)
	}
}

func TestBuildBaseWithoutTool(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := image.BuildBase(t.Context(), t.TempDir(), nil)
	if f := fault.As(err); f == nil || f.Kind != fault.Unsupported || f.Hint == "" {
		t.Errorf("without mmdebstrap: %v", err)
	}
}

// A build is cached, and one that fails leaves nothing in the cache.
func TestBuildBaseCache(t *testing.T) {
	bin, cache := t.TempDir(), t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	script := func(body string) {
		if err := os.WriteFile(bin+"/mmdebstrap", []byte("#!/bin/sh\n"+body), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	script("echo 'E: no mirror answers' >&2; exit 25")
	if _, err := image.BuildBase(t.Context(), cache, nil); err == nil || !strings.Contains(err.Error(), "no mirror answers") {
		t.Errorf("a failing build: %v", err)
	}
	if entries, _ := os.ReadDir(cache); len(entries) > 0 {
		t.Errorf("left in the cache: %v", entries)
	}
	script(`echo 'I: step one' >&2; for a; do case $a in *.tar) echo made >> "$a";; esac; done`)
	var steps []string
	first, err := image.BuildBase(t.Context(), cache, func(step string, _, _ int64) { steps = append(steps, step) })
	if err != nil || len(steps) != 1 || steps[0] != "step one" {
		t.Fatalf("a good build: %v, steps %v", err, steps)
	}
	script("exit 1")
	if again, err := image.BuildBase(t.Context(), cache, nil); err != nil || again != first {
		t.Errorf("from the cache: %s, %v", again, err)
	}
}
