package image

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// FuzzExtract feeds the extractor arbitrary archives. Whatever they hold, nothing
// outside the layer's folder may change.
func FuzzExtract(f *testing.F) {
	seed := func(headers ...tar.Header) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range headers {
			h.Mode = 0o755
			if h.Typeflag == tar.TypeReg {
				h.Size = 3
			}
			if w.WriteHeader(&h) == nil && h.Typeflag == tar.TypeReg {
				w.Write([]byte("abc"))
			}
		}
		w.Close()
		f.Add(b.Bytes())
	}
	file := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg} }
	link := func(name, to string, kind byte) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: kind}
	}
	seed(file("a"), file("d/e/f"), file("d/.wh.x"), file("d/.wh..wh..opq"))
	seed(link("l", "..", tar.TypeSymlink), file("l/victim"))
	seed(link("l", "../victim", tar.TypeLink), file("l"))
	seed(link("l", "../victim", tar.TypeSymlink), file("l"), link("m", "l", tar.TypeLink))
	seed(tar.Header{Name: "./", Typeflag: tar.TypeDir}, tar.Header{Name: "n", Typeflag: tar.TypeChar}, file("n"))
	seed(file(".wh.d"), file("d/x"), file("../victim"))
	f.Fuzz(func(t *testing.T, archive []byte) {
		top := t.TempDir()
		root := filepath.Join(top, "root")
		if err := os.Mkdir(root, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(top, "victim"), []byte("safe"), 0o600); err != nil {
			t.Fatal(err)
		}
		before, err := os.Stat(filepath.Join(top, "victim"))
		if err != nil {
			t.Fatal(err)
		}
		x, err := newExtractor(root, true, &leftOut{})
		if err != nil {
			t.Fatal(err)
		}
		x.extract(tar.NewReader(bytes.NewReader(archive))) // any error will do
		x.close()
		after, err := os.Stat(filepath.Join(top, "victim"))
		if err != nil || after.ModTime() != before.ModTime() || after.Mode() != before.Mode() {
			t.Fatalf("a file outside changed: %v, %v", after, err)
		}
		if b, err := os.ReadFile(filepath.Join(top, "victim")); err != nil || string(b) != "safe" {
			t.Fatalf("a file outside holds %q: %v", b, err)
		}
		if entries, err := os.ReadDir(top); err != nil || len(entries) != 2 {
			t.Fatalf("outside there is %v: %v", entries, err)
		}
	})
}
