package image

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// What BuildBase installs. A change makes a new file in the cache.
const (
	baseSuite    = "bookworm"
	basePackages = "bash,coreutils,python3,git"
	// baseEpoch is the time of files that the build itself makes.
	baseEpoch = "1700000000"
)

// BuildBase makes a tar of a small Debian root with bash, coreutils, python3 and
// git, from the package mirrors that this host uses, and returns its path below
// dir. It takes a minute or two; what is there already is used again. Import
// takes the tar.
func BuildBase(ctx context.Context, dir string, progress func(step string, done, total int64)) (string, error) {
	if progress == nil {
		progress = func(string, int64, int64) {}
	}
	key := sha256.Sum256([]byte(strings.Join([]string{"1", baseSuite, basePackages, baseEpoch}, "\n")))
	out := filepath.Join(dir, fmt.Sprintf("debian-%s-%s-%s.tar", baseSuite, runtime.GOARCH, hex.EncodeToString(key[:6])))
	if _, err := os.Stat(out); err == nil {
		return out, nil
	}
	tool, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return "", fault.New(fault.Unsupported, "no_mmdebstrap", "building a Debian root needs mmdebstrap").
			WithHint("apt-get install mmdebstrap; or import a folder or a `docker save` archive instead")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	scratch, err := os.MkdirTemp(dir, "building-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(scratch)
	tmp := filepath.Join(scratch, "root.tar")
	if err := runMmdebstrap(ctx, tool, tmp, progress); err != nil {
		return "", err
	}
	return out, os.Rename(tmp, out)
}

func runMmdebstrap(ctx context.Context, tool, out string, progress Progress) error {
	args := []string{"--variant=minbase", "--include=" + basePackages, "--format=tar",
		`--dpkgopt=path-exclude=/usr/share/man/*`, `--dpkgopt=path-exclude=/usr/share/locale/*`,
		`--dpkgopt=path-exclude=/usr/share/doc/*`, `--dpkgopt=path-include=/usr/share/doc/*/copyright`,
		baseSuite, out}
	if mirror := hostMirror("/etc/apt"); mirror != "" {
		args = append(args, mirror)
	}
	cmd := exec.CommandContext(ctx, tool, args...)
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH="+baseEpoch)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting mmdebstrap: %w", err)
	}
	var problems []string
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		line := lines.Text()
		if step, ok := strings.CutPrefix(line, "I: "); ok {
			progress(step, 0, 0)
		}
		if strings.HasPrefix(line, "E: ") || strings.HasPrefix(line, "Err:") {
			problems = append(problems, line)
		}
	}
	io.Copy(io.Discard, stderr) // a line too long for the scanner must not block the child
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		said := "it said nothing"
		if len(problems) > 0 {
			said = problems[0] // the others follow from it
		}
		return fault.New(fault.Unavailable, "mmdebstrap_failed", "building a Debian root: %w: %s", err, said).
			WithHint("it needs root and a Debian mirror that this host can reach")
	}
	return nil
}

// hostMirror is the first Debian archive in the host's own package sources, or "".
func hostMirror(apt string) string {
	files, _ := filepath.Glob(filepath.Join(apt, "sources.list.d", "*"))
	for _, file := range append([]string{filepath.Join(apt, "sources.list")}, files...) {
		b, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) || err != nil {
			continue
		}
		for _, line := range strings.Split(string(b), "\n") {
			for _, word := range strings.Fields(line) {
				if strings.HasPrefix(strings.TrimSpace(line), "#") {
					break
				}
				if url := strings.TrimRight(word, "/"); strings.HasPrefix(url, "http") && strings.HasSuffix(url, "/debian") {
					return word
				}
			}
		}
	}
	return ""
}
