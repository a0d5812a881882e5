package tree

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// The test binary runs itself as a child process that is killed: these say
// what the child does and where.
const (
	childEnv = "BOXWOOD_TREE_CHILD"
	childDir = "BOXWOOD_TREE_DIR"
)

func TestMain(m *testing.M) {
	switch os.Getenv(childEnv) {
	case "":
		os.Exit(m.Run())
	case "open":
		_, err := Open(os.Getenv(childDir), Options{AllowTmpfs: true})
		if err != nil {
			fmt.Println(fault.As(err).Reason)
			os.Exit(1)
		}
	case "write":
		writeUntilKilled(os.Getenv(childDir))
	}
	os.Exit(0)
}

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

func contains(s, part string) bool { return strings.Contains(s, part) }

// countingFS counts flushes of files.
type countingFS struct {
	vfs.FS
	syncs atomic.Int64
}

func (fs *countingFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, c)
	return countingFile{f, fs}, err
}

func (fs *countingFS) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.ReuseForWrite(from, to, c)
	return countingFile{f, fs}, err
}

type countingFile struct {
	vfs.File
	fs *countingFS
}

func (f countingFile) Sync() error     { f.fs.syncs.Add(1); return f.File.Sync() }
func (f countingFile) SyncData() error { f.fs.syncs.Add(1); return f.File.SyncData() }
