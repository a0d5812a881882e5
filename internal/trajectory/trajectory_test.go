package trajectory

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/agenttools"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

var update = flag.Bool("update", false, "write the golden file anew")

func (e Event) String() string {
	s := fmt.Sprintf("%d", e.Step)
	if e.File != "" {
		s = e.File + " " + s
	}
	if e.At != 0 {
		s += " at " + e.At.String()
	}
	if e.Took != 0 {
		s += " took " + e.Took.String()
	}
	if e.Keystrokes != "" {
		s += fmt.Sprintf(" keys %q", e.Keystrokes)
	}
	if e.Skip != "" {
		return s + " skip " + e.Skip
	}
	if e.Call != nil {
		s += " " + e.Call.Tool + " " + e.Call.String()
	} else {
		s += fmt.Sprintf(" %q", e.Command)
	}
	if e.Hung {
		s += " hung"
	}
	if e.Cwd != "" {
		s += " in " + e.Cwd
	}
	if e.ExitCode != nil {
		s += fmt.Sprintf(" exit %d", *e.ExitCode)
	}
	if e.Output != nil {
		s += fmt.Sprintf(" out %q", *e.Output)
	}
	return s
}

// text is what was read of a path, a line each: trajectories, events, other
// records, errors.
func text(path string) string {
	var lines []string
	for t, err := range All(path) {
		lines = append(lines, describe(t, err)...)
	}
	return strings.Join(lines, "\n")
}

func describe(t *Trajectory, err error) (lines []string) {
	if err != nil {
		return []string{"error " + err.Error()}
	}
	lines = append(lines, strings.TrimSpace(t.Format+" "+t.Name))
	for _, e := range t.Events {
		lines = append(lines, e.String())
	}
	for _, kind := range slices.Sorted(maps.Keys(t.Other)) {
		lines = append(lines, fmt.Sprintf("other %d %s", t.Other[kind], kind))
	}
	return lines
}

// TestFormats would fail if an action, an observation or a record of a format
// were lost, or taken for another.
func TestFormats(t *testing.T) {
	for _, c := range []struct {
		file string
		want []string
	}{
		{"atif-1.2.json", []string{
			"atif",
			`2 "ls" out "a"`,
			"2 skip a tool of the agent (think)",
			`2 "exit 3" exit 3 out ""`,
			`3 took 500ms keys "mkdir d\n" "mkdir d"`,
			`3 keys "q" skip keystrokes that are not a command line`,
			"3 took 5s skip keystrokes that only wait",
			"4 skip a message without a command",
			"other 1 step of source user",
		}},
		{"atif-1.5.cont-1.json", []string{
			"atif",
			"2 skip context copied from an earlier file",
			`3 "ls" out "a\n"`,
			"other 1 step of source user",
		}},
		{"atif-1.5.json", []string{
			"atif",
			`2 "touch a" out ""`,
			"atif-1.5.cont-1.json 2 skip context copied from an earlier file",
			`atif-1.5.cont-1.json 3 "ls" out "a\n"`,
			"other 2 step of source user",
		}},
		{"atif-1.8.json", []string{
			"atif",
			"2 skip a tool of the agent (delegate)",
			"2 skip actions of a sub-agent, which has a trajectory of its own",
			`3 took 2s keys "make\n" "make"`,
			"other 1 step of source system",
			"other 1 trajectory of a sub-agent",
		}},
		{"events", []string{
			"openhands-sdk .",
			`3 "echo 1" exit 0 out "1"`,
			"other 1 MessageEvent",
			"other 1 SystemPromptEvent",
		}},
		{"harbor", []string{
			"atif job/a__1",
			`2 "touch a" out ""`,
			"job/a__1/agent/atif-1.5.cont-1.json 2 skip context copied from an earlier file",
			`job/a__1/agent/atif-1.5.cont-1.json 3 "ls" out "a\n"`,
			"other 2 step of source user",
			"mini-swe-agent job/b__2",
			`3 "ls -la" exit 2 out "no\n"`,
			"5 skip a message without a command",
			"7 skip a message with several commands, which are refused",
			"9 skip the agent's submission",
			"other 1 message of role system",
			"other 3 message of role user",
			"asciicast-v2 job/c__3",
			`3 at 1s took 250ms keys "ls\r" "ls"`,
			`7 at 3s keys "exit\r" "exit"`,
			`7 at 3s keys "q" skip keystrokes that are not a command line`,
			"other 1 change of the terminal's size",
			"other 1 marker",
			"other 2 output of the terminal",
			"error reading job/d__4: the trial has none of [agent/trajectory.json agent/mini-swe-agent.trajectory.json agent/recording.cast]",
		}},
		{"mini-1.1.json", []string{
			"mini-swe-agent",
			`3 "echo a" exit 0 out "a\n"`,
			`3 "false" exit 1 out "B"`,
			"other 1 message of role exit",
			"other 1 message of role system",
			"other 1 message of role user",
		}},
		{"mini-1.json", []string{
			"mini-swe-agent",
			`3 "ls -la" exit 2 out "no\n"`,
			"5 skip a message without a command",
			"7 skip a message with several commands, which are refused",
			"9 skip the agent's submission",
			"other 1 message of role system",
			"other 3 message of role user",
		}},
		{"mini-list.json", []string{
			"mini-swe-agent",
			`2 "pwd" exit 0 out "/work\n"`,
			"other 1 message of role user",
		}},
		{"nebius.jsonl", []string{
			"nebius row 1 n1",
			`3 "cat a" in /repo out "1"`,
			`5 edit_range 1 1 x in /repo/b out "ok"`,
			`7 "python x.py" in /repo/b out "5"`,
			"other 1 message of role system",
			"other 1 message of role user",
		}},
		{"nebius.parquet", []string{
			"nebius row 1 n1",
			`2 "cd /w && ls" exit 2 out "a"`,
			`2 str_replace_editor view /w/é out "seen"`,
			"other 1 message of role user",
			"nebius row 2",
			"nebius row 3 n3",
		}},
		{"openhands-sdk-branch.json", []string{
			"openhands-sdk",
			`2 "echo 1" exit 0 out "1"`,
			"4 skip on a branch of the conversation that was left",
			`6 "echo right" exit 0 out "right"`,
			"other 1 MessageEvent",
		}},
		{"openhands-sdk.jsonl", []string{
			"openhands-sdk",
			`3 "echo 1" exit 0 out "1"`,
			"5 skip a command that the agent's shell refused",
			"7 skip a call of the editor whose arguments are not understood",
			"8 skip an action that was not valid",
			"9 skip an action that the user rejected",
			"11 skip input to a running command",
			"other 1 MessageEvent",
			"other 1 SystemPromptEvent",
		}},
		{"openhands.json", []string{
			"openhands",
			`3 "ls" exit 0 out "a\n"`,
			`5 str_replace_editor create /a out "ok"`,
			`7 "sleep 100" hung out "still"`,
			"9 skip input to a running command",
			"10 skip a command that the agent's shell refused",
			"12 skip a tool of the agent (finish)",
			`other 1 action "message" of source "user"`,
			"other 1 observation agent_state_changed",
		}},
		{"ours.jsonl", []string{
			"boxwood-trajectory-1",
			`1 "ls" in /work exit 0 out "a\n"`,
			`2 "false" exit 1`,
		}},
		{"swe-agent-history.traj", []string{
			"swe-agent",
			`4 "cat a" out "one"`,
			`6 open a.py in /repo out "shown"`,
			`8 "wc -l a.py" in /repo out "3 a.py"`,
			"other 1 message of a demonstration",
			"other 1 message of role system",
			"other 1 message of role user",
		}},
		{"swe-agent-old.traj", []string{
			"swe-agent",
			`1 "ls -F" out "a.py\n"`,
			`2 edit_range 1 2 x = 1 in /repo out "done"`,
			`3 "python a.py" in /repo out ""`,
		}},
		{"swe-agent.traj", []string{
			"swe-agent",
			`1 took 250ms "ls -F" out "a.py\r\n"`,
			`2 took 100ms str_replace_editor view /testbed/a.py in /testbed out "1"`,
			`3 took 1.5s "cd src && python a.py" in /testbed out "7"`,
			"4 skip an empty command",
			`5 "pwd" in /testbed/src out "/testbed/src"`,
			"other 2 attempt of a retrying agent, beside the one it chose",
		}},
		{"swe-smith.jsonl", []string{
			"swe-smith row 1 r1",
			`3 "ls src" out "a.py"`,
			`5 str_replace_editor view /a out "1"`,
			"7 skip a tool of the agent (submit)",
			"other 1 message of role system",
			"other 1 message of role user",
			"swe-smith row 2 r2",
			`2 "pwd" out "/w"`,
			"other 1 message of role user",
			"error reading swe-smith.jsonl: as swe-smith: row 3: step 1: line 3: invalid character '\\n' in string literal",
			"swe-smith row 4 r4",
			`1 "grep x a\ny" out "x"`,
		}},
		{"swe-smith.parquet", []string{
			"swe-smith row 1 s1",
			`2 "ls" out "a"`,
			"other 1 message of role system",
			"error reading swe-smith.parquet: as Parquet: row 2: field messages: step 1: line 1: the file ends in the middle of a value",
		}},
		{"v2.cast", []string{
			"asciicast-v2",
			`3 at 1s took 250ms keys "ls\r" "ls"`,
			`7 at 3s keys "exit\r" "exit"`,
			`7 at 3s keys "q" skip keystrokes that are not a command line`,
			"other 1 change of the terminal's size",
			"other 1 marker",
			"other 2 output of the terminal",
		}},
		{"v3.cast", []string{
			"asciicast-v3",
			`2 at 1s keys "ls\r" "ls"`,
			`4 at 2.5s keys "\x03" skip keystrokes that are not a command line`,
			"other 1 end of the recorded program",
			"other 1 output of the terminal",
		}},
	} {
		t.Run(c.file, func(t *testing.T) {
			if got, want := text(filepath.Join("testdata", c.file)), strings.Join(c.want, "\n"); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// readText reads a file of one trajectory.
func readText(t *testing.T, name, in string) (*Trajectory, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(in), 0o600); err != nil {
		t.Fatal(err)
	}
	return Open(path)
}

// TestBadFiles would fail if a broken file were read in part, or refused
// without its name, place and field.
func TestBadFiles(t *testing.T) {
	const ours = `{"format":"boxwood-trajectory-1"}` + "\n"
	for _, c := range []struct{ name, in, want string }{
		{"empty", " \n", "it is empty"},
		{"truncated", "{\"trajectory\": [\n{\"action\": \"l", "as swe-agent: step 1: line 2: the file ends in the middle of a value"},
		{"truncated between values", "[{\"id\":1,\"source\":\"agent\",\"action\":\"run\"},\n", "line 2: the file ends in the middle of a value"},
		{"broken", "{\"trajectory\": [\n{\"action\": \"ls\"},\n\n{\"action\": nope}]}", "as swe-agent: step 2: line 4: invalid character 'o'"},
		{"not an object", `"text"`, "no format that is known"},
		{"another object", `{"a": 1}`, "no format that is known"},
		{"wrong type", "{\"trajectory\": [\n{\"action\": \"a\"},\n{\"action\": 5}]}", "as swe-agent: step 2: line 3: field action must not be a number"},
		{"wrong type within", `{"schema_version":"ATIF-v1.5","steps":[{"step_id":1,"observation":{"results":[{"content":5}]}}]}`, "as atif: step 1: line 1: field observation.results"},
		{"no list", `{"trajectory": {"a": 1}}`, "as swe-agent: line 1: it must be a list"},
		{"missing field", `{"trajectory": [{"observation": ""}]}`, "step 1: field action is missing"},
		{"no step id", `{"schema_version":"ATIF-v1.5","steps":[{"source":"agent"}]}`, "step 1: field step_id is missing"},
		{"no role", `[{"role":"user","content":"x"},{"content":"y"}]`, "step 2: field role is missing"},
		{"no id", `[{"id":1,"source":"agent","action":"run"},{"source":"agent"}]`, "step 2: field id is missing"},
		{"no kind", `{"id":"1","source":"agent","kind":"ActionEvent"}` + "\n" + `{"id":"2"}`, "step 2: field kind is missing"},
		{"newer mini", `{"trajectory_format":"mini-swe-agent-9","messages":[]}`, `version "mini-swe-agent-9" is not known`},
		{"newer ATIF", `{"schema_version":"ATIF-v1.99","steps":[]}`, "newer than ATIF-v1.8"},
		{"another ATIF", `{"schema_version":"ATIF-v2.0","steps":[]}`, `version "ATIF-v2.0" is not known`},
		{"newer ours", `{"format":"boxwood-trajectory-2"}`, "newer than this program"},
		{"newer asciicast", `{"version":4,"width":80,"height":24}`, "asciicast version 4 is not known"},
		{"older asciicast", `{"version":1,"width":80,"height":24,"stdout":[]}`, "asciicast version 1 is not known"},
		{"asciicast event", `{"version":2,"width":80,"height":24}` + "\n" + `[0.1,"i"]`, "line 2: an event has 2 fields"},
		{"asciicast time", `{"version":2,"width":80,"height":24}` + "\n" + `["1","i","x"]`, "line 2: field 1 of the event"},
		{"mistyped expectation", ours + `{"command":"x","expected_exit":1}`, `line 2: json: unknown field "expected_exit"`},
		{"no command", ours + "\n" + `{"cwd":"/"}`, "line 3: field command is missing"},
		{"wrong type in ours", ours + `{"command":7}`, "line 2: field command must not be a number"},
		{"UTF-16", "\xff\xfe{\x00", "UTF-16"},
		{"Latin-1", "{\"trajectory\": [\n{\"action\": \"ls \xe9t\xe9\"}]}", "a byte that is not UTF-8"},
		{"Latin-1 in ours", ours + "{\"command\":\"\xe9\"}", "a byte that is not UTF-8"},
		{"cut in a character", "{\"trajectory\": [{\"action\": \"\xc3", "a byte that is not UTF-8"},
		{"gzip", "\x1f\x8b\x08", "compressed with gzip"},
		{"zip", "PK\x03\x04", "a zip archive"},
		{"Parquet", "PAR1 and no more", "as Parquet: its end is missing"},
		{"deep", strings.Repeat("[", 200000), "line 1: the file ends"},
		{"a value too large", `{"trajectory": [{"action": "` + strings.Repeat("x", maxValue) + `"}]}`, "line 1: a value is larger than 64 MiB"},
		{"two values", `{"trajectory":[]}` + "\n" + `{"trajectory":[]}`, "more follows after the trajectory"},
		{"rest", `{"trajectory":[]}` + "\n]", "line 2: "},
		{"rows", `{"messages":[]}` + "\n" + `{"messages":[]}`, "has several trajectories"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := readText(t, "recorded.json", c.in)
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "recorded.json") {
				t.Errorf("got %v, want it to name the file and say %q", err, c.want)
			}
			if fault.Is(err, fault.Internal) || strings.Contains(fmt.Sprint(err), "\n") {
				t.Errorf("not one line about the file: %v", err)
			}
		})
	}
}

// TestWhatCannotBeRunAgainAsItWas would fail if a command were run that isn't
// the recorded one.
func TestWhatCannotBeRunAgainAsItWas(t *testing.T) {
	got, err := readText(t, "f", `{"trajectory":[{"action":"a\ud800b"},{"action":"a\u0000b"},{"action":" \n"},{"action":"ls"}]}`)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"swe-agent", "1 skip a command that lost bytes when it was recorded", "2 skip a command with a zero byte", "3 skip an empty command", `4 "ls"`}
	if lines := describe(got, nil); !slices.Equal(lines, want) {
		t.Errorf("got %q", lines)
	}
	if n := got.Skipped(); len(n) != 3 {
		t.Errorf("%v", n)
	}
}

// TestContinuations would fail if a chain of files were followed for ever, out
// of its folder, or as if a file that isn't there were the end.
func TestContinuations(t *testing.T) {
	dir := t.TempDir()
	for name, next := range map[string]string{
		"a.json": "b.json", "b.json": "sub/c.json", "sub/c.json": "../a.json", "self.json": "self.json",
		"up.json": "../x.json", "root.json": "/etc/passwd", "link.json": "out", "folder.json": "sub", "pipe.json": "pipe",
		"none.json": "gone.json", "zero.json": `a\u0000b`, "broken.json": "bad",
	} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(fmt.Sprintf(
			`{"schema_version":"ATIF-v1.5","steps":[{"step_id":1,"source":"user"}],"continued_trajectory_ref":"%s"}`, next)), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	err := errors.Join(os.Symlink("/etc/passwd", filepath.Join(dir, "out")), syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600),
		os.WriteFile(filepath.Join(dir, "bad"), []byte(`{"schema_version":"ATIF-v1.5","steps":[{}]}`), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"a.json": "a cycle: a.json -> b.json -> sub/c.json -> a.json", "self.json": "a cycle: self.json -> self.json",
		"up.json": "leaves the folder", "link.json": "escapes", "folder.json": "it is not a file", "pipe.json": "it is not a file",
		"root.json": "0 skip goes on in a file that is not there", "none.json": "gone.json 0 skip goes on in a file that is not there",
		"zero.json": "leaves the folder", "broken.json": "continued in bad: step 1: field step_id is missing",
	} {
		if got := text(filepath.Join(dir, name)); !strings.Contains(got, want) {
			t.Errorf("%s: got %s, want %q", name, got, want)
		}
	}
}

// TestHostileFolders would fail if a link led out of a folder of jobs, or if
// what is broken there stopped the rest.
func TestHostileFolders(t *testing.T) {
	dir := t.TempDir()
	for _, trial := range []string{"a", "b\x1b[31m", "c", "d", "e"} {
		if err := os.MkdirAll(filepath.Join(dir, trial, "agent"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	good := []byte(`{"schema_version":"ATIF-v1.5","steps":[{"step_id":1,"source":"agent","tool_calls":[{"function_name":"bash","arguments":{"command":"ls"}}]}]}`)
	err := errors.Join(os.Symlink("/etc/passwd", filepath.Join(dir, "a", "agent", "trajectory.json")),
		os.WriteFile(filepath.Join(dir, "b\x1b[31m", "agent", "trajectory.json"), good[:50], 0o600),
		syscall.Mkfifo(filepath.Join(dir, "c", "agent", "trajectory.json"), 0o600),
		os.WriteFile(filepath.Join(dir, "d", "agent", "trajectory.json"), good, 0o600),
		os.Mkdir(filepath.Join(dir, "e", "agent", "trajectory.json"), 0o700))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(text(dir), "\n")
	for i, want := range []string{"escapes", "the file ends in the middle", "it is not a file", "atif d", `1 "ls"`, "it is not a file"} {
		if i >= len(lines) || !strings.Contains(lines[i], want) {
			t.Fatalf("line %d is not %q:\n%s", i, want, strings.Join(lines, "\n"))
		}
	}
	if got := text(t.TempDir()); !strings.Contains(got, "no trajectory is in the folder") {
		t.Error(got)
	}
}

// repeated is a file that isn't anywhere: head, body n times, tail.
type repeated struct {
	head, body, tail string
	n                int64
	at               int64
	// peak is the most memory that was in use at a read.
	peak uint64
}

func (r *repeated) size() int64 { return int64(len(r.head)+len(r.tail)) + r.n*int64(len(r.body)) }

func (r *repeated) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += r.at
	case io.SeekEnd:
		offset += r.size()
	}
	r.at = offset
	return offset, nil
}

func (r *repeated) Read(p []byte) (int, error) {
	if r.at>>22 != (r.at+int64(len(p)))>>22 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		r.peak = max(r.peak, m.HeapAlloc)
	}
	var part string
	switch at := r.at - int64(len(r.head)); {
	case at < 0:
		part = r.head[r.at:]
	case at < r.n*int64(len(r.body)):
		part = r.body[at%int64(len(r.body)):]
	case r.at < r.size():
		part = r.tail[at-r.n*int64(len(r.body)):]
	default:
		return 0, io.EOF
	}
	n := copy(p, part)
	r.at += int64(n)
	return n, nil
}

// TestLargeFiles would fail if a file were held in memory: what is skipped
// isn't, and of outputs no more than a bound is.
func TestLargeFiles(t *testing.T) {
	const mib = 16
	blob := strings.Repeat("x", 1<<20)
	for _, c := range []struct {
		name string
		file repeated
		want string
		most uint64
	}{
		{"what is skipped", repeated{
			head: `{"history":[{"role":"a"}`, body: `,{"content":"` + blob + `"}`, tail: `],"trajectory":[{"action":"ls"}]}`, n: mib,
		}, `1 "ls"`, 12 << 20},
		{"outputs", repeated{
			head: `{"schema_version":"ATIF-v1.5","steps":[{"step_id":1,"source":"user"}`, body: `,{"step_id":2,"source":"agent","message":"` + blob + `"}`, tail: `]}`, n: mib,
		}, fmt.Sprintf("%d events", mib), 12 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			runtime.GC()
			var before runtime.MemStats
			runtime.ReadMemStats(&before)
			var got string
			read("f", &c.file, nil, func(tr *Trajectory, err error) bool {
				got = strings.Join(describe(tr, err), "\n")
				if tr != nil {
					got += fmt.Sprintf("\n%d events", len(tr.Events))
				}
				return true
			})
			if !strings.Contains(got, c.want) {
				t.Errorf("got %.300s, want %q", got, c.want)
			}
			if grew := int64(c.file.peak) - int64(before.HeapAlloc); grew > int64(c.most) {
				t.Errorf("%d MiB were in use for a file of %d MiB", grew>>20, c.file.size()>>20)
			}
		})
	}
}

func FuzzRead(f *testing.F) {
	entries, err := os.ReadDir("testdata")
	if err != nil {
		f.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			continue
		}
		data, err := os.ReadFile(filepath.Join("testdata", e.Name()))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		read("f", bytes.NewReader(data), nil, func(got *Trajectory, err error) bool {
			if (got == nil) == (err == nil) {
				t.Fatalf("neither or both: %v, %v", got, err)
			}
			if err != nil {
				if fault.Is(err, fault.Internal) || !strings.Contains(err.Error(), "f") {
					t.Fatalf("not an error about the file: %v", err)
				}
				return true
			}
			for _, e := range got.Events {
				if n := len(slices.DeleteFunc([]bool{e.Skip != "", e.Command != "", e.Call != nil}, func(is bool) bool { return !is })); n != 1 {
					t.Errorf("an event must have one of a command, a call and a reason: %+v", e)
				}
				if e.Skip != "" && (e.Output != nil || e.ExitCode != nil) {
					t.Errorf("an event that isn't run expects something: %+v", e)
				}
			}
			return true
		})
	})
}

func TestWriteAndReadAgain(t *testing.T) {
	zero, out := 0, "<a> & b\n"
	var b bytes.Buffer
	if err := Write(&b, "s.json", []Line{{Command: "cat x", Cwd: "/w", ExpectExit: &zero, ExpectStdout: &out}}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := Open(path)
	if err != nil || got.Start != "s.json" || got.Events[0].String() != `1 "cat x" in /w exit 0 out "<a> & b\n"` {
		t.Errorf("%v %+v", err, got)
	}
}

func TestCompare(t *testing.T) {
	zero := 0
	text := func(s string) *string { return &s }
	for _, c := range []struct {
		name string
		e    Event
		o    Observed
		want string
	}{
		{"nothing recorded", Event{}, Observed{ExitCode: 1}, ""},
		{"another exit", Event{ExitCode: &zero}, Observed{ExitCode: 2}, "exit 2, recorded 0"},
		{"what a tool clipped", Event{Output: text("a\nb\n<response clipped><NOTE>x")}, Observed{Stdout: "a\nb\nc\nd"}, ""},
		{"a complaint", Event{Output: text("ERROR:\nInvalid `view_range` parameter: 7"), Call: &agenttools.Call{}}, Observed{Stdout: "Invalid `view_range`", Complained: true}, ""},
		{"another complaint", Event{Output: text("The file is edited"), Call: &agenttools.Call{}}, Observed{Stdout: "The path x does not exist", Complained: true}, `line 1 of the output is "The path x does not exist", recorded "The file is edited"`},
		{"a deadline", Event{ExitCode: &zero}, Observed{TimedOut: true}, "it did not end in time"},
		{"what ran on then, too", Event{Output: text("up"), Hung: true}, Observed{TimedOut: true}, ""},
		{"ids, processes and sizes", Event{Output: text("total 8\n[1] 77\nPID: 12\n01234567-89ab-cdef-0123-456789abcdef")}, Observed{Stdout: "total 12\n[1] 4711\nPID: 9\nffffffff-89ab-cdef-0123-456789abcdef"}, ""},
		{"times and hashes", Event{Output: text("Ran 3 tests in 0.012s\n[main 1a2b3c4] x\nat 0x7f00aa\n")}, Observed{Stdout: "Ran 3 tests in 1.5s\n[main 9f8e7d6] x\nat 0x7f11bb"}, ""},
		{"numbers are no hashes", Event{Output: text("12345678")}, Observed{Stdout: "87654321"}, `line 1 of the output is "87654321", recorded "12345678"`},
		{"a line less", Event{Output: text("a\nb")}, Observed{Stdout: "a"}, `line 2 of the output is missing: "b"`},
		{"a line more", Event{Output: text("a")}, Observed{Stdout: "a\nb"}, `line 2 of the output is new: "b"`},
		{"order of two streams", Event{Output: text("err\nout"), Merged: true}, Observed{Stdout: "out\n", Stderr: "err\n"}, ""},
		{"cut output", Event{Output: text("a")}, Observed{Stdout: "b", Cut: true}, ""},
	} {
		if got := c.e.Compare(c.o); got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
}

func TestStartState(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("main.py", "print(1)\n")
	write("good.json", `{"cwd":"/w","files":[{"path":"/w/main.py","from":"main.py"}],"commands":["true"]}`)
	write("out.json", `{"files":[{"path":"/x","from":"../../etc/passwd"}]}`)
	write("relative.json", `{"files":[{"path":"x","content":"y"}]}`)
	write("typo.json", `{"file":[]}`)
	s, err := OpenStart(filepath.Join(dir, "good.json"))
	if err != nil || s.Files[0].Content != "print(1)\n" {
		t.Errorf("%v %+v", err, s)
	}
	for name, want := range map[string]string{"out.json": "escapes", "relative.json": "must begin with /", "typo.json": `unknown field "file"`, "none.json": "no such file"} {
		if _, err := OpenStart(filepath.Join(dir, name)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", name, err, want)
		}
	}
}

// Real files of other programs, where the folder with them lies beside the checkout.
func TestRealFiles(t *testing.T) {
	folder := filepath.Join("..", "..", "..", "shared", "trajectories")
	if _, err := os.Stat(folder); err != nil {
		t.Skip("no folder of recorded trajectories beside the checkout")
	}
	for _, c := range []struct {
		file, format string
		runnable     int // events that can be run again
		all          int
	}{
		{"sweagent_marshmallow-1867_function_calling_replace.traj", "swe-agent", 9, 11},
		{"minisweagent_github_issue.traj.json", "mini-swe-agent", 9, 10},
		{"minisweagent_rfc_example.traj.json", "mini-swe-agent", 2, 3},
		{"openhands_basic_gui_mode.json", "openhands", 4, 5},
		{"openhands_wrong_initial_state.json", "openhands", 3, 4},
		{"openhands_sdk_v1_events.jsonl", "openhands-sdk", 1, 2},
		{"atif_openhands_hello-world.json", "atif", 1, 2},
		{"atif_terminus2_linear-history.json", "atif", 3, 4},
		{"atif_terminus2_linear-history.cont-1.json", "atif", 2, 5},
		{"asciicast_v2_sample.cast", "asciicast-v2", 0, 0},
	} {
		got, err := Open(filepath.Join(folder, c.file))
		if err != nil {
			t.Error(err)
			continue
		}
		skipped := 0
		for _, n := range got.Skipped() {
			skipped += n
		}
		t.Logf("%s: %d events, %v", c.file, len(got.Events), got.Skipped())
		if got.Format != c.format || len(got.Events) != c.all || len(got.Events)-skipped != c.runnable {
			t.Errorf("%s: %s with %d events, %d runnable", c.file, got.Format, len(got.Events), len(got.Events)-skipped)
		}
	}
}

// TestATIFIsReadAgain would fail if what is written as ATIF were another path
// of turns, or if a shared turn counted in two files.
func TestATIFIsReadAgain(t *testing.T) {
	one, zero := 1, 0
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	run := ATIFRun{Run: "tr_1", ID: "nd_5", Agent: "boxwood", Version: "0", Extra: map[string]any{"leaf": "nd_5"}, Turns: []ATIFTurn{
		{ID: "nd_1", Copied: true, At: at},
		{ID: "nd_2", Copied: true, At: at.Add(time.Second), Command: "touch <a>", ExitCode: &zero},
		{ID: "nd_3", At: at.Add(2 * time.Second), Command: "cat \"é\"\n", ExitCode: &one, Output: "<a> & é\n", Extra: map[string]any{"verdict": "none"}},
		{ID: "nd_4", At: at.Add(3 * time.Second), What: "# write 3 bytes to /x"},
		{ID: "nd_5", At: at.Add(4 * time.Second), Command: "xxd", ExitCode: &zero, Output: "\xff\x00"},
		{ID: "nd_6", At: at.Add(5 * time.Second), Command: "yes", ExitCode: &zero, Output: "y\n", Cut: true},
	}}
	var b bytes.Buffer
	if err := WriteATIF(&b, run); err != nil {
		t.Fatal(err)
	}
	// Harbor's own models read this file, too: test_harbor.py.
	golden := filepath.Join("testdata", "atif-written.json")
	if *update {
		if err := os.WriteFile(golden, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if kept, err := os.ReadFile(golden); err != nil || string(kept) != b.String() {
		t.Errorf("%s isn't what is written (-update writes it), %v:\n%s", golden, err, &b)
	}
	got, err := readText(t, "a.json", b.String())
	if err != nil {
		t.Fatalf("%v in\n%s", err, &b)
	}
	want := []string{
		"atif",
		"2 at 1s skip context copied from an earlier file",
		`3 at 2s "cat \"é\"\n" exit 1 out "<a> & é\n"`,
		"4 at 3s skip a tool of the agent (boxwood_turn)",
		`5 at 4s "xxd" exit 0`,
		`6 at 5s "yes" exit 0`,
		"other 1 step of source system",
	}
	if lines := describe(got, nil); !slices.Equal(lines, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(lines, "\n"), strings.Join(want, "\n"))
	}
	for _, part := range []string{`"node":"nd_3"`, `"verdict":"none"`, `"session_id":"tr_1"`, `"trajectory_id":"nd_5"`, `"timestamp":"2026-01-02T03:04:07.000000Z"`} {
		if !strings.Contains(b.String(), part) {
			t.Errorf("%s is not in\n%s", part, &b)
		}
	}
}
