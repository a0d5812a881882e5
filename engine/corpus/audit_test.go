package corpus

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow/ipc"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/inspector"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// liar is an inspector that says what it is told to say.
type liar struct {
	inspector.Inspector
	says tree.Verdict // 0: the truth
}

type lying struct {
	inspector.Watch
	l *liar
}

func (l *liar) Watch(s inspector.Subject) (inspector.Watch, error) {
	w, err := l.Inspector.Watch(s)
	return lying{w, l}, err
}

func (w lying) Barrier(ctx context.Context) inspector.Report {
	r := w.Watch.Barrier(ctx)
	if w.l.says != 0 {
		r.Verdict, r.Turn = w.l.says, w.l.says
	}
	return r
}

// figures are what Info says of the audits.
func (h *host) figures(t testing.TB) string {
	t.Helper()
	i, err := h.e.Info()
	must(t, err)
	for _, c := range i.Capabilities {
		if c.Name == "audit" {
			return c.Detail
		}
	}
	t.Fatalf("nothing is said of audits: %v", i.Capabilities)
	return ""
}

// audited fails if an audit found a miss or didn't work.
func (h *host) audited(t *testing.T) {
	figures := h.figures(t)
	t.Log("audits: ", figures)
	if strings.Count(figures, "missed 0 of ") != 2 || !strings.HasSuffix(figures, "; 0 audits failed") {
		t.Errorf("audits: %s", figures)
	}
}

func (h *host) turn(t *testing.T, s *sandbox, shell string) *tree.Node {
	t.Helper()
	r, err := h.e.RunTurn(bounded(t), s.id, engine.Command{Shell: shell}, engine.NodeInput{}, 0, nil)
	must(t, err)
	if r.Node.Observation.ExitCode != 0 {
		t.Fatalf("%s: %s", shell, r.Node.Observation.Stderr)
	}
	return r.Node
}

// after waits until the audit of a sandbox's last turn is over: the next turn does.
func (h *host) after(t *testing.T, s *sandbox, n *tree.Node) *tree.Node {
	t.Helper()
	h.turn(t, s, "true")
	got, err := h.e.Store.View().Node(n.ID)
	must(t, err)
	return got
}

// When the inspector is wrong, an audit finds it: the case is kept and the node gets
// a checkpoint of its own, from which a fork shows what was missed.
func TestAuditFindsAMissedChangeOfFiles(t *testing.T) {
	l := &liar{}
	h := mustHost(t, options{audit: 1, wrap: func(i inspector.Inspector) inspector.Inspector { l.Inspector = i; return l }})
	for _, c := range []struct{ name, shell, shows string }{
		{"content of an image's file", "echo hello >/w/old", "grep -q hello /w/old"},
		{"content of an own file", "echo hello >/u/old", "grep -q hello /u/old"},
		{"a new file", "echo x >/w/d/new", "test -f /w/d/new"},
		{"a deleted file of the image", "rm /w/x", "test ! -e /w/x"},
		{"a replaced folder", "rm -r /w/d; mkdir /w/d", "test ! -e /w/d/f"},
		{"a moved folder", "mv /w/d /w/d2", "test -f /w/d2/f"},
		{"a mode", "chmod 600 /w/old", `test "$(stat -c %a /w/old)" = 600`},
		{"a new name", "ln /u/old /u/new", "test /u/old -ef /u/new"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := h.sandbox(t)
			defer s.release()
			l.says = tree.None
			n := h.turn(t, s, c.shell)
			l.says = 0
			shared := n.Checkpoint
			n = h.after(t, s, n)
			if n.Checkpoint == shared || n.Capture != tree.Captured {
				t.Fatalf("the node's checkpoint is %s (before: %s), state %d", n.Checkpoint, shared, n.Capture)
			}
			kept, err := os.ReadFile(filepath.Join(h.state, "audit", string(n.ID)+".json"))
			must(t, err)
			if !strings.Contains(string(kept), strings.Fields(c.shell)[0]) || !strings.Contains(string(kept), string(n.Parent)) {
				t.Errorf("the case can't be repeated from what was kept: %s", kept)
			}
			at := h.node
			h.node = n.ID
			fork := h.sandbox(t)
			h.node = at
			defer fork.release()
			h.turn(t, fork, c.shows)
		})
	}
	if f := h.figures(t); !strings.Contains(f, "files: missed 8 of ") || !strings.Contains(f, "processes: missed 0 of ") {
		t.Errorf("figures: %s", f)
	}
	var table bytes.Buffer
	must(t, h.e.Stats.Export(bounded(t), stats.Audits, stats.Filter{}, &table))
	in, err := ipc.NewReader(&table)
	must(t, err)
	rows := int64(0)
	for in.Next() {
		rows += in.Record().NumRows()
	}
	if rows < 16 {
		t.Errorf("the table of audits has %d rows, want two for each case", rows)
	}
}

func TestAuditFindsAMissedChangeOfProcesses(t *testing.T) {
	l := &liar{}
	h := mustHost(t, options{audit: 1, wrap: func(i inspector.Inspector) inspector.Inspector { l.Inspector = i; return l }})
	for _, shell := range []string{"/opt/ways shm", "/opt/ways mq", "/opt/ways sem", "/opt/ways survivor"} {
		for _, says := range []tree.Verdict{tree.None, tree.Files} {
			s := h.sandbox(t)
			l.says = says
			n := h.turn(t, s, shell)
			l.says = 0
			if n = h.after(t, s, n); n.Capture != tree.Withheld {
				t.Errorf("%s judged %d: the node isn't withheld but %d", shell, says, n.Capture)
			}
			s.release()
		}
	}
}

// A change that was none is counted the other way round.
func TestAuditCountsNeedlessCaptures(t *testing.T) {
	l := &liar{}
	h := mustHost(t, options{audit: 1, wrap: func(i inspector.Inspector) inspector.Inspector { l.Inspector = i; return l }})
	s := h.sandbox(t)
	defer s.release()
	l.says = tree.Files
	n := h.turn(t, s, "true")
	_, err := h.e.WaitCaptured(bounded(t), []ids.Node{n.ID})
	must(t, err)
	l.says = 0
	h.after(t, s, n)
	if f := h.figures(t); !strings.Contains(f, "needless 1 of ") {
		t.Errorf("figures: %s", f)
	}
}
