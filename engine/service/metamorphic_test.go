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
	metaSteps = flag.Int("meta.n", 0, "how many random steps TestPathsAreWhatTheyAreAlone takes; 0: a short run")
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

// What turns say to the shell of a session.
var sayings = []string{
	"v%[1]d=$((${v%[1]d:-0} + %[2]d)); export v%[1]d",
	"a%[1]d+=(%[2]d 'two words' $'and\nlines')",
	"declare -gA m; m[k%[1]d]=%[2]d",
	"f%[1]d() { echo f%[1]d %[2]d \"$@\"; }; f%[1]d now",
	"alias l%[1]d='ls -%[2]d'; unalias l%[2]d",
	"trap 'echo t%[2]d' USR1; set -o noclobber",
	"trap - USR1; set +o noclobber; shopt -s nullglob",
	"shopt -u nullglob; umask 0%[1]d2",
	"pushd /usr; cd /w; echo %[2]d >>session%[1]d",
	"popd; cd /tmp; unset v%[1]d 'm[k%[2]d]'",
	"readonly r%[1]d=%[2]d; echo ${r%[1]d} $v1 ${a2[*]}",
	"ls /nosuch%[1]d; (exit %[2]d)",
}

// All that is said above can be told by.
const shellState = `declare -p v{1..4} a{1..4} r{1..4} m 2>/dev/null; declare -f; alias -p; trap -p; set +o; shopt; umask; pwd; dirs -l`

// What turns do with servers, each of which counts in its memory alone.
var servings = []string{
	`[ -p /srv/%[1]d.in ] || { mkdir -p /srv; mkfifo /srv/%[1]d.in /srv/%[1]d.out
		(n=0; while read -r x </srv/%[1]d.in; do
			case $x in end) echo bye >/srv/%[1]d.out; exit;; *) n=$((n + x));; esac; echo $n >/srv/%[1]d.out
		done) >/dev/null 2>&1 </dev/null & echo 0 >/srv/%[1]d.in; cat /srv/%[1]d.out; }`,
	`[ ! -p /srv/%[1]d.in ] || { echo %[2]d >/srv/%[1]d.in; cat /srv/%[1]d.out; }`,
	`[ ! -p /srv/%[1]d.in ] || { echo %[2]d >/srv/%[1]d.in; cat /srv/%[1]d.out; }`,
	`[ ! -p /srv/%[1]d.in ] || { echo end >/srv/%[1]d.in; cat /srv/%[1]d.out; rm /srv/%[1]d.in /srv/%[1]d.out; }`,
}

const serverState = `for s in 1 2; do [ ! -p /srv/$s.in ] || { echo 0 >/srv/$s.in; echo "$s: $(cat /srv/$s.out)"; }; done`

// action is what a turn ran.
type action struct {
	session bool
	text    string
}

// Whatever forks, rollbacks, prunes, evictions, replays, ends and crashes came between its turns: a
// node is what its path of turns makes when it is run alone, in one sandbox that nobody forks. In files;
// and with a shell and servers beside them.
func TestPathsAreWhatTheyAreAlone(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	for _, c := range []struct {
		name      string
		processes bool
		short     int
	}{{"files", false, 60}, {"processes", true, 40}} {
		t.Run(c.name, func(t *testing.T) {
			steps := c.short
			if *metaSteps > 0 {
				steps = *metaSteps
			}
			if c.processes {
				testenv.Require(t, testenv.CRIU)
			}
			pathsAreWhatTheyAreAlone(t, c.processes, steps)
		})
	}
}

func pathsAreWhatTheyAreAlone(t *testing.T, processes bool, steps int) {
	seed := *metaSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d, %d steps", seed, steps)
	m := &grown{t: t, rnd: rand.New(rand.NewPCG(seed, 0)), dir: stateDir(t), processes: processes, ran: map[string]action{}, evicted: map[string]bool{}}
	m.start()
	t.Cleanup(func() { m.d.stop() })
	m.d.importRoot(t)
	root, sb := m.d.newTree(t)
	m.tree, m.live = root.GetTreeId(), []string{sb.GetId()}
	if processes {
		m.first = m.d.open(t, sb.GetId(), "main").GetResult().GetNode().GetId()
	}
	for range steps {
		m.step()
	}
	nodes := map[string]*boxwoodv1.Node{}
	var ids []string
	for _, n := range m.d.nodesOf(t, m.tree) {
		nodes[n.GetId()] = m.d.captured(t, n.GetId())[0]
		nodes[n.GetId()].Action = n.GetAction()
		if m.processes && n.GetParentId() == "" {
			continue // before there was a session
		}
		if nodes[n.GetId()].GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
			ids = append(ids, n.GetId())
		} else if !strings.HasPrefix(nodes[n.GetId()].GetWithheldReason(), "capture lost") && !m.evicted[n.GetId()] {
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

	processes bool
	first     string            // the node in which the session was opened; all others are below it
	ran       map[string]action // by node
	evicted   map[string]bool
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
		if m.processes && n.GetParentId() == "" {
			continue
		}
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
	case p < 60:
		m.turn(m.live[i])
	case p < 71:
		m.did = append(m.did, "fork")
		for _, c := range d.fork(t, m.some(), int32(1+m.rnd.IntN(2))) {
			m.live = append(m.live, c.GetId())
		}
	case p < 80:
		m.did = append(m.did, "rollback")
		if _, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: m.live[i], NodeId: m.some()}); err != nil {
			t.Fatal(err)
		}
	case p < 86:
		m.did = append(m.did, "release")
		free(t, d, &boxwoodv1.Sandbox{Id: m.live[i]})
		m.live = slices.Delete(m.live, i, i+1)
	case p < 93:
		m.replay()
	case p < 96:
		m.did = append(m.did, "prune")
		if list := d.nodesOf(t, m.tree); len(list) > 4 {
			_, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: list[len(list)-1].GetId()})
			if err != nil && reason(err) != "sandbox_there" {
				t.Fatal(err)
			}
		}
	case p < 98:
		m.did = append(m.did, "END")
		d.stop()
		m.again()
	default:
		m.did = append(m.did, "KILL")
		d.kill()
		m.again()
	}
}

// turn runs one of some kind.
func (m *grown) turn(sandbox string) {
	a := action{text: edit(m.rnd)}
	if k := m.rnd.IntN(10); m.processes && k < 4 {
		a = action{true, "mkdir -p /w; " + fmt.Sprintf(sayings[m.rnd.IntN(len(sayings))], 1+m.rnd.IntN(4), 1+m.rnd.IntN(6))}
	} else if m.processes && k < 7 {
		a.text = fmt.Sprintf(servings[m.rnd.IntN(len(servings))], 1+m.rnd.IntN(2), 1+m.rnd.IntN(6))
	}
	m.did = append(m.did, "turn")
	m.ran[m.take(sandbox, a)] = a
}

func (m *grown) take(sandbox string, a action) string {
	m.t.Helper()
	if a.session {
		return m.d.say(m.t, sandbox, "main", a.text).GetNode().GetId()
	}
	return m.d.run(m.t, sandbox, a.text).GetNode().GetId()
}

// replay gives the state of a leaf up, and makes the leaf again.
func (m *grown) replay() {
	t, d := m.t, m.d
	list := d.nodesOf(t, m.tree)
	n := list[len(list)-1]
	if len(list) < 4 || d.captured(t, n.GetId())[0].GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		return
	}
	_, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: n.GetId(), StatesOnly: true, ReleaseSandboxes: true})
	m.find()
	if reason(err) == "sandbox_there" { // one that is compared with it
		return
	} else if err != nil {
		t.Fatal(err)
	}
	m.did = append(m.did, "replay")
	m.evicted[n.GetId()] = true
	got, err := d.replays(t, n.GetId())
	if err != nil || got[0].GetError() != nil {
		t.Fatal("replaying: ", got, err)
	}
	for _, r := range got[0].GetReplayed() {
		if !r.GetSameOutput() || !r.GetSameExit() {
			t.Fatalf("run again, %q came out otherwise: %v\nwas %v\nis  %v", m.ran[r.GetNodeId()].text, r, d.node(t, r.GetNodeId()).GetObservation(), d.node(t, r.GetReplayId()).GetObservation())
		}
		m.ran[r.GetReplayId()] = m.ran[r.GetNodeId()]
	}
	m.live = append(m.live, got[0].GetSandbox().GetId())
}

func (m *grown) again() {
	m.t.Helper()
	m.start()
	m.find()
}

// find looks who lives.
func (m *grown) find() {
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
	var path []action
	for n := nodes[id]; n.GetParentId() != "" && n.GetId() != m.first; n = nodes[n.GetParentId()] {
		path = append([]action{m.ran[n.GetId()]}, path...)
	}
	_, sb := d.newTree(t)
	if m.processes {
		d.open(t, sb.GetId(), "main")
	}
	for _, a := range path {
		m.take(sb.GetId(), a)
	}
	r := d.tryFork(t, &boxwoodv1.ForkRequest{Scratch: true, Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: id}, Count: 1}}})
	if len(r) != 1 || r[0].GetSandbox() == nil {
		t.Fatalf("forking node %s: %v", id, r)
	}
	want, got := m.stateOf(sb), m.stateOf(r[0].GetSandbox())
	if !slices.Equal(want, got) {
		t.Fatalf("node %s isn't what its path makes alone:\n%s\nthe path:\n%v", id, strings.Join(treewalk.Diff(want, got, 20), "\n"), path)
	}
	free(t, d, sb, r[0].GetSandbox())
}

// stateOf is what a sandbox shows: its files, its shell, its servers.
func (m *grown) stateOf(sb *boxwoodv1.Sandbox) []string {
	m.t.Helper()
	lines, _ := digest(m.t, m.d.rootOf(m.t, sb.GetGeneration()))
	lines = untimed(lines)
	if m.processes {
		o := m.d.say(m.t, sb.GetId(), "main", shellState).GetNode().GetObservation()
		lines = append(lines, strings.Split(string(o.GetStdout())+string(o.GetStderr()), "\n")...)
		lines = append(lines, strings.Split(m.d.ok(m.t, sb.GetId(), serverState), "\n")...)
	}
	return lines
}
