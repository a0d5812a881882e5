package trajectory

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// Folders: of Harbor's jobs, JOBS/JOB/TRIAL/agent/..., at any of these levels,
// and of OpenHands' events, a file each. Nothing outside of the folder is
// opened, whatever links say.

// trialFiles are looked for in a trial, best first.
var trialFiles = []string{"agent/trajectory.json", "agent/mini-swe-agent.trajectory.json", "agent/recording.cast"}

// maxDepth of a trial below the folder that is named.
const maxDepth = 3

// eventFile is a file of one event: V0's have just the number.
var eventFile = regexp.MustCompile(`^(?:event-)?(\d{1,9})(?:-[0-9A-Za-z-]+)?\.json$`)

func readFolder(name string, yield func(*Trajectory, error) bool) {
	root, err := os.OpenRoot(name)
	if err != nil {
		yield(nil, bad(filepath.Base(name), "%w", err))
		return
	}
	defer root.Close()
	found := 0
	counted := func(t *Trajectory, err error) bool { found++; return yield(t, err) }
	if readFolderAt(root, ".", 0, counted) && found == 0 {
		yield(nil, bad(filepath.Base(name), "no trajectory is in the folder"))
	}
}

func readFolderAt(root *os.Root, at string, depth int, yield func(*Trajectory, error) bool) bool {
	entries, err := fs.ReadDir(root.FS(), at)
	if err != nil {
		return yield(nil, bad(at, "%w", err))
	}
	events := map[int]string{}
	for _, e := range entries {
		if m := eventFile.FindStringSubmatch(e.Name()); m != nil {
			n, _ := strconv.Atoi(m[1])
			events[n] = path.Join(at, e.Name())
		}
	}
	if len(events) > 0 {
		return readEvents(root, at, events, yield)
	}
	if slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() == "agent" }) {
		return readTrial(root, at, yield)
	}
	for _, e := range entries {
		if !e.IsDir() || depth == maxDepth {
			continue
		}
		if !readFolderAt(root, path.Join(at, e.Name()), depth+1, yield) {
			return false
		}
	}
	return true
}

func readTrial(root *os.Root, at string, yield func(*Trajectory, error) bool) bool {
	named := func(t *Trajectory, err error) bool {
		if t != nil {
			t.Name = at
		}
		return yield(t, err)
	}
	for _, file := range trialFiles {
		name := path.Join(at, file)
		f, err := regular(root.OpenFile(name, readOnly, 0))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return yield(nil, bad(name, "%w", err))
		}
		defer f.Close()
		return read(name, f, root, named)
	}
	return yield(nil, bad(at, "the trial has none of %v", trialFiles))
}

// readEvents reads a conversation of OpenHands whose events are a file each.
func readEvents(root *os.Root, at string, events map[int]string, yield func(*Trajectory, error) bool) bool {
	numbers := make([]int, 0, len(events))
	for n := range events {
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	t := &Trajectory{Name: at}
	sdk, v0 := newSDKRun(t), openHandsRun{t, map[int]int{}}
	for i, n := range numbers {
		if err := readEvent(root, events[n], i+1, t, sdk, &v0); err != nil {
			return yield(nil, bad(events[n], "as an event of OpenHands: %w", err))
		}
	}
	sdk.prune()
	return yield(t, nil)
}

func readEvent(root *os.Root, name string, i int, t *Trajectory, sdk *sdkRun, v0 *openHandsRun) error {
	f, err := regular(root.OpenFile(name, readOnly, 0))
	if err != nil {
		return err
	}
	defer f.Close()
	s, err := newStream(f, 0)
	if err != nil {
		return err
	}
	if t.Format == "" {
		found, err := shapeOf(s, '{')
		if err != nil {
			return err
		}
		if t.Format = "openhands"; found.has("kind") {
			t.Format = "openhands-sdk"
		}
		if s, err = newStream(f, 0); err != nil {
			return err
		}
	}
	if t.Format == "openhands-sdk" {
		return sdk.next(s, i)
	}
	return v0.next(s, i)
}
