package service

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

var (
	metaSteps = flag.Int("meta.n", 60, "how many random steps TestPathsAreWhatTheyAreAlone takes")
	metaSeed  = flag.Uint64("meta.seed", 0, "repeats a run; 0: another each time")
)

// What turns do. Each is the same whenever it runs on the same files; %d is a small number.
var edits = []string{
	"mkdir -p /w/d%[1]d/sub && echo %[2]d >> /w/d%[1]d/log",
	"echo %[2]d >> /w/f%[1]d",
	"rm -rf /w/d%[1]d",
	"mv /w/d%[1]d /w/d%[2]d",
	"ln -f /w/f%[1]d /w/hard%[2]d",
	"ln -sfn f%[1]d /w/soft%[2]d",
	"chmod 0%[1]d55 /w/f%[2]d; chown 1000:%[1]d /w/f%[2]d",
	"truncate -s %[2]d000 /w/f%[1]d",
	"cp -r /w/d%[1]d /w/copy%[2]d",
	"rm -f /etc/passwd; mkdir -p /etc/own%[1]d; mv /home /home%[2]d",
	"rm -rf /w/copy%[1]d; mkdir -p /w/copy%[1]d; echo %[2]d > /w/copy%[1]d/new",
	"cat /w/f%[1]d",
	"touch /tmp/gone%[1]d; rm /tmp/gone%[1]d; false",
	"mkfifo /w/pipe%[1]d; exit %[2]d",
}

func edit(rnd *rand.Rand) string {
	return fmt.Sprintf("mkdir -p /w; "+edits[rnd.IntN(len(edits))]+"", 1+rnd.IntN(4), 1+rnd.IntN(6))
}

// Whatever forks, rollbacks, prunes, ends and crashes came between its turns: a node is
// what its path of turns makes when it is run alone, in one sandbox that nobody forks.
func TestPathsAreWhatTheyAreAlone(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	seed := *metaSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	m := &grown{t: t, rnd: rand.New(rand.NewPCG(seed, 0)), dir: stateDir(t)}
	m.start()
	t.Cleanup(func() { m.d.stop() })
	m.d.importRoot(t)
	root, sb := m.d.newTree(t)
	m.tree, m.live = root.GetTreeId(), []string{sb.GetId()}
	for range *metaSteps {
		m.step()
	}
	nodes := map[string]*boxwoodv1.Node{}
	var ids []string
	for _, n := range m.d.nodesOf(t, m.tree) {
		nodes[n.GetId()] = m.d.captured(t, n.GetId())[0]
		nodes[n.GetId()].Action = n.GetAction()
		if nodes[n.GetId()].GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
			ids = append(ids, n.GetId())
		} else if !strings.HasPrefix(nodes[n.GetId()].GetWithheldReason(), "capture lost") {
			t.Fatalf("node %s is withheld: %s", n.GetId(), nodes[n.GetId()].GetWithheldReason())
		}
	}
	t.Logf("%s; %d nodes, %d can be forked", strings.Join(m.did, " "), len(nodes), len(ids))
	for range min(6, len(ids)) {
		m.alone(nodes, ids[m.rnd.IntN(len(ids))])
	}
}

type grown struct {
	t    *testing.T
	rnd  *rand.Rand
	dir  string
	d    *daemon
	tree string
	live []string // sandboxes
	did  []string
}

func (m *grown) start() {
	m.t.Helper()
	d, err := launch(m.dir)
	if err != nil {
		m.t.Fatal(err)
	}
	d.t, m.d = m.t, d
}

// some is a random node of the tree that can be forked.
func (m *grown) some() string {
	list := m.d.nodesOf(m.t, m.tree)
	for {
		n := list[m.rnd.IntN(len(list))]
		if n = m.d.captured(m.t, n.GetId())[0]; n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
			return n.GetId()
		}
	}
}

func (m *grown) step() {
	t, d := m.t, m.d
	if len(m.live) == 0 {
		m.live = append(m.live, d.fork(t, m.some(), 1)[0].GetId())
	}
	i := m.rnd.IntN(len(m.live))
	switch p := m.rnd.IntN(100); {
	case p < 62:
		m.did = append(m.did, "turn")
		d.run(t, m.live[i], edit(m.rnd))
	case p < 74:
		m.did = append(m.did, "fork")
		for _, c := range d.fork(t, m.some(), int32(1+m.rnd.IntN(2))) {
			m.live = append(m.live, c.GetId())
		}
	case p < 84:
		m.did = append(m.did, "rollback")
		if _, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: m.live[i], NodeId: m.some()}); err != nil {
			t.Fatal(err)
		}
	case p < 90:
		m.did = append(m.did, "release")
		free(t, d, &boxwoodv1.Sandbox{Id: m.live[i]})
		m.live = slices.Delete(m.live, i, i+1)
	case p < 95:
		m.did = append(m.did, "prune")
		if list := d.nodesOf(t, m.tree); len(list) > 4 {
			_, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: list[len(list)-1].GetId()})
			if err != nil && reason(err) != "sandbox_there" {
				t.Fatal(err)
			}
		}
	case p < 97:
		m.did = append(m.did, "END")
		d.stop()
		m.again()
	default:
		m.did = append(m.did, "KILL")
		d.kill()
		m.again()
	}
}

func (m *grown) again() {
	m.t.Helper()
	m.start()
	m.live = nil
	for _, s := range m.d.sandboxes(m.t, m.tree) {
		m.live = append(m.live, s.GetId())
	}
}

var times = regexp.MustCompile(` mtime=\d+\.\d+`)

// untimed is a walk without its times.
func untimed(lines []string) (out []string) {
	for _, l := range lines {
		out = append(out, times.ReplaceAllString(l, ""))
	}
	return out
}

// alone runs a node's path in a tree of its own and compares what came of it. Only
// the times differ: it runs at another.
func (m *grown) alone(nodes map[string]*boxwoodv1.Node, id string) {
	t, d := m.t, m.d
	t.Helper()
	var path []string
	for n := nodes[id]; n.GetParentId() != ""; n = nodes[n.GetParentId()] {
		path = append([]string{string(n.GetAction().GetText())}, path...)
	}
	_, sb := d.newTree(t)
	for _, line := range path {
		d.run(t, sb.GetId(), line)
	}
	want, _ := digest(t, d.rootOf(t, d.sandboxes(t, sb.GetTreeId())[0].GetGeneration()))
	got, _ := d.walkOf(t, id)
	if a, b := untimed(want), untimed(got); !slices.Equal(a, b) {
		t.Fatalf("node %s isn't what its path makes alone:\n%s\nthe path:\n%s", id, strings.Join(treewalk.Diff(a, b, 20), "\n"), strings.Join(path, "\n"))
	}
	free(t, d, sb)
}
