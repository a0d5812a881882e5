package miniroot

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Larger is Make with further programs of the host and whole folders of it, such as
// the library of a language. A program is a name or a path; those that the
// host lacks are left out. It is shared like Make's.
func Larger(t testing.TB, programs, trees []string) string {
	t.Helper()
	dir, err := larger(Make(t), programs, trees)
	if err != nil {
		t.Fatalf("making a larger root: %v", err)
	}
	return dir
}

func larger(base string, programs, trees []string) (string, error) {
	var paths []string
	sum := sha256.New()
	fmt.Fprintln(sum, "1", filepath.Base(base), trees)
	for _, name := range programs {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		if path, err = filepath.EvalSymlinks(path); err != nil {
			return "", err
		}
		st, err := os.Stat(path)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(sum, name, path, st.Size(), st.ModTime())
		paths = append(paths, filepath.Base(name)+"="+path)
	}
	return kept("larger-"+hex.EncodeToString(sum.Sum(nil))[:16], func(work string) error {
		if out, err := exec.Command("cp", "-a", base+"/.", work).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var binaries []string
		for _, p := range paths {
			name, path, _ := strings.Cut(p, "=")
			if err := copyFile(path, filepath.Join(work, "bin", name)); err != nil {
				return err
			}
			binaries = append(binaries, path)
		}
		for _, tree := range trees {
			if _, err := os.Stat(tree); err != nil {
				continue
			}
			if err := os.MkdirAll(filepath.Join(work, filepath.Dir(tree)), 0o755); err != nil {
				return err
			}
			if out, err := exec.Command("cp", "-a", tree, filepath.Join(work, filepath.Dir(tree))).CombinedOutput(); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			found, err := exec.Command("find", tree, "-type", "f", "(", "-perm", "/111", "-o", "-name", "*.so", ")").Output()
			if err != nil {
				return err
			}
			binaries = append(binaries, strings.Fields(string(found))...)
		}
		for _, lib := range libraries(binaries) {
			if err := copyFile(lib, filepath.Join(work, lib)); err != nil {
				return err
			}
		}
		return nil
	})
}
