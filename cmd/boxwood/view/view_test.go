package view

import (
	"bytes"
	"encoding/xml"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares with testdata/name; `go test ./cmd/boxwood/view -update` renews it.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs; got:\n%s", path, got)
	}
}

// garden builds trees for tests: a node is silent unless it saves.
type garden struct {
	nodes []*pb.Node
	kids  map[string]int32
}

func (g *garden) add(parent *pb.Node, action string, verdict pb.Verdict) *pb.Node {
	if g.kids == nil {
		g.kids = map[string]int32{}
	}
	n := &pb.Node{
		Id: fmt.Sprintf("nd_01kb%022d", len(g.nodes)), Action: &pb.Action{Text: []byte(action)}, Verdict: verdict,
		Observation: &pb.Observation{}, TurnStatus: pb.TurnStatus_TURN_STATUS_COMPLETED,
		Capture: pb.CaptureStatus_CAPTURE_STATUS_CAPTURED,
	}
	if parent != nil {
		n.ParentId, n.Depth, n.Ordinal = parent.Id, parent.Depth+1, g.kids[parent.Id]
		g.kids[parent.Id]++
	}
	if parent == nil || verdict != pb.Verdict_VERDICT_NONE {
		n.CheckpointId, n.CheckpointNodeId = "ck_"+n.Id[3:], n.Id
	} else {
		n.CheckpointId, n.CheckpointNodeId = parent.CheckpointId, parent.CheckpointNodeId
	}
	g.nodes = append(g.nodes, n)
	return n
}

const (
	none  = pb.Verdict_VERDICT_NONE
	files = pb.Verdict_VERDICT_FILES
	both  = pb.Verdict_VERDICT_BOTH
)

func rollout() *garden {
	g := &garden{}
	at := g.add(nil, "", pb.Verdict_VERDICT_UNSPECIFIED)
	at = g.add(at, "ls -la", none)
	at = g.add(at, "cat README.md", none)
	failing := g.add(at, "python3 -m unittest -q", none)
	failing.Observation.ExitCode = 1
	at = g.add(failing, "sed -i 's/a - b/a + b/' calc.py", files)
	at = g.add(at, "git diff", none)
	fork := g.add(at, "git commit -qam 'fix the sum of two numbers in the calculator'", files)
	for i, reward := range []float64{0.25, 1, 0} {
		edit := g.add(fork, fmt.Sprintf("apply edit %d", i), files)
		test := g.add(edit, "python3 -m unittest -q", none)
		test.Rewards = map[string]float64{"tests": reward}
		if reward == 0 {
			test.Observation.ExitCode = 1
		}
		if i == 1 {
			edit.Pinned = true
			server := g.add(edit, "python3 -m http.server &", both)
			server.Capture, server.CheckpointId, server.WithheldReason = pb.CaptureStatus_CAPTURE_STATUS_WITHHELD, "", "a process survives"
			pending := g.add(edit, "make -j2 all > build.log 2>&1", files)
			pending.Capture, pending.CheckpointId = pb.CaptureStatus_CAPTURE_STATUS_RECORDED, ""
			pending.TurnStatus = pb.TurnStatus_TURN_STATUS_TIMED_OUT
		}
	}
	return g
}

func TestText(t *testing.T) {
	for _, c := range []struct {
		name  string
		nodes []*pb.Node
		o     TextOptions
	}{
		{"rollout.txt", rollout().nodes, TextOptions{IDs: true}},
		{"rollout-72.txt", rollout().nodes, TextOptions{Width: 72}},
		{"rollout-color.txt", rollout().nodes, TextOptions{Width: 100, Color: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b bytes.Buffer
			if err := Text(&b, c.nodes, c.o); err != nil {
				t.Fatal(err)
			}
			golden(t, c.name, b.Bytes())
			for _, line := range strings.Split(b.String(), "\n") {
				if c.o.Width > 0 && !c.o.Color && printable.Width(line) > c.o.Width {
					t.Errorf("%d cells in a terminal of %d: %q", printable.Width(line), c.o.Width, line)
				}
			}
		})
	}
}

func TestSVG(t *testing.T) {
	var b bytes.Buffer
	if err := SVG(&b, "tree tr_01kb", rollout().nodes); err != nil {
		t.Fatal(err)
	}
	golden(t, "rollout.svg", b.Bytes())
	mustBeXML(t, b.Bytes())
	for _, want := range []string{"apply edit 1", "tests=0.25", ">A</text>", `class="withheld"`, "shares checkpoint A", "prefers-color-scheme"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the picture lacks %q", want)
		}
	}
}

func mustBeXML(t *testing.T, svg []byte) {
	t.Helper()
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		if _, err := d.Token(); err == io.EOF {
			return
		} else if err != nil {
			t.Fatalf("not XML: %v", err)
		}
	}
}

// What a sandbox printed must move no cursor and add no element.
func TestHostileText(t *testing.T) {
	g := &garden{}
	root := g.add(nil, "", pb.Verdict_VERDICT_UNSPECIFIED)
	n := g.add(root, "\x1b[2J</text><script>alert(1)</script>\u202e\xff\x00", files)
	n.Rewards = map[string]float64{"\x1b]0;x\x07<b>": 1}
	n.WithheldReason = "\x1b[31m<i>"
	var text, svg bytes.Buffer
	if err := Text(&text, g.nodes, TextOptions{IDs: true}); err != nil {
		t.Fatal(err)
	}
	if err := SVG(&svg, "<t\x1b>", g.nodes); err != nil {
		t.Fatal(err)
	}
	mustBeXML(t, svg.Bytes())
	for name, got := range map[string]string{"text": text.String(), "picture": svg.String()} {
		if strings.ContainsAny(got, "\x1b\x00\u202e") {
			t.Errorf("the %s has a control character: %q", name, got)
		}
	}
	if strings.Contains(svg.String(), "<script>") || strings.Contains(svg.String(), "<b>") {
		t.Error("the picture has an element that the sandbox wrote")
	}
}

// No two nodes may lie on each other, nor a label on a node.
func TestNothingOverlaps(t *testing.T) {
	g := rollout()
	for _, parent := range append([]*pb.Node(nil), g.nodes...) {
		for i := range 3 {
			g.add(g.add(parent, fmt.Sprintf("step %d of %s", i, parent.Id), files), "true", none)
		}
	}
	spots, width, height := layout(grow(g.nodes), 20)
	type box struct{ x0, x1, y float64 }
	var boxes []box
	for _, s := range spots {
		from := s.x - 9
		if s.label != "" {
			from = s.x - 14 - charWidth*float64(printable.Width(s.label))
		}
		boxes = append(boxes, box{from, s.x + 9, s.y})
		if s.x < 0 || s.x > width || s.y < headHeight || s.y > headHeight+height {
			t.Errorf("%s lies outside of the picture", s.Id)
		}
	}
	for i, a := range boxes {
		for _, b := range boxes[i+1:] {
			if a.x0 < b.x1 && b.x0 < a.x1 && a.y-b.y < rowHeight-1 && b.y-a.y < rowHeight-1 {
				t.Fatalf("%v and %v overlap", a, b)
			}
		}
	}
}

func TestDeepTreesAreDrawn(t *testing.T) {
	g := &garden{}
	at := g.add(nil, "", pb.Verdict_VERDICT_UNSPECIFIED)
	for range 5000 {
		at = g.add(at, "true", none)
	}
	if err := Text(io.Discard, g.nodes, TextOptions{Width: 80}); err != nil {
		t.Fatal(err)
	}
	if err := SVG(io.Discard, "deep", g.nodes); err != nil {
		t.Fatal(err)
	}
}

func TestNodesWithoutTheirParentAreRoots(t *testing.T) {
	g := rollout()
	var b bytes.Buffer
	if err := Text(&b, g.nodes[4:], TextOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(b.String(), "\n"); got != len(g.nodes)-4 {
		t.Errorf("%d lines for %d nodes", got, len(g.nodes)-4)
	}
}
