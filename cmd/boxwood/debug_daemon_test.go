package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// branch makes a tree and runs lines as turns of its sandbox; nodes[0] is the root.
func (d *served) branch(t *testing.T, session bool, lines ...string) (sandbox string, nodes []string) {
	t.Helper()
	out, errOut, status := d.run("tree", "new", "--image", "mini")
	if status != 0 {
		t.Fatal(errOut)
	}
	for line := range strings.Lines(out) {
		switch f := strings.Fields(line); f[0] {
		case "root":
			nodes = append(nodes, f[1])
		case "sandbox":
			sandbox = f[1]
		}
	}
	for _, line := range lines {
		args := []string{"exec", sandbox, "--wait-captured", "--json", "-c", line}
		if session {
			args = append(args, "--session", "main")
		}
		out, errOut, _ := d.run(args...)
		_, id, ok := strings.Cut(out, `"id": "`)
		if !ok {
			t.Fatalf("%s: %s %s", line, out, errOut)
		}
		id, _, _ = strings.Cut(id, `"`)
		nodes = append(nodes, id)
	}
	return sandbox, nodes
}

// If it fails, diff misses what differs between two nodes, or calls equal ones different.
func TestDiff(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := startServed(t)
	_, n := d.branch(t, true,
		"mkdir -p /work/old; cd /work; printf 'a\\nb\\nc\\n' >text; echo x >gone; head -c 2000 /dev/zero >binary; chmod 600 text; x=1",
		"true",
		`printf 'a\nB\nc\n' >text; rm -r gone old; printf '\0\1' >binary; chmod 755 text; ln -s text link; printf '\033[2J' >'odd name'; echo new >new; x=2; f() { echo hi; }; echo s >/dev/shm/s`,
		"sleep 1000 >/dev/null 2>&1 & disown")
	if out, errOut, status := d.run("diff", n[1], n[2]); status != 0 || out != "nothing differs\n" || errOut != "" {
		t.Errorf("status %d, %s\n%s", status, errOut, out)
	}
	diff := func(want int, args ...string) string {
		t.Helper()
		out, errOut, status := d.run(append([]string{"diff"}, args...)...)
		if status != want || errOut != "" {
			t.Errorf("diff %v: status %d, %s\n%s", args, status, errOut, out)
		}
		return out
	}
	out := diff(1, n[3])
	want := `+ /dev/shm/s  file 0644 0:0, 2 bytes, sha256 cbc80bb5c0c0
    @@ -0,0 +1 @@
    +s
~ /work/binary  content: 2000 bytes, sha256 2da42fb1d7bd -> 2 bytes, sha256 b413f47d13ee
- /work/gone  file 0644 0:0, 2 bytes, sha256 73cb3858a687
    @@ -1 +0,0 @@
    -x
+ /work/link  link 0777 0:0 to text
+ /work/new  file 0644 0:0, 4 bytes, sha256 7aa7a5359173
    @@ -0,0 +1 @@
    +new
+ /work/odd name  file 0644 0:0, 4 bytes, sha256 05704e8a84c0
    @@ -0,0 +1 @@
    +\x1b[2J
    \ No newline at end of file
- /work/old  dir 0755 0:0
~ /work/text  content: 6 bytes, sha256 880553fca8fc -> 6 bytes, sha256 4c6508965080; mode: 0600 -> 0755
    @@ -1,3 +1,3 @@
     a
    -b
    +B
     c
~ session main
    -declare -- x="1"
    +declare -- x="2"
    +f () 
    +{ 
    +    echo hi
    +}
`
	if out != want {
		t.Errorf("got\n%s", out)
	}
	if out := diff(1, n[4]); strings.Count(out, "\n") != 1 || !strings.HasPrefix(out, "+ process ") || !strings.HasSuffix(out, " uid 0 in /work: sleep 1000 \n") {
		t.Errorf("a process that came: %s", out)
	}
	diff(0, n[4], n[4])
	var parsed difference
	if out := diff(1, n[3], n[2], "--json"); json.Unmarshal([]byte(out), &parsed) != nil || len(parsed.Files) != 8 || parsed.Files[0].After != nil ||
		parsed.Files[0].Before.GetSize() != 2 || len(parsed.Sessions) != 1 {
		t.Errorf("%s", out)
	}
	_, other := d.branch(t, false, "mkdir /work; setfattr -n user.k -v w /work 2>/dev/null; touch -d @5 /work/t", "touch -d @6 /work/t")
	if out := diff(1, other[2]); out != "~ /work/t  time: 1970-01-01T00:00:05Z -> 1970-01-01T00:00:06Z\n" {
		t.Errorf("a time alone: %s", out)
	}
	if out := diff(1, n[0], other[1]); !strings.HasPrefix(out, "+ /work  dir 0755 0:0\n+ /work/t  file ") {
		t.Errorf("of two trees: %s", out)
	}
	if _, errOut, status := d.run("prune", "--release", other[2]); status != 0 {
		t.Fatal(errOut)
	}
	for _, c := range []struct{ args, want string }{
		{n[0], "which has no parent"}, {other[2], "no node "}, {"nd_nonsense", "not the id of a node"}, {n[0] + " tr_x", "tr_x"},
	} {
		out, errOut, status := d.run(append([]string{"diff"}, strings.Fields(c.args)...)...)
		if status != failureStatus || out != "" || !strings.Contains(errOut, c.want) || strings.Count(errOut, "boxwood: ") != 1 {
			t.Errorf("diff %s: status %d, %s", c.args, status, errOut)
		}
	}
	list, err := d.client.ListSandboxes(context.Background(), &pb.ListSandboxesRequest{})
	if err != nil || slices.ContainsFunc(list.Sandboxes, func(s *pb.Sandbox) bool { return s.Scratch }) {
		t.Errorf("scratch forks are left: %v, %v", list, err)
	}
}

// If it fails, explain doesn't say why a node is as it is.
func TestExplain(t *testing.T) {
	d := startServed(t)
	_, n := d.branch(t, false, "echo a >/root/a; printf '\\033[2J'", "true")
	explain := func(id string, wants ...string) {
		t.Helper()
		out, errOut, status := d.run("explain", id)
		if status != 0 || errOut != "" || strings.ContainsAny(out, "\x1b\x07") {
			t.Errorf("status %d, %s\n%q", status, errOut, out)
		}
		for _, want := range wants {
			if !strings.Contains(out, want) {
				t.Errorf("explain %s lacks %q:\n%s", id, want, out)
			}
		}
	}
	if out, errOut, status := d.run("fork", n[1]); status != 0 {
		t.Fatal(out, errOut)
	}
	explain(n[0], "is the root of tree", "has a checkpoint of its own")
	explain(n[1], "is turn 1 of its path", `ended with exit status 0`, "Verdict files: files changed since", "It has a checkpoint of its own, ck_", "no processes",
		"The client waited ", "Its capture (ok) waited ", "It was forked: 1 children came to be, 0 failed.", "Effects of the turn, 1 in all:\n  file created /root/a")
	explain(n[2], "Verdict none: nothing", "its state is that of "+n[1])
	out, errOut, status := d.run("explain", n[1], "--json")
	var s struct {
		Node struct{ ID string }
		Rows map[string][]map[string]any
		Told []string
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil || status != 0 || s.Node.ID != n[1] || len(s.Rows["turns"]) != 1 || len(s.Rows["captures"]) != 1 || len(s.Told) < 5 {
		t.Errorf("status %d, %v, %s\n%s", status, err, errOut, out)
	}
	if _, errOut, status := d.run("prune", "--states", "--release", n[1]); status != 0 {
		t.Fatal(errOut)
	}
	explain(n[2], "It is withheld, since it can't be restored exactly: ", "The nearest node that can be forked is "+n[0]+", 2 turns before")
	for _, id := range []string{"nd_01kb0000000000000000000001", "tr_x", ""} {
		if out, errOut, status := d.run("explain", id); status != failureStatus || out != "" || strings.Count(errOut, "boxwood: ") != 1 {
			t.Errorf("explain %q: status %d, %s %s", id, status, out, errOut)
		}
	}
}

// terminal is one end of a terminal that this process isn't in.
func openTerminal(t *testing.T, rows, cols uint16) (keyboard, screen *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keyboard.Close() })
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	if screen, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { screen.Close() })
	resizeTerminal(t, keyboard, rows, cols)
	return keyboard, screen
}

func resizeTerminal(t *testing.T, keyboard *os.File, rows, cols uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(keyboard.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		t.Fatal(err)
	}
}

// If it fails, a shell at a node is no terminal, touches the node, or leaves a sandbox or the user's terminal otherwise than before.
func TestShell(t *testing.T) {
	d := startServed(t)
	_, n := d.branch(t, false, "echo here >/root/file")
	if _, errOut, status := d.run("shell", n[1]); status != failureStatus || !strings.Contains(errOut, "needs a terminal") {
		t.Errorf("without a terminal: status %d, %s", status, errOut)
	}
	keyboard, screen := openTerminal(t, 31, 91)
	before, err := unix.IoctlGetTermios(int(screen.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	start := func(node string) <-chan int {
		ended := make(chan int, 1)
		go func() {
			a := &app{in: screen, out: screen, err: io.Discard, getenv: func(string) string { return "" }}
			a.width = columns(screen)
			ended <- execute(context.Background(), []string{"--address", d.address, "shell", node}, a)
		}()
		return ended
	}
	said := ""
	heard := func(want string) {
		t.Helper()
		for buf := make([]byte, 4096); !strings.Contains(said, want); {
			k, err := keyboard.Read(buf)
			if said += string(buf[:k]); err != nil {
				t.Fatalf("%v after %q", err, said)
			}
		}
	}
	press := func(keys string) {
		if _, err := keyboard.WriteString(keys); err != nil {
			t.Fatal(err)
		}
	}
	ended := start(n[1])
	press("PS1='ready> '; cat /root/file; ls /dev/null; echo $LINES by $COLUMNS\r")
	heard("31 by 91\r\n")
	heard("ready> ")
	press("sleep 1000\r")
	heard("sleep 1000\r\n")
	press("\x03") // it reaches sleep in there, and not this program
	heard("^C")
	resizeTerminal(t, keyboard, 17, 60)
	if err := unix.Kill(os.Getpid(), unix.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	press("until [ \"$COLUMNS\" = 60 ]; do ls /dev/null; done; echo $LINES times $COLUMNS\r")
	heard("17 times 60")
	press("rm /root/file; exit 7\r")
	if status := <-ended; status != 7 {
		t.Errorf("status %d after %q", status, said)
	}
	if !strings.Contains(said, "here\r\n") {
		t.Errorf("the node's file isn't there: %q", said)
	}
	after, err := unix.IoctlGetTermios(int(screen.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("the terminal is left otherwise: %v, %v", after, err)
	}
	if out, errOut, status := d.run("diff", n[1], n[1]); status != 0 {
		t.Errorf("status %d, %s%s", status, out, errOut)
	}
	list, err := d.client.ListSandboxes(context.Background(), &pb.ListSandboxesRequest{})
	if err != nil || slices.ContainsFunc(list.Sandboxes, func(s *pb.Sandbox) bool { return s.Scratch }) {
		t.Errorf("scratch forks are left: %v, %v", list, err)
	}
	if status := <-start("nd_01kb0000000000000000000001"); status != failureStatus {
		t.Errorf("status %d", status)
	}
}

// cliArgs makes this test binary the program `boxwood`, for scripts.
const cliArgs = "BOXWOOD_TEST_CLI"

// page gives the commands of a page that a test follows, as it has them.
func page(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var commands strings.Builder
	blocks := strings.Split(string(text), "<!-- followed by "+t.Name()+" -->\n```console\n")
	for _, b := range blocks[1:] {
		block, _, _ := strings.Cut(b, "```")
		for line := range strings.Lines(block) {
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				commands.WriteString(command)
			}
		}
	}
	if len(blocks) < 4 {
		t.Fatalf("%s shows %d blocks to follow", file, len(blocks)-1)
	}
	return commands.String()
}

// A wrong branch, of which the seventh of twelve turns silently broke a file: who follows docs/DEBUGGING.md, command by
// command, finds the turn and what it did.
func TestTheDebuggingPage(t *testing.T) {
	d := startServed(t)
	_, n := d.branch(t, false,
		"printf 'name=app\nport=8080\nlog=info\n' >/etc/app.conf", "mkdir -p /work/src; echo 'int main;' >/work/src/a.c", "ls /work", "echo '#' >>/work/src/a.c",
		"printf '%s\n' 'cp /work/src/a.c /work/a.out' 'while read -r l; do echo ${l/80/81}; done </etc/app.conf >/etc/app.new; mv /etc/app.new /etc/app.conf' >/work/build.sh",
		"cat /work/src/a.c", "bash /work/build.sh", "echo 'int b;' >/work/src/b.c", "ls -l /work", "true", "echo done >/work/notes", "cat /work/notes")
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := fmt.Sprintf("#!/bin/bash\nexec env %s=1 %s \"$@\"\n", cliArgs, self)
	if err := os.WriteFile(filepath.Join(dir, "boxwood"), []byte(program), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", page(t, "../../docs/DEBUGGING.md"))
	c.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "BOXWOOD_ADDRESS="+d.address, "LEAF="+n[12], "ACTION=bash /work/build.sh")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{
		"the first bad turn is " + n[7] + "\n", "~ /etc/app.conf  content: ", "    -port=8080\n    +port=8180\n",
		n[7] + " is turn 7 of its path", `It ran "bash /work/build.sh", which ended with exit status 0`, "Verdict files: ", "came out with 0\n",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("what the page's commands say lacks %q:\n%s", want, out)
		}
	}
	if got := strings.Count(string(out), "came out with 0\n"); got != 4 {
		t.Errorf("the turn ran again %d times", got)
	}
}

// contents of a bundle, by name.
func contents(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		all[h.Name] = string(data)
	}
}

// If it fails, a bundle lacks what a report needs, or holds what nobody asked for: a secret, files, other trees.
func TestBundle(t *testing.T) {
	d := startServed(t)
	dir := t.TempDir()
	sandbox, n := d.branch(t, false, "echo in-a-file >/root/a", "echo shown", "true")
	_, other := d.branch(t, false, "echo of-another-tree")
	const secret = "canary-of-the-bundle-5b1d"
	t.Setenv("TOKEN", secret)
	if out, errOut, status := d.run("exec", sandbox, "--wait-captured", "--session", "main", "--secret-env", "TOKEN", "-c", `echo "$TOKEN"; x=$TOKEN`); status != 0 || out != "[secret TOKEN]\n" {
		t.Fatal(status, out, errOut)
	}
	out, errOut, status := d.run("sandbox", "list", "--json")
	var list struct {
		Sandboxes []struct {
			ID   string `json:"id"`
			Head string `json:"head_id"`
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil || status != 0 {
		t.Fatal(err, errOut)
	}
	leaf := ""
	for _, s := range list.Sandboxes {
		if s.ID == sandbox {
			leaf = s.Head
		}
	}
	state := filepath.Join(filepath.Dir(d.address), "state")
	audit := filepath.Join(state, "audit")
	if err := os.MkdirAll(audit, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{n[1] + ".json": "{}", other[1] + ".json": "{}", "ps_x.json": `{"Node": "` + n[2] + `"}`} {
		if err := os.WriteFile(filepath.Join(audit, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	bundle := func(name string, args ...string) map[string]string {
		t.Helper()
		file := filepath.Join(dir, name)
		out, errOut, status := d.run(append([]string{"bundle", leaf, "-o", file, "--log", d.log(), "--state", state}, args...)...)
		if status != 0 || out != file+"\n" || errOut != "" {
			t.Fatalf("status %d, %s%s", status, out, errOut)
		}
		all := contents(t, file)
		for name, text := range all {
			if strings.Contains(text, secret) {
				t.Errorf("a secret is in %s of the bundle", name)
			}
			if strings.Contains(text, other[1]) {
				t.Errorf("%s tells of another tree", name)
			}
		}
		return all
	}
	all := bundle("plain.tar.gz")
	for name, want := range map[string]string{
		"explain.txt": leaf + " is turn 5", "explain.json": `"told"`, "path.json": n[1], "daemon.json": `"capabilities"`, "client.json": fullVersion(),
		"rows.json": n[2], "log.txt": sandbox, "audit/" + n[1] + ".json": "{}", "audit/ps_x.json": n[2],
	} {
		if !strings.Contains(all[name], want) {
			t.Errorf("%s lacks %q: %.2000s", name, want, all[name])
		}
	}
	if len(all) != 9 || strings.Contains(fmt.Sprint(all), "in-a-file\n") {
		t.Errorf("the bundle holds more than it says: %v", slices.Collect(maps.Keys(all)))
	}
	if all = bundle("state.tar.gz", "--with-state"); len(all) != 10 || len(all["state.tree"]) < 500 {
		t.Errorf("%d parts, %d bytes of state", len(all), len(all["state.tree"]))
	}
	for _, bad := range [][]string{{"nd_01kb0000000000000000000001"}, {leaf, "--log", "/no/such"}, {leaf, "-o", "/no/such/dir"}} {
		out, errOut, status := d.run(append([]string{"bundle", "-o", filepath.Join(dir, "bad")}, bad...)...)
		if status != failureStatus || out != "" || strings.Count(errOut, "boxwood: ") != 1 {
			t.Errorf("%v: status %d, %s%s", bad, status, out, errOut)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*bad*")); len(left) > 0 {
		t.Errorf("a bundle that failed left %v", left)
	}
}
