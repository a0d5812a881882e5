package service

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/archive"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

const (
	trust = boxwoodv1.ImportTreeStart_DUMPS_TRUST
	leave = boxwoodv1.ImportTreeStart_DUMPS_LEAVE
)

// A server that counts what it is told, and how it is asked.
const (
	countStart = `mkfifo /in /out; (n=0; while :; do read -r line </in; n=$((n+1)); echo "$n $line" >/out; done) >/dev/null 2>&1 & echo started`
	countAsk   = `echo hello >/in; cat /out`
)

// withProcesses is a tree whose nodes have each kind of process state.
func (d *daemon) withProcesses(t testing.TB) (tree string, shell, server, later *boxwoodv1.Node) {
	t.Helper()
	_, sb := d.newTree(t)
	d.kept(t, d.run(t, sb.GetId(), "echo file >/root/file").GetNode(), emptyKind)
	d.open(t, sb.GetId(), "main")
	d.hear(t, sb.GetId(), "main", "cd /usr; greeting='hello '; greeting+=there; declare -A m=([a]=1 [b]=2); f() { echo f $greeting; }")
	shell = d.kept(t, d.say(t, sb.GetId(), "main", "umask 027").GetNode(), shellsKind)
	d.run(t, sb.GetId(), countStart)
	d.ok(t, sb.GetId(), countAsk)
	n := d.run(t, sb.GetId(), countAsk).GetNode()
	d.saved(t, n.GetId())
	server = d.kept(t, n, boxwoodv1.ProcessKind_PROCESS_KIND_DUMP)
	n = d.run(t, sb.GetId(), "echo more >/root/more").GetNode()
	d.saved(t, n.GetId())
	later = d.captured(t, n.GetId())[0]
	free(t, d, sb)
	return n.GetTreeId(), shell, server, later
}

// What is saved of processes goes with a tree: a server has counted as far as where it
// comes from, a shell has its variables.
func TestProcessesTravel(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	here, there := startDaemon(t, ""), startDaemon(t, "")
	here.importRoot(t)
	there.importRoot(t)
	tree, shell, server, later := here.withProcesses(t)
	archive := here.export(t, &boxwoodv1.ExportTreeRequest{TreeId: tree})
	t.Logf("the archive has %d bytes", len(archive))

	if _, err := there.imports(t, archive, &boxwoodv1.ImportTreeStart{}); reason(err) != "archive_dumps" {
		t.Fatalf("dumps that nobody said to trust: %v", err)
	}
	r, err := there.imports(t, archive, &boxwoodv1.ImportTreeStart{Dumps: trust})
	if err != nil || r.GetWithheld() != 0 {
		t.Fatalf("%v, %v", r, err)
	}
	sameNodes(t, here.nodesOf(t, tree), there.nodesOf(t, tree))
	for _, n := range here.nodesOf(t, tree) {
		sameState(t, here, n.GetId(), there, n.GetId())
	}
	a, b := here.fork(t, shell.GetId(), 1)[0], there.fork(t, shell.GetId(), 1)[0]
	const all = "pwd; f; umask; declare -p greeting m; echo $$"
	if x, y := here.hear(t, a.GetId(), "main", all), there.hear(t, b.GetId(), "main", all); x != y || !strings.Contains(x, "hello there") {
		t.Errorf("the shell says %q there, and %q here", y, x)
	}
	for _, n := range []*boxwoodv1.Node{server, later} {
		children := there.fork(t, n.GetId(), 3)
		for _, c := range children {
			for i, want := range []string{"3 hello\n", "4 hello\n"} {
				if got := there.ok(t, c.GetId(), countAsk); got != want {
					t.Errorf("asked %d times, the server says %q, not %q", i+1, got, want)
				}
			}
		}
		if got := there.node(t, n.GetId()).GetCapture(); got != boxwoodv1.CaptureStatus_CAPTURE_STATUS_PROVEN {
			t.Errorf("after its forks the node is %v", got)
		}
		free(t, there, children...)
	}
	// It goes on from there, and travels on.
	sb := there.fork(t, server.GetId(), 1)[0]
	there.ok(t, sb.GetId(), countAsk)
	next := there.run(t, sb.GetId(), countAsk).GetNode()
	there.saved(t, next.GetId())
	part := there.export(t, &boxwoodv1.ExportTreeRequest{NodeId: server.GetId()})
	back, err := here.imports(t, part, &boxwoodv1.ImportTreeStart{Dumps: trust, NewIds: true})
	if err != nil {
		t.Fatal(err)
	}
	nodes := here.nodesOf(t, back.GetTree().GetId())
	if got := here.ok(t, here.fork(t, nodes[len(nodes)-1].GetId(), 1)[0].GetId(), countAsk); got != "5 hello\n" {
		t.Errorf("back home the server says %q", got)
	}
}

// frame is one of an archive.
type frame struct {
	kind archive.Kind
	body []byte
}

const archiveMagic = "boxwood tree archive\n"

func framesOf(t testing.TB, from []byte) (list []frame) {
	t.Helper()
	r, err := archive.NewReader(bytes.NewReader(from))
	if err != nil {
		t.Fatal(err)
	}
	head, err := proto.Marshal(r.Head)
	if err != nil {
		t.Fatal(err)
	}
	list = []frame{{archive.Header, head}}
	for {
		k, body, err := r.Next()
		if err == io.EOF {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, frame{k, body})
	}
}

// rewritten is an archive with another header, and with what edit makes of its other frames,
// under sums that are right.
func rewritten(t testing.TB, from []byte, head func(*boxwoodv1.ArchiveHeader), edit func([]frame)) []byte {
	t.Helper()
	list := framesOf(t, from)
	h := &boxwoodv1.ArchiveHeader{}
	err := proto.Unmarshal(list[0].body, h)
	if head != nil {
		head(h)
	}
	if edit != nil {
		edit(list)
	}
	if err == nil {
		list[0].body, err = proto.Marshal(h)
	}
	out := []byte(archiveMagic)
	for _, f := range list {
		if f.kind == archive.End {
			sum := sha256.Sum256(out)
			if f.body, err = proto.Marshal(&boxwoodv1.ArchiveEnd{Sha256: sum[:]}); err != nil {
				t.Fatal(err)
			}
		}
		all := append([]byte{byte(f.kind)}, f.body...)
		out = binary.AppendUvarint(append(out, byte(f.kind)), uint64(len(f.body)))
		out = binary.BigEndian.AppendUint32(out, crc32.Checksum(all, crc32.MakeTable(crc32.Castagnoli)))
		out = append(out, f.body...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func dumpsOf(h *boxwoodv1.ArchiveHeader, f func(*boxwoodv1.ArchiveProcess)) {
	for _, p := range h.Processes {
		if p.Kind == boxwoodv1.ProcessKind_PROCESS_KIND_DUMP {
			f(p)
		}
	}
}

// fileOf edits the only piece of a file of every dump.
func fileOf(t testing.TB, list []frame, name string, f func(process string, data []byte) []byte) {
	t.Helper()
	done := false
	for i, fr := range list {
		head := &boxwoodv1.ArchiveFile{}
		if fr.kind != archive.File || proto.Unmarshal(fr.body, head) != nil || head.Name != name {
			continue
		}
		piece := &boxwoodv1.ArchiveData{}
		err := proto.Unmarshal(list[i+1].body, piece)
		piece.Data = f(head.ProcessId, piece.Data)
		head.Size = int64(len(piece.Data))
		if err == nil {
			list[i].body, err = proto.Marshal(head)
		}
		if err == nil {
			list[i+1].body, err = proto.Marshal(piece)
		}
		if err != nil {
			t.Fatal(err)
		}
		done = true
	}
	if !done {
		t.Fatalf("no dump has a file %s", name)
	}
}

// A dump is restored only where it comes out as it was: what can be known is known before
// anything is written, and a dump of another kernel or CRIU is tried before its node is on record.
func TestDumpsOfAnotherHost(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := startDaemon(t, "")
	d.importRoot(t)
	tree, shell, server, later := d.withProcesses(t)
	whole := d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: tree})
	before := d.contents(t)

	allow := []string{"setuid"} // which trees of older formats do
	for _, c := range []struct {
		name, reason string
		head         func(*boxwoodv1.ArchiveHeader)
	}{
		{"pid 1", "other_program", func(h *boxwoodv1.ArchiveHeader) {
			dumpsOf(h, func(p *boxwoodv1.ArchiveProcess) { p.Init = "another" })
		}},
		{"instructions", "other_processor", func(h *boxwoodv1.ArchiveHeader) {
			h.Processor = strings.Replace(strings.Repeat(".ffffffff", strings.Count(h.Processor, ".")+1), ".", "", 1)
		}},
		{"no processor", "archive_damaged", func(h *boxwoodv1.ArchiveHeader) { h.Processor = "" }},
		{"an old format, which had no dumps", "other_program", func(h *boxwoodv1.ArchiveHeader) {
			h.Format, h.Processor = 1, ""
			dumpsOf(h, func(p *boxwoodv1.ArchiveProcess) { p.Init = "" })
		}},
		{"size", "disk_full", func(h *boxwoodv1.ArchiveHeader) {
			dumpsOf(h, func(p *boxwoodv1.ArchiveProcess) { p.Bytes = 1 << 60 })
		}},
		{"a newer format", "archive_format", func(h *boxwoodv1.ArchiveHeader) { h.Format = archive.Format + 1 }},
	} {
		if r, err := d.imports(t, rewritten(t, whole, c.head, nil), &boxwoodv1.ImportTreeStart{NewIds: true, Dumps: trust, AllowCalls: allow}); reason(err) != c.reason {
			t.Errorf("%s: %v, %v", c.name, r, err)
		}
	}
	if after := d.contents(t); after != before {
		t.Fatalf("refused imports left\n%s\nbeside\n%s", after, before)
	}

	other := func(h *boxwoodv1.ArchiveHeader) {
		dumpsOf(h, func(p *boxwoodv1.ArchiveProcess) { p.Kernel = "6.1.0-other" })
	}
	// It is one line, so that a depth names a node.
	take := func(from []byte, how boxwoodv1.ImportTreeStart_Dumps) (*boxwoodv1.ImportTreeResponse, []*boxwoodv1.Node) {
		r, err := d.imports(t, from, &boxwoodv1.ImportTreeStart{NewIds: true, Dumps: how, AllowCalls: allow})
		if err != nil {
			t.Fatal(err)
		}
		return r, d.nodesOf(t, r.GetTree().GetId())
	}

	depth := func(n *boxwoodv1.Node) int32 { return d.node(t, n.GetId()).GetDepth() }

	// Restored alike: proven.
	r, got := take(rewritten(t, whole, other, nil), trust)
	if n := got[depth(server)]; r.GetWithheld() != 0 || n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_PROVEN {
		t.Fatalf("tried on arrival: %v", n)
	}
	if got := d.ok(t, d.fork(t, got[depth(server)].GetId(), 1)[0].GetId(), countAsk); got != "3 hello\n" {
		t.Errorf("a server that was tried on arrival says %q: something of it ran", got)
	}

	// Restored otherwise: withheld, and nothing of it stays.
	lists := map[string][]byte{}
	strange := rewritten(t, whole, nil, func(list []frame) {
		sums := map[string]string{}
		fileOf(t, list, "witness.json", func(process string, b []byte) []byte {
			b = bytes.Replace(b, []byte("NoNewPrivs: 1"), []byte("NoNewPrivs: 0"), 1)
			sums[process] = fmt.Sprintf("%x %d witness.json", sha256.Sum256(b), len(b))
			return b
		})
		fileOf(t, list, "sums", func(process string, b []byte) []byte {
			var out strings.Builder
			for line := range strings.Lines(string(b)) {
				if strings.HasSuffix(line, " witness.json\n") {
					line = sums[process] + "\n"
				}
				out.WriteString(line)
			}
			lists[process] = []byte(out.String())
			return lists[process]
		})
	})
	strange = rewritten(t, strange, func(h *boxwoodv1.ArchiveHeader) {
		other(h)
		dumpsOf(h, func(p *boxwoodv1.ArchiveProcess) {
			sum := sha256.Sum256(lists[p.Id])
			p.Digest = hex.EncodeToString(sum[:])
		})
	}, nil)
	r, got = take(strange, trust)
	for _, n := range []*boxwoodv1.Node{server, later} {
		if n := got[depth(n)]; n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || !strings.Contains(n.GetWithheldReason(), "6.1.0-other") ||
			!strings.Contains(n.GetWithheldReason(), "NoNewPrivs") {
			t.Errorf("a dump that comes out otherwise: %v", n)
		}
	}
	if n := got[depth(shell)]; r.GetWithheld() < 2 || n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED {
		t.Errorf("a shell beside it: %v of %v", n, r)
	}

	// Left, on either side.
	_, got = take(whole, leave)
	if n := got[depth(server)]; n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || !strings.HasPrefix(n.GetWithheldReason(), "not carried") {
		t.Errorf("left in the archive: %v", n)
	}
	if got := d.hear(t, d.fork(t, got[depth(shell)].GetId(), 1)[0].GetId(), "main", "f"); got != "f hello there\n" {
		t.Errorf("a shell whose archive has dumps that were left says %q", got)
	}
	without := d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: tree, WithoutProcesses: true})
	if secret := []byte("hello there"); bytes.Contains(without, secret) || !bytes.Contains(whole, secret) {
		t.Error("what a shell has in memory must be in the whole archive, and not in the one without processes")
	}
	if slices.ContainsFunc(framesOf(t, without), func(f frame) bool { return f.kind == archive.File }) {
		t.Error("an archive without processes has files of some")
	}
	_, got = take(without, boxwoodv1.ImportTreeStart_DUMPS_UNSPECIFIED)
	for _, n := range []*boxwoodv1.Node{shell, server, later} {
		if n := got[depth(n)]; !strings.HasPrefix(n.GetWithheldReason(), "not carried") {
			t.Errorf("left out of the archive: %v", n)
		}
	}
	if got := d.ok(t, d.fork(t, got[1].GetId(), 1)[0].GetId(), "cat /root/file"); got != "file\n" {
		t.Errorf("a node without processes shows %q", got)
	}
	// A format that had no dumps is read as before.
	r, got = take(rewritten(t, without, func(h *boxwoodv1.ArchiveHeader) { h.Format, h.Processor = 1, "" }, nil), boxwoodv1.ImportTreeStart_DUMPS_UNSPECIFIED)
	if n := got[1]; n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED {
		t.Errorf("format 1: %v of %v", n, r)
	}

	// A piece of a dump that isn't as it was saved, under sums of the archive that are right.
	before = d.contents(t)
	bad := rewritten(t, whole, nil, func(list []frame) {
		fileOf(t, list, "dump.json", func(_ string, b []byte) []byte { b[len(b)/2] ^= 1; return b })
	})
	if _, err := d.imports(t, bad, &boxwoodv1.ImportTreeStart{NewIds: true, Dumps: trust}); reason(err) != "archive_damaged" {
		t.Errorf("a dump with another byte: %v", err)
	}
	if after := d.contents(t); after != before {
		t.Errorf("a damaged import left\n%s\nbeside\n%s", after, before)
	}
}

// contents lists the process states that there are, in memory or on the disk.
func (d *daemon) contents(t testing.TB) string {
	t.Helper()
	found := map[string]bool{}
	for _, dir := range []string{engine.FindRunDir(d.dir) + "/dumps", d.dir + "/processes"} { // in the order in which one gets there
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, e := range entries {
			found[strings.TrimSuffix(e.Name(), ".new")] = true // ".new": being copied
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(found)), "\n")
}
