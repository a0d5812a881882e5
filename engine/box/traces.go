package box

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Trace is what lies on the host of one slot's box or zygote, alive or not.
type Trace struct {
	Slot    int
	Control bool // a control folder
	Group   bool // a cgroup
	// Populated: processes live in that cgroup.
	Populated bool
}

// Traces looks for what boxes of a daemon that isn't running have left, by slot; it
// makes nothing and removes nothing.
func Traces(runDir, cgroupRoot string) ([]Trace, error) {
	root, err := cgroup.FindRoot(cgroupRoot)
	if err != nil {
		return nil, err
	}
	at := map[int]*Trace{}
	of := func(name string) *Trace {
		slot, err := strconv.Atoi(name)
		if err != nil || slot < 0 || slot >= slotsMax {
			return &Trace{} // somebody else's
		}
		if at[slot] == nil {
			at[slot] = &Trace{Slot: slot}
		}
		return at[slot]
	}
	if root != nil {
		names, err := root.Names()
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			t := of(name)
			t.Group, t.Populated = true, cgroup.Populated(root.Leftover(name).Dir)
		}
	}
	entries, err := os.ReadDir(filepath.Join(runDir, "boxes"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		of(e.Name()).Control = true
	}
	var out []Trace
	for _, t := range at {
		out = append(out, *t)
	}
	slices.SortFunc(out, func(a, b Trace) int { return a.Slot - b.Slot })
	return out, nil
}

// RemoveTrace ends what runs in a slot and removes its groups and folder. No
// daemon may run on the folder.
func RemoveTrace(ctx context.Context, runDir, cgroupRoot string, slot int) error {
	h := &Host{control: filepath.Join(runDir, "boxes")}
	var err error
	if h.root, err = cgroup.FindRoot(cgroupRoot); err != nil {
		return err
	}
	if h.root == nil {
		return os.RemoveAll(h.controlDir(slot))
	}
	if err := h.removeTraces(ctx, slot); err != nil {
		return err
	}
	if left, err := h.root.Names(); err == nil && len(left) == 0 {
		return h.root.Remove()
	}
	return nil
}

// Standing reads a box's record: its slot, and whether its pid 1 still lives.
func Standing(text []byte) (slot int, alive bool, err error) {
	var r record
	if err := json.Unmarshal(text, &r); err != nil || r.Slot < 0 || r.Slot >= slotsMax || r.PID <= 1 {
		return 0, false, fault.New(fault.Invalid, "bad_record", "this is not the record of a box")
	}
	pidfd, err := unix.PidfdOpen(r.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return r.Slot, false, nil
	}
	if err != nil {
		return r.Slot, false, fmt.Errorf("looking for process %d: %w", r.PID, err)
	}
	defer unix.Close(pidfd)
	start, err := startTime(r.PID)
	return r.Slot, err == nil && start == r.Start && !exited(pidfd), nil
}
