package doctor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/doctor"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

func item(t *testing.T, r doctor.Report, name string) doctor.Item {
	t.Helper()
	for _, i := range r.Items {
		if i.Name == name {
			return i
		}
	}
	t.Fatalf("no item %q in %+v", name, r.Items)
	return doctor.Item{}
}

// leftovers is what a probe could leave on the host, by name.
func leftovers(t *testing.T, stateDir string) []string {
	t.Helper()
	var found []string
	patterns := []string{
		filepath.Join(stateDir, "*"), filepath.Join(stateDir, ".*"),
		filepath.Join(os.TempDir(), "boxwood-doctor-criu-*"),
		fmt.Sprintf("/sys/fs/cgroup/boxwood-doctor-%d", os.Getpid()),
		fmt.Sprintf("/sys/fs/cgroup/unified/boxwood-doctor-%d", os.Getpid()),
	}
	for _, pattern := range patterns {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, names...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, stateDir) {
			found = append(found, line)
		}
	}
	return found
}

// The whole report on a host that has everything. A probe that can't say yes
// where it should would send people away from a host that works.
func TestThisHost(t *testing.T) {
	testenv.Require(t, testenv.BPF, testenv.Btrfs, testenv.CRIU)
	state := t.TempDir()
	t.Setenv("TMPDIR", t.TempDir())
	report := doctor.Run(context.Background(), doctor.Options{StateDir: state, CRIU: testenv.CRIUPath()})
	var text bytes.Buffer
	if err := report.Text(&text); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + text.String())
	for _, name := range []string{"root", "btf", "raw tracepoints", "ring buffer", "cgroups", "btrfs",
		"idmapped overlay", "user namespaces", "criu", "disk", "memory"} {
		if got := item(t, report, name); got.State != doctor.Yes {
			t.Errorf("%s: %s, %s", name, got.State, got.Detail)
		}
	}
	if got := item(t, report, "io controller"); got.State == doctor.Unknown || got.Detail == "" {
		t.Errorf("io controller: %s, %s", got.State, got.Detail)
	}
	if !report.OK() {
		t.Error("OK is false")
	}
	if left := leftovers(t, state); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}

	encoded, err := json.Marshal(report)
	if err != nil {
		t.Fatal(err)
	}
	var shape struct {
		OK    bool
		Items []map[string]any
	}
	if err := json.Unmarshal(encoded, &shape); err != nil {
		t.Fatal(err)
	}
	if !shape.OK || len(shape.Items) != len(report.Items) || shape.Items[0]["state"] != "yes" {
		t.Errorf("JSON: %s", encoded)
	}
	var back doctor.Report
	if err := json.Unmarshal(encoded, &back); err != nil || len(back.Items) != len(report.Items) || back.Items[0] != report.Items[0] {
		t.Errorf("JSON doesn't come back: %v, %+v", err, back)
	}
}

func script(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "criu")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// Programs that only look like CRIU: the one that hangs is what older releases
// do on recent kernels, the one that claims success is what `criu check` does.
func TestCRIUThatDoesNotWork(t *testing.T) {
	testenv.Require(t, testenv.Root)
	const version = `[ "$1" = --version ] && { echo "Version: 9.9"; exit 0; }` + "\n"
	// The mark is an argument of what hangs, to find it in the process table.
	mark := fmt.Sprintf("70000.%d", os.Getpid())
	tests := []struct {
		name, body string
		limit      time.Duration
		state      doctor.State
		detail     string
	}{
		{"hangs in dump", version + "sleep " + mark, time.Second, doctor.Unknown, "hung while dumping"},
		{"hangs at once", "sleep " + mark, time.Second, doctor.Unknown, "hung while starting"},
		{"ignores SIGTERM and forks", version + "trap '' TERM; (setsid sleep " + mark + " &); sleep " + mark, time.Second,
			doctor.Unknown, "hung while dumping"},
		{"fails to dump", version + `echo "(00.1) Error (x.c:1): no such luck" >images/dump.log; exit 1`, time.Minute,
			doctor.No, "failed while dumping: (x.c:1): no such luck"},
		// It kills the tree, as a dump does, and restores nothing.
		{"claims success", version + `[ $1 = dump ] && kill -9 $3; exit 0`, time.Minute, doctor.No, "failed while asking"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			criu := script(t, tt.body)
			var got doctor.Item
			testenv.Reach(t, tt.limit, func(within time.Duration) bool {
				got = item(t, doctor.Run(context.Background(), doctor.Options{CRIU: criu, CRIULimit: within}), "criu")
				return tt.state != doctor.Unknown || strings.Contains(got.Detail, tt.detail) // how far it comes by its limit is up to the machine
			})
			if got.State != tt.state || !strings.Contains(got.Detail, tt.detail) {
				t.Errorf("got %s, %q; want %s, ...%q", got.State, got.Detail, tt.state, tt.detail)
			}
			if got.Without == "" {
				t.Error("doesn't say what is unavailable")
			}
			if left := leftovers(t, tmp); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
			if pids := running(t, mark); len(pids) > 0 {
				t.Errorf("still running: %v", pids)
			}
		})
	}
}

// running lists processes with mark among their arguments.
func running(t *testing.T, mark string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var pids []string
	for _, file := range files {
		if cmdline, err := os.ReadFile(file); err == nil && bytes.Contains(cmdline, []byte("\x00"+mark+"\x00")) {
			pids = append(pids, file)
		}
	}
	return pids
}

// A missing CRIU must not stop the main job, and must say what is lost.
func TestCRIUMissing(t *testing.T) {
	report := doctor.Run(context.Background(), doctor.Options{CRIU: "/nonexistent/criu"})
	got := item(t, report, "criu")
	if got.State == doctor.Yes || got.Required || !strings.Contains(got.Without, "process dumps") {
		t.Errorf("%+v", got)
	}
}

// OK must be false for anything required that wasn't shown, unknown included.
func TestOK(t *testing.T) {
	tests := []struct {
		name  string
		items []doctor.Item
		want  bool
	}{
		{"nothing probed", nil, false},
		{"all there", []doctor.Item{{State: doctor.Yes, Required: true}, {State: doctor.Yes}}, true},
		{"optional missing", []doctor.Item{{State: doctor.Yes, Required: true}, {State: doctor.No}}, true},
		{"required missing", []doctor.Item{{State: doctor.Yes}, {State: doctor.No, Required: true}}, false},
		{"required unknown", []doctor.Item{{State: doctor.Yes}, {State: doctor.Unknown, Required: true}}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			report := doctor.Report{Items: tt.items}
			if report.OK() != tt.want {
				t.Errorf("OK = %v", report.OK())
			}
			var text bytes.Buffer
			if err := report.Text(&text); err != nil {
				t.Fatal(err)
			}
			if got := !strings.Contains(text.String(), "can't run"); got != tt.want {
				t.Errorf("text and OK differ:\n%s", text.String())
			}
		})
	}
}
