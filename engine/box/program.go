package box

import (
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/boxwood-rl/boxwood/internal/seccomp"
)

// boxinit is both the nursery and pid 1; init/build.sh makes it.
//
//go:embed init/boxinit
var boxinit []byte

// ProgramDigest names pid 1's program and the filters of system calls. Memory that was saved under
// one can't be restored over another, and processes keep the filter that they were saved with.
var ProgramDigest = sync.OnceValue(func() string {
	sum := sha256.Sum256(append(slices.Clone(boxinit), seccomp.Digest()...))
	return hex.EncodeToString(sum[:8])
})

// In each control folder pid 1's program has the name programName; it is a link to
// one of two files beside these folders. A zygote executes one that can't be read:
// see init/main.c. A restored pid 1 executes nothing, its memory is the host's
// anyhow, and CRIU has to read its program as root of the box.
const (
	programName    = "boxinit"
	startProgram   = "boxinit-start"
	restoreProgram = "boxinit-restore"
)

// removeProgram is for when no box lives on.
func removeProgram(control string) {
	for _, name := range []string{startProgram, restoreProgram} {
		_ = os.Remove(filepath.Join(control, name))
	}
}

// writeProgram makes both files anew: links to older ones keep those.
func writeProgram(control string) error {
	for name, mode := range map[string]os.FileMode{startProgram: 0o111, restoreProgram: 0o555} {
		path := filepath.Join(control, name)
		tmp := path + ".new"
		if err := os.Remove(tmp); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("writing pid 1's program: %w", err)
		}
		if err := os.WriteFile(tmp, boxinit, 0o600); err != nil {
			return fmt.Errorf("writing pid 1's program: %w", err)
		}
		if err := os.Chmod(tmp, mode); err != nil {
			return fmt.Errorf("writing pid 1's program: %w", err)
		}
		if err := os.Rename(tmp, path); err != nil {
			return fmt.Errorf("writing pid 1's program: %w", err)
		}
	}
	return nil
}
