package criu

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/checkpoint-restore/go-criu/v7/rpc"
)

// Save is what to dump.
type Save struct {
	// PID of the tree's root on the host: pid 1 of its pid namespace.
	PID int
	// Cgroup is the frozen v2 folder that the whole tree is in.
	Cgroup string
	// Images is an empty folder, which only the caller can look into.
	Images string
	// External are mount points of the tree that are handed in from outside.
	External []External
}

// External is one mount that is no part of a dump: a key, and where it is in the
// tree. Restore puts something else in its place by the key.
type External struct{ Key, At string }

// Saver is a CRIU that has been started and loads what it needs, so that nothing of that falls into a freeze.
// A Dump, or Drop, ends it; another Dump starts one of its own.
type Saver struct {
	p    *Program
	w    *worker
	held *os.File
}

// NewSaver starts one, which holds a descriptor for as long as it lives.
func (p *Program) NewSaver(held *os.File) (*Saver, error) {
	w, err := p.launch(job{files: []*os.File{held}})
	if err != nil {
		return nil, err
	}
	return &Saver{p, w, held}, nil
}

// Drop ends a Saver whose Dump wasn't called. Harmless after that, twice, and of nil.
func (s *Saver) Drop() {
	if s != nil && s.w != nil {
		s.w.drop()
		s.w = nil
	}
}

// Dump saves a frozen tree and leaves it frozen. The limit is ctx's deadline, which
// must be there.
func (by *Saver) Dump(ctx context.Context, s Save) error {
	if by == nil {
		return fault.New(fault.Internal, "no_saver", "a box is to be saved that hasn't parted for it")
	}
	if by.w == nil {
		again, err := by.p.NewSaver(by.held)
		if err != nil {
			return err
		}
		by.w = again.w
	}
	images, err := os.Open(s.Images)
	if err != nil {
		return err
	}
	defer images.Close()
	o := by.p.options(ctx, images)
	o.Pid = proto.Int32(int32(s.PID))
	o.LeaveRunning = proto.Bool(true) // "running" as the cgroup has it: frozen
	o.FreezeCgroup = proto.String(s.Cgroup)
	for _, e := range s.External {
		o.External = append(o.External, fmt.Sprintf("mnt[%s]:%s", e.At, e.Key))
	}
	w := by.w
	by.w = nil
	_, err = w.call(ctx, job{
		doing: "saving processes", logs: s.Images,
		req: &rpc.CriuReq{Type: rpc.CriuReqType_DUMP.Enum(), Opts: o},
	})
	if err != nil {
		return err
	}
	return tidy(s.Images)
}

// tidy leaves what a restore needs, for root of a box to read: CRIU opens some of them
// as that. Nobody else can reach them.
func tidy(images string) error {
	entries, err := os.ReadDir(images)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == logName || strings.HasPrefix(e.Name(), "stats-") {
			if err := os.Remove(images + "/" + e.Name()); err != nil {
				return err
			}
		} else if err := os.Chmod(images+"/"+e.Name(), 0o444); err != nil {
			return err
		}
	}
	return nil
}

// ghostMax is the largest deleted file that a tree may hold open.
const ghostMax = 256 << 20

// options are those that dump and restore must have in common.
func (p *Program) options(ctx context.Context, dir *os.File) *rpc.CriuOpts {
	limit := 10 * time.Minute
	if d, ok := ctx.Deadline(); ok {
		limit = max(time.Until(d), time.Second)
	}
	return &rpc.CriuOpts{
		ImagesDirFd:       proto.Int32(int32(dir.Fd())),
		LogFile:           proto.String(logName),
		LogLevel:          proto.Int32(2),
		Timeout:           proto.Uint32(uint32(limit.Seconds() + 0.5)),
		ManageCgroupsMode: rpc.CriuCgMode_IGNORE.Enum(),
		NetworkLock:       rpc.CriuNetworkLockMethod_SKIP.Enum(),
		// A sandbox owns its network, which CRIU can't join; lo is all there is in it.
		EmptyNs:        proto.Uint32(unix.CLONE_NEWNET),
		TcpEstablished: proto.Bool(true),
		FileLocks:      proto.Bool(true),
		GhostLimit:     proto.Uint32(ghostMax),
	}
}
