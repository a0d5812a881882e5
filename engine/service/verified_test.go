package service

import (
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// compared reads how many children were compared, and how many differed, from what the daemon says of its checks.
func (d *daemon) compared(t testing.TB, capability string) (children, differed int) {
	t.Helper()
	detail := d.says(t, capability)
	at := strings.Index(detail, " children compared")
	if at < 0 {
		t.Fatalf("%s: %q", capability, detail)
	}
	begin := strings.LastIndexAny(detail[:at], " ") + 1
	if _, err := fmt.Sscanf(detail[begin:], "%d children compared, %d differed", &children, &differed); err != nil {
		t.Fatalf("%s: %q: %v", capability, detail, err)
	}
	return children, differed
}

// refusedChild forks a child that is to fail with a reason, and says what was kept of it below audit/.
func (d *daemon) refusedChild(t testing.TB, node, want string) string {
	t.Helper()
	before, _ := filepath.Glob(filepath.Join(d.dir, "audit", "*"))
	results := d.tryFork(t, &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{
		{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node}, Count: 1}}})
	if len(results) != 1 || results[0].GetError().GetReason() != want {
		t.Fatalf("the child wasn't refused with %s: %v", want, results)
	}
	after, _ := filepath.Glob(filepath.Join(d.dir, "audit", "*"))
	if len(after) != len(before)+1 {
		t.Fatalf("no case was kept: %v", after)
	}
	text, err := os.ReadFile(after[len(after)-1])
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Children of every kind see in their files what their parent saw when it was frozen, by a walk that shares no code with
// what captures and restores; a difference is a failed child, counted, with its case kept.
func TestVerifiedFiles(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	t.Setenv(verify, "files")
	d := startDaemon(t, "")
	d.importRoot(t)
	root, sb := d.newTree(t)
	const files = `mkdir -p /w/a/b; echo one >/w/a/f; ln /w/a/f /w/hard; ln -s nowhere /w/link; mkfifo -m 640 /w/pipe; echo x >/w/$'odd\nname'
		chmod 4751 /w/a/f; chown 1000:7 /w/a/b; truncate -s 5M /w/sparse; echo end >>/w/sparse; touch -d @1234567890.5 /w/hard
		rm -f /etc/passwd; mv /home /home2; mkdir /home; echo in memory >/dev/shm/f; umask 0; echo loose >/tmp/loose`
	for _, kind := range []string{
		`:`,
		`opens a session`,
		`sleep 1000 >/dev/null 2>&1 </dev/null & echo late >/dev/shm/late`,
	} {
		if kind == `opens a session` {
			d.open(t, sb.GetId(), "main")
			kind = `echo more >/w/more`
		}
		n := d.saved(t, d.run(t, sb.GetId(), files+"; "+kind).GetNode().GetId())
		before, _ := d.compared(t, "verified files")
		children := d.fork(t, n, 2)
		if got := strings.TrimSpace(d.ok(t, children[1].GetId(), "cat /dev/shm/f /w/hard")); got != "in memory\none" {
			t.Errorf("a child has %q", got)
		}
		free(t, d, children...)
		now, differed := d.compared(t, "verified files")
		if now < before+2 || differed != 0 {
			t.Errorf("after %s: %s", kind, d.says(t, "verified files"))
		}
	}
	back := d.captured1(t, d.saved(t, d.run(t, sb.GetId(), "rm -r /w").GetNode().GetId()))
	if _, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: sb.GetId(), NodeId: back.GetParentId()}); err != nil {
		t.Fatal("rolling back: ", err)
	}

	n := d.saved(t, d.run(t, sb.GetId(), "echo last >/w/last").GetNode().GetId())
	d.seeOtherFiles(t)
	if text := d.refusedChild(t, n, "files_differ"); !strings.Contains(text, "another file") {
		t.Errorf("its case doesn't say what differs: %s", text)
	}
	if _, differed := d.compared(t, "verified files"); differed == 0 {
		t.Errorf("nothing was counted: %s", d.says(t, "verified files"))
	}
	if list := d.sandboxes(t, ""); len(list) != 1 {
		t.Errorf("%d sandboxes live, not one", len(list))
	}
	seen, _ := filepath.Glob(filepath.Join(d.dir, "walks", "*"))
	d.stop()
	d2 := startDaemon(t, d.dir)
	if again, _ := filepath.Glob(filepath.Join(d.dir, "walks", "*")); len(again) == 0 || len(again) > len(seen) {
		t.Errorf("%d walks are there after a restart, %d before", len(again), len(seen))
	}
	if _, err := d2.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: root.GetId(), KeepNode: true, ReleaseSandboxes: true}); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(d.dir, "walks", "*")); len(left) != 0 {
		t.Errorf("walks outlive their snapshots: %v", left)
	}
}

// seeOtherFiles adds a file to all that was seen in freezes.
func (d *daemon) seeOtherFiles(t testing.TB) {
	t.Helper()
	seen, _ := filepath.Glob(filepath.Join(d.dir, "walks", "*"))
	for _, path := range seen {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		z, err := gzip.NewReader(f)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(z)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		if f, err = os.Create(path); err != nil {
			t.Fatal(err)
		}
		w := gzip.NewWriter(f)
		fmt.Fprintf(w, "%s\n\"another file\" file 0644 0:0", text)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) == 0 {
		t.Fatal("nothing was seen")
	}
}

// What restored processes have in memory is what was there when they were saved: their own, what they share, in
// several threads and processes, and after a restore of a restored one.
func TestParanoid(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	t.Setenv(verify, "memory")
	d := startDaemon(t, "")
	for _, p := range []payload{python("memory"), python("mapped"), python("threads"), python("sysv"), payloads[0]} {
		t.Run(p.name, func(t *testing.T) {
			p.wanted(t)
			sb := d.newPayload(t, p)
			d.saved(t, d.run(t, sb.GetId(), p.start).GetNode().GetId())
			n := d.saved(t, d.stepTo(t, sb, p, 1))
			before, _ := d.compared(t, "verified memory")
			c := d.fork(t, n, 1)[0]
			again := d.fork(t, d.saved(t, d.stepTo(t, c, p, 2)), 1)[0]
			d.stepTo(t, again, p, 3)
			now, differed := d.compared(t, "verified memory")
			if now < before+2 || differed != 0 {
				t.Errorf("%s; %d before", d.says(t, "verified memory"), before)
			}
			free(t, d, c, again)
		})
	}
}
