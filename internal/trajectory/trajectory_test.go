package trajectory

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

const (
	ours = `{"format":"boxwood-trajectory-1","start":"start.json"}
{"command":"ls","cwd":"/work","expect_exit":0,"expect_stdout":"a\n"}

{"command":"false","expect_exit":1}`
	sweAgent = `{"environment":"main","trajectory":[
{"action":"ls -F\n","observation":"a.py\r\n","state":{"working_dir":"/testbed"}},
{"action":"edit 1:2","observation":"done","state":"{\"working_dir\": \"/testbed/src\"}"},
{"action":"pytest","observation":"ok","state":{}}]}`
	mini = `{"trajectory_format":"mini-swe-agent-1","messages":[{"role":"system","content":"s"},
{"role":"assistant","content":"THOUGHT\n\n` + "```bash\\nls -la\\n```" + `"},
{"role":"user","content":[{"type":"text","text":"<returncode>2</returncode>\n<output>\nno\n</output>"}]},
{"role":"assistant","content":"thinking only"},{"role":"user","content":"format!"},
{"role":"assistant","content":"` + "```bash\\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\n```" + `"}]}`
	mini11 = `{"trajectory_format":"mini-swe-agent-1.1","messages":[
{"role":"assistant","content":"","extra":{"actions":[{"command":"a"},{"command":"b"}]}},
{"role":"tool","content":"x","extra":{"returncode":0,"raw_output":"A"}},
{"role":"tool","content":"y","extra":{"returncode":3,"raw_output":"B"}}]}`
	bare = `[{"role":"user","content":"t"},{"role":"assistant","content":"` + "```mswea_bash_command\\npwd\\n```" + `"}]`
	atif = `{"schema_version":"ATIF-v1.5","steps":[{"step_id":1,"source":"user","message":"hi"},
{"step_id":2,"source":"agent","message":"m","tool_calls":[
 {"tool_call_id":"1","function_name":"execute_bash","arguments":{"command":"ls"}},
 {"tool_call_id":"2","function_name":"think","arguments":{"thought":"x"}}],
 "observation":{"results":[{"source_call_id":"1","content":"a"}]}},
{"step_id":3,"source":"agent","message":"{\"commands\":[{\"keystrokes\":\"mkdir d\\n\"},{\"keystrokes\":\"q\"},{\"keystrokes\":\"\"}]}"},
{"step_id":4,"source":"agent","is_copied_context":true,"message":"m","tool_calls":[{"tool_call_id":"3","function_name":"bash","arguments":{"command":"ls"}}]}]}`
	openHands = `[{"id":0,"source":"user","action":"message","args":{"content":"x"}},
{"id":3,"source":"agent","action":"run","args":{"command":"ls"}},
{"id":4,"source":"agent","observation":"run","cause":3,"content":"a\n","extras":{"metadata":{"exit_code":0}}},
{"id":5,"source":"agent","action":"edit","args":{"path":"/a"}},
{"id":6,"source":"agent","action":"run","args":{"command":"C-c","is_input":"true"}}]`
)

func (e Event) String() string {
	if e.Skip != "" {
		return fmt.Sprintf("%d skip %s", e.Step, e.Skip)
	}
	s := fmt.Sprintf("%d %q in %q", e.Step, e.Command, e.Cwd)
	if e.ExitCode != nil {
		s += fmt.Sprintf(" exit %d", *e.ExitCode)
	}
	if e.Output != nil {
		s += fmt.Sprintf(" out %q", *e.Output)
	}
	return s
}

func TestFormats(t *testing.T) {
	for _, c := range []struct {
		name, in, format string
		want             []string
	}{
		{"ours", ours, "boxwood-trajectory-1", []string{`1 "ls" in "/work" exit 0 out "a\n"`, `2 "false" in "" exit 1`}},
		{"SWE-agent", sweAgent, "swe-agent", []string{`1 "ls -F" in "" out "a.py\r\n"`, `2 skip a tool of SWE-agent (edit)`, `3 "pytest" in "/testbed/src" out "ok"`}},
		{"mini-swe-agent 1", mini, "mini-swe-agent", []string{`2 "ls -la" in "" exit 2 out "no\n"`, "4 skip a message without a command", "6 skip the agent's submission"}},
		{"mini-swe-agent 1.1", mini11, "mini-swe-agent", []string{`1 "a" in "" exit 0 out "A"`, `1 "b" in "" exit 3 out "B"`}},
		{"mini-swe-agent list", bare, "mini-swe-agent", []string{`2 "pwd" in ""`}},
		{"ATIF", atif, "atif", []string{`2 "ls" in "" out "a"`, "2 skip a tool of the agent (think)", `3 "mkdir d" in ""`,
			"3 skip keystrokes that are not a command line", "3 skip keystrokes that only wait", "4 skip context copied from an earlier file"}},
		{"OpenHands", openHands, "openhands", []string{`3 "ls" in "" exit 0 out "a\n"`, "5 skip a tool of the agent (edit)", "6 skip input to a running command"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Read("file", strings.NewReader(c.in))
			if err != nil {
				t.Fatal(err)
			}
			if got.Format != c.format {
				t.Errorf("format %q, want %q", got.Format, c.format)
			}
			var events []string
			for _, e := range got.Events {
				events = append(events, e.String())
			}
			if a, b := strings.Join(events, "\n"), strings.Join(c.want, "\n"); a != b {
				t.Errorf("got\n%s\nwant\n%s", a, b)
			}
		})
	}
}

func TestBadFiles(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"empty", " \n", "it is empty"},
		{"truncated", "{\"trajectory\": [\n{\"action\": \"l", "line 2"},
		{"not an object", `"text"`, "string"},
		{"another object", `{"a": 1}`, "no format that is known"},
		{"wrong type", `{"trajectory": [{"action": 5}]}`, "field trajectory.action must not be a number"},
		{"missing field", `{"trajectory": [{"observation": ""}]}`, "step 1: field action is missing"},
		{"newer mini", `{"trajectory_format":"mini-swe-agent-9","messages":[]}`, `version "mini-swe-agent-9" is not known`},
		{"newer ATIF", `{"schema_version":"ATIF-v1.99","steps":[]}`, "newer than ATIF-v1.8"},
		{"newer ours", `{"format":"boxwood-trajectory-2"}`, "newer than this program"},
		{"mistyped expectation", ours + "\n" + `{"command":"x","expected_exit":1}`, `line 5: json: unknown field "expected_exit"`},
		{"no command", ours + "\n" + `{"cwd":"/"}`, "line 5: field command is missing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Read("recorded.json", strings.NewReader(c.in))
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "recorded.json") {
				t.Errorf("got %v, want it to name the file and say %q", err, c.want)
			}
			if fault.Is(err, fault.Internal) || strings.Contains(fmt.Sprint(err), "\n") {
				t.Errorf("not one line about the file: %v", err)
			}
		})
	}
}

func FuzzRead(f *testing.F) {
	for _, s := range []string{ours, sweAgent, mini, mini11, bare, atif, openHands} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := Read("f", bytes.NewReader(data))
		if err != nil {
			return
		}
		for _, e := range got.Events {
			if (e.Skip == "") == (e.Command == "") {
				t.Errorf("an event must have either a command or a reason: %+v", e)
			}
		}
	})
}

func TestWriteAndReadAgain(t *testing.T) {
	zero, out := 0, "<a> & b\n"
	var b bytes.Buffer
	if err := Write(&b, "s.json", []Line{{Command: "cat x", Cwd: "/w", ExpectExit: &zero, ExpectStdout: &out}}); err != nil {
		t.Fatal(err)
	}
	got, err := Read("f", &b)
	if err != nil || got.Start != "s.json" || got.Events[0].String() != `1 "cat x" in "/w" exit 0 out "<a> & b\n"` {
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
		{"sweagent_marshmallow-1867_function_calling_replace.traj", "swe-agent", 4, 11},
		{"minisweagent_github_issue.traj.json", "mini-swe-agent", 9, 10},
		{"minisweagent_rfc_example.traj.json", "mini-swe-agent", 2, 3},
		{"openhands_basic_gui_mode.json", "openhands", -1, -1},
		{"openhands_wrong_initial_state.json", "openhands", -1, -1},
		{"atif_openhands_hello-world.json", "atif", -1, -1},
		{"atif_terminus2_linear-history.json", "atif", -1, -1},
		{"atif_terminus2_linear-history.cont-1.json", "atif", -1, -1},
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
		if got.Format != c.format || c.all >= 0 && (len(got.Events) != c.all || len(got.Events)-skipped != c.runnable) {
			t.Errorf("%s: %s with %d events, %d runnable", c.file, got.Format, len(got.Events), len(got.Events)-skipped)
		}
	}
}
