package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// ours makes a trajectory of our format of commands that all end well.
func ours(t *testing.T, commands ...string) string {
	text := `{"format":"boxwood-trajectory-1"}` + "\n"
	for _, c := range commands {
		text += fmt.Sprintf(`{"command":%q,"expect_exit":0}`, c) + "\n"
	}
	return writeText(t, "ours.jsonl", text)
}

// If it fails, --verify calls nodes exact that aren't, of which a saboteur makes one in a hundred, or finds fault with
// those that are.
func TestReplayVerifies(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := startServed(t)
	t.Run("files", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		var commands []string
		for i := range 101 {
			commands = append(commands, fmt.Sprintf("echo %d >>/root/log", i))
		}
		_, o := d.replay(0, "--verify", ours(t, append(commands, "true")...))
		v := o.Verified
		if v == nil || v.Nodes != 102 || v.Exact != 102 || v.ExactPct != 100 || v.ChatOnlyPct != 0 || v.FilesOnlyPct != 100 || len(v.By) != 2 {
			t.Errorf("%+v", v)
		}
	})
	t.Run("a shell and a server", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		file := ours(t, "true", "x=5; cd /root", "echo $x >a", "true", "sleep 1000 >/dev/null 2>&1 & disown", "echo b >b; echo c >/dev/shm/c", "kill $!; wait; rm a")
		_, o := d.replay(0, "--verify", "--shell", "kept", file)
		v := o.Verified
		// That the session is opened is a node, too.
		if v == nil || v.Nodes != 8 || v.Exact != 8 || v.ChatOnlyPct != 0 || v.FilesOnlyPct != 0 {
			t.Errorf("%+v", v)
		}
		_, o = d.replay(0, "--verify", "--shell", "kept", "--mode", "files", file)
		if v := o.Verified; v == nil || v.Nodes != 8 || v.Withheld != 8 || v.WithheldPct != 100 || v.ExactPct != 0 {
			t.Errorf("files only: %+v", v)
		}
		out, errOut, status := d.run("replay", "--image", "mini", "--verify", "--mode", "uncaptured", ours(t, "true", "echo a >/root/a", "true", "rm /root/a"))
		if status != 0 || !strings.Contains(out, "of 4 nodes 2 fork exactly (50.0 %), 2 are withheld (50.0 %), 0 failed, 0 differ, 0 didn't stand still; "+
			"the conversation alone would have come back to 50.0 %, files alone to 100.0 %\n") {
			t.Errorf("status %d, %s\n%s", status, errOut, out)
		}
	})
	t.Run("what moves by itself", func(t *testing.T) {
		d := &served{t, d.address, d.client}
		_, o := d.replay(0, "--verify", ours(t, "(while :; do date >/root/now; done) >/dev/null 2>&1 &"))
		if v := o.Verified; v == nil || v.Nodes != 1 || v.Exact != 0 || v.Different != 0 || v.Unsettled+v.Withheld+v.Failed != 1 {
			t.Errorf("%+v", v)
		}
	})
	if _, errOut, status := d.run("replay", "--verify", "--run", "x", "--image", "mini", ours(t, "true")); status != failureStatus || !strings.Contains(errOut, "leave out --run") {
		t.Errorf("status %d, %s", status, errOut)
	}
}
