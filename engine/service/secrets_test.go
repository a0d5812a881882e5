package service

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// canary is a secret, and the ways in which it could be written down.
type canary struct{ value string }

func (c canary) in(p []byte) string {
	for how, form := range map[string]string{
		"as it is": c.value, "in hex": hex.EncodeToString([]byte(c.value)),
		"in base64": base64.StdEncoding.EncodeToString([]byte(c.value[:len(c.value)/3*3])),
		// 1 or 2 bytes of something else before it: what those bytes make is left out.
		"in base64 behind 1 byte":  base64.StdEncoding.EncodeToString([]byte("x" + c.value))[4:28],
		"in base64 behind 2 bytes": base64.StdEncoding.EncodeToString([]byte("xx" + c.value))[4:28],
	} {
		if bytes.Contains(p, []byte(form)) {
			return how
		}
	}
	return ""
}

// under looks through all files below a folder, holes aside.
func (c canary) under(t *testing.T, dir string, except ...string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		for _, fine := range except {
			if path == fine {
				return nil
			}
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		const piece, overlap = 1 << 20, 256
		buf := make([]byte, piece+overlap)
		for at := int64(0); ; {
			if at, err = unix.Seek(int(f.Fd()), at, unix.SEEK_DATA); err == unix.ENXIO {
				return nil
			} else if err != nil {
				return err
			}
			n, err := f.ReadAt(buf, at)
			if how := c.in(buf[:n]); how != "" {
				t.Errorf("a secret is in %s at %d, %s", path, at, how)
				return nil
			}
			if err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			at += piece
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (c canary) inMessage(t *testing.T, what string, m proto.Message) {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if how := c.in(b); how != "" {
		t.Errorf("a secret is in %s, %s", what, how)
	}
}

// everywhere looks at all that a client can get of a tree.
func (c canary) everywhere(t *testing.T, d *daemon, tree string) {
	t.Helper()
	nodes, err := d.client.ListNodes(ctx(t), &boxwoodv1.ListNodesRequest{TreeId: tree})
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for {
		n, err := nodes.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		count++
		c.inMessage(t, "node "+n.GetId(), n)
	}
	if count < 2 {
		t.Fatalf("the tree has %d nodes", count)
	}
	if how := c.in(d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: tree})); how != "" {
		t.Errorf("a secret is in the tree's archive, %s", how)
	}
	tables, err := d.client.ListTables(ctx(t), &boxwoodv1.ListTablesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables.GetTables() {
		stream, err := d.client.ExportStats(ctx(t), &boxwoodv1.ExportStatsRequest{Table: table.GetName()})
		if err != nil {
			t.Fatal(err)
		}
		var all []byte
		for {
			m, err := stream.Recv()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, m.GetData()...)
		}
		if how := c.in(all); how != "" || len(all) == 0 {
			t.Errorf("a secret is in the %d bytes of the table %s %s", len(all), table.GetName(), how)
		}
	}
	if how := c.in([]byte(d.log.String())); how != "" {
		t.Errorf("a secret is in the daemon's log, %s", how)
	}
}

// What a client gives as a secret reaches the processes that it is for, their forks included, and nothing that is kept.
func TestSecretsAreKeptNowhere(t *testing.T) {
	c := canary{"canary-" + strings.ToLower(t.Name()) + `-"$7'f3a91c` + "\n" + "second-line-88c2"}
	// What is looked for is a part of it that no quoting changes.
	shown := canary{"canary-" + strings.ToLower(t.Name())}
	sum := fmt.Sprintf("%x", sha256.Sum256([]byte(c.value)))
	d := startDaemon(t, "")
	d.importRoot(t)
	root, box := d.newTree(t)
	tree, sb := root.GetTreeId(), box.GetId()
	env := map[string]string{"TOKEN": c.value}

	run := func(key, text string) *boxwoodv1.Node {
		t.Helper()
		req := &boxwoodv1.RunTurnRequest{SandboxId: sb, IdempotencyKey: key, Command: &boxwoodv1.Command{Shell: []byte(text), SecretEnv: env}}
		r, err := d.tryRun(t, req)
		if err != nil {
			t.Fatal(err)
		}
		if how := shown.in(r.GetNode().GetObservation().GetStdout()); how != "" {
			t.Errorf("%q shows the secret %s", text, how)
		}
		return r.GetNode()
	}
	hash := `printf %s "$TOKEN" | sha256sum`
	if n := run("given", hash); !strings.HasPrefix(string(n.GetObservation().GetStdout()), sum) {
		t.Errorf("the command got another value: %q", n.GetObservation().GetStdout())
	}
	if n := run("", `echo "a ${TOKEN} b"; declare -p TOKEN; printf %q "$TOKEN" >&2; exec 3>&1; printf %s "${TOKEN:0:9}"; sleep 0.05; printf %s "${TOKEN:9}"`); !strings.HasPrefix(string(n.GetObservation().GetStdout()), "a [secret TOKEN] b\n") {
		t.Errorf("what shows in its place is %q", n.GetObservation().GetStdout())
	}
	run("given", hash) // answered from the log, whose digest of the request has no secret in it

	// A session has it, and its forks have it: also in what the shell made of it.
	d.open(t, sb, "main", func(r *boxwoodv1.OpenSessionRequest) { r.SecretEnv = env })
	d.say(t, sb, "main", `header="Bearer $TOKEN"; trap "echo '$TOKEN' >/dev/null" USR1; show() { printf %s "$TOKEN"; }; list=(1 "$TOKEN")`)
	n := d.kept(t, d.say(t, sb, "main", "x=1").GetNode(), shellsKind)
	if out := d.hear(t, sb, "main", "echo $TOKEN; set"); shown.in([]byte(out)) != "" {
		t.Error("a session shows the secret")
	}
	check := func(sandbox string) {
		t.Helper()
		for _, text := range []string{hash, `show | sha256sum`, `printf %s "${header#Bearer }" | sha256sum`, `printf %s "${list[1]}" | sha256sum`} {
			if got := d.hear(t, sandbox, "main", text); !strings.HasPrefix(got, sum) {
				t.Errorf("%s: %q instead of %s", text, got, sum)
			}
		}
	}
	check(sb)
	check(d.fork(t, n.GetId(), 1)[0].GetId())

	for _, bad := range []struct {
		name string
		c    *boxwoodv1.Command
	}{
		{"secret_in_argv", &boxwoodv1.Command{Argv: [][]byte{[]byte("echo"), []byte("x" + c.value)}}},
		{"secret_in_argv", &boxwoodv1.Command{Shell: []byte("echo '" + c.value + "'"), SecretEnv: env}},
		{"secret_in_argv", &boxwoodv1.Command{Shell: []byte("true"), Env: map[string]string{"PLAIN": c.value}}},
		{"bad_secret", &boxwoodv1.Command{Shell: []byte("true"), SecretEnv: map[string]string{"SHORT": "1234567"}}},
		{"bad_secret", &boxwoodv1.Command{Shell: []byte("true"), SecretEnv: map[string]string{"a b": c.value}}},
		{"bad_command", &boxwoodv1.Command{Shell: []byte("true"), Session: "main", SecretEnv: env}},
	} {
		_, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb, Command: bad.c})
		if reason(err) != bad.name {
			t.Errorf("%v came to %v instead of %s", bad.c, err, bad.name)
		}
		if err != nil && shown.in([]byte(err.Error())) != "" {
			t.Errorf("the refusal shows the secret: %v", err)
		}
	}

	// An archive of it has the references, which are good for nothing in a tree that was given no secret: it would show what it
	// isn't known to have.
	came, err := d.imports(t, d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: tree}), &boxwoodv1.ImportTreeStart{NewIds: true})
	if err != nil {
		t.Fatal(err)
	}
	copied := d.nodesOf(t, came.GetTree().GetId())
	last := copied[len(copied)-1]
	if last.GetProcessKind() != shellsKind {
		t.Fatalf("the last node of the copy has process state %v", last.GetProcessKind())
	}
	of := []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: last.GetId()}, Count: 1}}
	if r := d.tryFork(t, &boxwoodv1.ForkRequest{Wants: of})[0]; r.GetError().GetReason() != "secret_unknown" {
		t.Errorf("a fork of an imported node, whose tree was given no secret, came to %v", r)
	}
	given := d.tryFork(t, &boxwoodv1.ForkRequest{SecretEnv: env, Wants: of})[0]
	if given.GetError() != nil {
		t.Fatal(given.GetMessage())
	}
	check(given.GetSandbox().GetId())
	shown.everywhere(t, d, came.GetTree().GetId())
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: came.GetTree().GetId()}); err != nil {
		t.Error(err)
	}

	shown.everywhere(t, d, tree)
	shown.under(t, d.dir)

	// A daemon that is killed knows it again with its sandboxes, in the host's memory.
	d.kill()
	d = startDaemon(t, d.dir)
	if out := d.hear(t, sb, "main", "y=2; echo $TOKEN"); shown.in([]byte(out)) != "" {
		t.Error("a session shows the secret to the next daemon")
	}
	check(sb)
	shown.everywhere(t, d, tree)
	runDir := engine.FindRunDir(d.dir)
	shown.under(t, runDir, filepath.Join(runDir, "secrets"))

	// One that stops forgets it, and takes it again.
	d.stop()
	if _, err := os.Lstat(runDir); !os.IsNotExist(err) {
		t.Errorf("what a daemon kept in memory is there after its end: %s, %v", runDir, err)
	}
	shown.under(t, d.dir)
	d = startDaemon(t, d.dir)
	want := []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: n.GetId()}, Count: 1}}
	if r := d.tryFork(t, &boxwoodv1.ForkRequest{Wants: want})[0]; r.GetError().GetReason() != "secret_unknown" {
		t.Errorf("a fork without the secret came to %v", r)
	}
	child := d.tryFork(t, &boxwoodv1.ForkRequest{SecretEnv: env, Wants: want})[0]
	if child.GetError() != nil {
		t.Fatal(child.GetMessage())
	}
	check(child.GetSandbox().GetId())
	shown.everywhere(t, d, tree)
	d.stop()
	shown.under(t, d.dir)
}

// A dump holds what its processes held: it is marked, and left out of archives that don't ask for it.
func TestDumpsOfSecretsAreMarked(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := startDaemon(t, "")
	d.importRoot(t)
	root, box := d.newTree(t)
	tree, sb := root.GetTreeId(), box.GetId()
	c := canary{"canary-of-a-dump-77d1b"}
	before := d.run(t, sb, "setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
	if n := d.kept(t, before.GetNode(), boxwoodv1.ProcessKind_PROCESS_KIND_DUMP); n.GetMayHoldSecrets() {
		t.Error("a dump of processes that had no secret is marked")
	}
	r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb, Command: &boxwoodv1.Command{
		Shell:     []byte(`mkfifo /tmp/up; setsid bash -c 'echo >/tmp/up; sleep 1000; :' "$TOKEN" >/dev/null 2>&1 </dev/null & read x </tmp/up`),
		SecretEnv: map[string]string{"TOKEN": c.value},
	}})
	if err != nil {
		t.Fatal(err)
	}
	n := d.kept(t, r.GetNode(), boxwoodv1.ProcessKind_PROCESS_KIND_DUMP)
	if !n.GetMayHoldSecrets() {
		t.Error("a dump of processes that were given a secret isn't marked")
	}
	named := false
	for _, f := range r.GetNode().GetEffects() {
		named = named || strings.Contains(string(f.GetSubject()), "[secret TOKEN]")
	}
	if !named {
		t.Errorf("no effect tells of the process: %v", n.GetEffects())
	}
	child := d.fork(t, n.GetId(), 1)[0]
	m := d.run(t, child.GetId(), "setsid sleep 1001 >/dev/null 2>&1 </dev/null &").GetNode()
	if !d.kept(t, m, boxwoodv1.ProcessKind_PROCESS_KIND_DUMP).GetMayHoldSecrets() {
		t.Error("a dump of what was restored from one with a secret isn't marked")
	}
	c.everywhere(t, d, tree)
	if how := c.in(d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: tree, WithSecrets: true})); how == "" {
		t.Error("an archive that was to have the dump with the secret doesn't")
	}
}
