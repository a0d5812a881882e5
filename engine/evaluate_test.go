package engine

import (
	"archive/tar"
	"bytes"
	"io"
	"slices"
	"strings"
	"testing"
)

// What a hostile sandbox may send instead of its folder: nothing of it may lead
// elsewhere, and nothing may take a hidden file's place.
func TestSieve(t *testing.T) {
	entry := func(kind byte, name, content string) tar.Header {
		h := tar.Header{Typeflag: kind, Name: name, Mode: 0o644}
		if kind == tar.TypeReg {
			h.Size = int64(len(content))
		} else {
			h.Linkname = content
		}
		return h
	}
	sent := []tar.Header{
		entry(tar.TypeDir, "w/", ""),
		entry(tar.TypeReg, "w/a", "good"),
		entry(tar.TypeReg, "w/a", "evil twice"),
		entry(tar.TypeSymlink, "w/link", "/usr/bin"),
		entry(tar.TypeReg, "w/link/python3", "evil through a link"),
		entry(tar.TypeDir, "w/link", ""),
		entry(tar.TypeReg, "w/link/sh", "evil through a link"),
		entry(tar.TypeReg, "usr/bin/python3", "evil elsewhere"),
		entry(tar.TypeReg, "w/../usr/bin/python3", "evil above"),
		entry(tar.TypeReg, "/usr/bin/python3", "evil and absolute"),
		entry(tar.TypeReg, "wide", "evil beside"),
		entry(tar.TypeLink, "w/hard", "usr/bin/python3"),
		entry(tar.TypeFifo, "w/pipe", ""),
		entry(tar.TypeChar, "w/null", ""),
		entry(tar.TypeReg, "w/no/folder", "evil without a folder"),
		entry(tar.TypeReg, "w/tests", "evil in the place of a folder"),
		entry(tar.TypeDir, "w/tests", ""),
		entry(tar.TypeReg, "w/tests/hidden", "evil in the place of a test"),
		entry(tar.TypeReg, "w/tests/own", "good"),
	}
	var in, out bytes.Buffer
	w := tar.NewWriter(&in)
	for _, h := range sent {
		content := ""
		if h.Typeflag == tar.TypeReg {
			content = strings.Repeat("x", int(h.Size))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(h.Name, err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := sieve(&in, &out, "/srv/w", []File{{Path: "/srv/w/tests/hidden"}}, new(int64(1<<40))); err != nil {
		t.Fatal(err)
	}
	var passed []string
	for r := tar.NewReader(&out); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		passed = append(passed, h.Name)
	}
	if want := []string{"w/", "w/a", "w/link", "w/tests", "w/tests/own"}; !slices.Equal(passed, want) {
		t.Errorf("passed %q, want %q", passed, want)
	}
	if err := sieve(strings.NewReader("no tar at all, but long enough to be taken for a header "+strings.Repeat("x", 600)), io.Discard, "/w", nil, new(int64(1<<40))); err == nil {
		t.Error("garbage passed")
	}
}
