package hostload

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func write(t *testing.T, dir string, files map[string]string) string {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

var whole = map[string]string{
	"meminfo":         "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n",
	"self/statm":      "100 20 3 4 0 5 0\n",
	"pressure/cpu":    "some avg10=48.85 avg60=47.00 avg300=28.58 total=11\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
	"pressure/io":     "some avg10=3.10 avg60=3.75 avg300=2.26 total=22\nfull avg10=0.48 avg60=0.75 avg300=0.65 total=33\n",
	"pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=44\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=55\n",
}

// What the kernel writes is read, and a kernel that doesn't tell of stalls is told from one that has none.
func TestRead(t *testing.T) {
	dir := write(t, t.TempDir(), whole)
	s, err := read(dir)
	if err != nil {
		t.Fatal(err)
	}
	us := time.Microsecond
	if s.MemoryTotal != 1000<<10 || s.MemoryAvailable != 600<<10 || s.Resident != 20*int64(os.Getpagesize()) || s.Processor <= 0 ||
		*s.Stalls != (Stalls{11 * us, 22 * us, 33 * us, 44 * us, 55 * us}) {
		t.Errorf("%+v, %+v", s, s.Stalls)
	}
	if err := os.RemoveAll(filepath.Join(dir, "pressure")); err != nil {
		t.Fatal(err)
	}
	if s, err := read(dir); err != nil || s.Stalls != nil {
		t.Errorf("without PSI: %+v, %v", s, err)
	}
	if s, err := Read(); err != nil || s.MemoryTotal < 1<<20 || s.Resident == 0 {
		t.Errorf("this host: %+v, %v", s, err)
	}
}

// What isn't understood is an error, not a zero.
func TestBadText(t *testing.T) {
	for name, text := range map[string]string{
		"meminfo": "MemTotal: 5 kB\n", "self/statm": "1\n", "pressure/cpu": "some avg10=1\n", "pressure/io": "some total=1\n", "pressure/memory": "",
	} {
		dir := write(t, write(t, t.TempDir(), whole), map[string]string{name: text})
		if s, err := read(dir); err == nil {
			t.Errorf("%s is %q, and that was read as %+v", name, text, s)
		}
	}
}
