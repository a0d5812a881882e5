// Package miniroot gives tests a small root file system: bash, coreutils and a
// few others, copied from the host with the libraries that they load, and the
// mount points of a box. It is meant as the lowest layer of an overlay.
package miniroot

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// programs that are wanted; bash and those of coreutils that tests lean on must
// be on the host, the rest are left out where they are missing.
var (
	required = strings.Fields("bash cat chmod chown cp dd echo env false head id ln ls mkdir mkfifo mv rm sleep sort stat tail touch tr true wc yes")
	optional = strings.Fields("base64 basename cut date df dirname du expr find grep hostname kill link mktemp mount nproc od prlimit ps pwd readlink renice rmdir sed seq setfattr setsid sha256sum sync taskset tee test timeout truncate tty umount uname uniq unshare whoami xargs")
)

var files = map[string]string{
	"etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\nagent:x:1000:1000:Agent:/home/agent:/bin/bash\n",
	"etc/group":  "root:x:0:\ntty:x:5:\nnogroup:x:65534:\nagent:x:1000:\nstaff:x:50:agent\nextra:x:77:nobody,agent\n",
	// The mount points of a box: a file among folders.
	"etc/machine-id": "",
}

var folders = strings.Fields("bin dev/shm etc home/agent proc root run/box sys tmp usr/bin var/tmp")

var makeOnce = sync.OnceValues(build)

// Make returns the folder, which is shared by all tests and must not be written to.
func Make(t testing.TB) string {
	t.Helper()
	dir, err := makeOnce()
	if err != nil {
		t.Fatalf("making a small root: %v", err)
	}
	return dir
}

func build() (string, error) {
	sources, err := collect()
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	fmt.Fprintln(sum, "1", folders, files)
	for _, src := range sources {
		st, err := os.Stat(src)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(sum, src, st.Size(), st.ModTime())
	}
	return kept("mini-"+hex.EncodeToString(sum.Sum(nil))[:16], func(work string) error { return fill(work, sources) })
}

// kept gives the folder of that name, which is filled when there is none yet; a name
// changes with the content. It is kept in .cache of the module, so that it is built
// once and goes with the clone; a test run elsewhere keeps it in the temporary folder.
func kept(name string, fill func(work string) error) (string, error) {
	folder := filepath.Join(os.TempDir(), "boxwood-roots")
	if module := moduleFolder(); module != "" {
		folder = filepath.Join(module, ".cache", "roots")
	}
	dir := filepath.Join(folder, name)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(folder, "new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	if err := fill(work); err != nil {
		return "", err
	}
	if err := os.Rename(work, dir); err != nil {
		if _, serr := os.Stat(dir); serr != nil { // else another process was faster
			return "", err
		}
	}
	return dir, nil
}

// moduleFolder is that of the go.mod at or above the working folder, or "".
func moduleFolder() string {
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, serr := os.Stat(filepath.Join(dir, "go.mod")); serr == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			break
		}
	}
	return ""
}

// collect finds the programs, then what ldd says of them.
func collect() ([]string, error) {
	var found []string
	for i, name := range slices.Concat(required, optional) {
		path, err := exec.LookPath(name)
		if err != nil {
			if i < len(required) {
				return nil, fmt.Errorf("this host has no %s: %w", name, err)
			}
			continue
		}
		found = append(found, path)
	}
	return append(found, libraries(found)...), nil
}

// libraries are what ldd says of programs. It complains of those that have none.
func libraries(of []string) (found []string) {
	out, _ := exec.Command("ldd", of...).Output()
	seen := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)(?:=>\s+|^\s+)(/\S+)`).FindAllStringSubmatch(string(out), -1) {
		if path := m[1]; !seen[path] && !strings.HasSuffix(path, ":") {
			seen[path] = true
			found = append(found, path)
		}
	}
	return found
}

func fill(dir string, sources []string) error {
	old := unix.Umask(0)
	defer unix.Umask(old)
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	for _, f := range folders {
		if err := os.MkdirAll(filepath.Join(dir, f), 0o755); err != nil {
			return err
		}
	}
	for _, src := range sources {
		dst := filepath.Join(dir, "bin", filepath.Base(src))
		if strings.Contains(filepath.Base(src), ".so") {
			dst = filepath.Join(dir, src)
		}
		if err := copyFile(src, dst); err != nil {
			return err
		}
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return errors.Join(
		os.Symlink("bash", filepath.Join(dir, "bin/sh")),
		os.Remove(filepath.Join(dir, "usr/bin")),
		os.Symlink("../bin", filepath.Join(dir, "usr/bin")),
		os.Chmod(filepath.Join(dir, "tmp"), 0o1777),
		os.Chmod(filepath.Join(dir, "var/tmp"), 0o1777),
		os.Chmod(filepath.Join(dir, "dev/shm"), 0o1777),
		os.Chmod(filepath.Join(dir, "root"), 0o700),
		os.Chown(filepath.Join(dir, "home/agent"), 1000, 1000),
	)
}

func copyFile(src, dst string) error {
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}
