// Package view draws trees, for a terminal and as a picture. Both name
// checkpoints by the same letters: a node that has its own checkpoint shows
// the letter, one that shares an ancestor's shows "=" and the letter.
//
// What it is given came out of sandboxes; all text passes package printable.
package view

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// branch is a node with its place in the tree.
type branch struct {
	*pb.Node
	children []*branch
	letter   string // of its checkpoint; "" while pending and when withheld
	own      bool   // whether the checkpoint was made for it
}

// grow arranges nodes, in any order, as trees; a node whose parent isn't among
// them is a root. Children stand in the order of their ordinals.
func grow(nodes []*pb.Node) (roots []*branch) {
	byID := make(map[string]*branch, len(nodes))
	for _, n := range nodes {
		byID[n.Id] = &branch{Node: n}
	}
	for _, n := range nodes {
		if parent := byID[n.ParentId]; parent != nil && n.ParentId != n.Id {
			parent.children = append(parent.children, byID[n.Id])
		} else {
			roots = append(roots, byID[n.Id])
		}
	}
	inOrder := func(a, b *branch) int {
		if a.Ordinal != b.Ordinal {
			return int(a.Ordinal) - int(b.Ordinal)
		}
		return strings.Compare(a.Id, b.Id)
	}
	slices.SortFunc(roots, inOrder)
	letters := map[string]string{}
	walk(roots, func(b *branch) {
		slices.SortFunc(b.children, inOrder)
		if b.CheckpointId == "" {
			return
		}
		if letters[b.CheckpointId] == "" {
			letters[b.CheckpointId] = letter(len(letters))
		}
		b.letter, b.own = letters[b.CheckpointId], b.CheckpointNodeId == b.Id
	})
	return roots
}

// walk visits every node, parents first. Trees are as deep as rollouts are
// long, so it doesn't recurse.
func walk(roots []*branch, visit func(*branch)) {
	stack := slices.Clone(roots)
	slices.Reverse(stack)
	for len(stack) > 0 {
		b := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		visit(b)
		for _, c := range slices.Backward(b.children) {
			stack = append(stack, c)
		}
	}
}

// letter counts A, B ... Z, AA, AB ...
func letter(i int) string {
	s := ""
	for i++; i > 0; i = (i - 1) / 26 {
		s = string(rune('A'+(i-1)%26)) + s
	}
	return s
}

// share is how the node's checkpoint is shown.
func (b *branch) share() string {
	switch {
	case b.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD:
		return "withheld"
	case b.letter == "":
		return "pending"
	case b.own:
		return b.letter + b.kind()
	}
	return "=" + b.letter + b.kind()
}

// kind tells of processes that the checkpoint has.
func (b *branch) kind() string {
	switch b.ProcessKind {
	case pb.ProcessKind_PROCESS_KIND_SHELLS:
		return " shells"
	case pb.ProcessKind_PROCESS_KIND_DUMP:
		return " dump"
	}
	return ""
}

func (b *branch) isRoot() bool { return b.ParentId == "" }

// action is what ran, as one line.
func (b *branch) action() string {
	if b.isRoot() {
		return "(start)"
	}
	text := printable.Line(strings.Join(strings.Fields(string(b.Action.GetText())), " "))
	if text == "" {
		return "(no command)"
	}
	return text
}

// outcome is what a reader must know about how the turn ended; "" if all went well.
func (b *branch) outcome() string {
	switch b.TurnStatus {
	case pb.TurnStatus_TURN_STATUS_TIMED_OUT:
		return "timed out"
	case pb.TurnStatus_TURN_STATUS_CANCELLED:
		return "cancelled"
	case pb.TurnStatus_TURN_STATUS_LOST:
		return "sandbox lost"
	}
	switch o := b.Observation; {
	case o.GetOomKilled():
		return "out of memory"
	case o.GetSignal() != 0:
		return fmt.Sprintf("signal %d", o.GetSignal())
	case o.GetExitCode() != 0:
		return fmt.Sprintf("exit %d", o.GetExitCode())
	}
	return ""
}

// rewards in the order of their names: "tests=0.5 lint=1".
func (b *branch) rewards() string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(b.Rewards)) {
		parts = append(parts, fmt.Sprintf("%s=%.4g", printable.Line(name), b.Rewards[name]))
	}
	return strings.Join(parts, " ")
}

// VerdictName is a verdict in lower case, "" for none given.
func VerdictName(v pb.Verdict) string {
	if v == pb.Verdict_VERDICT_UNSPECIFIED {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(v.String(), "VERDICT_"))
}

// Summary of a set of nodes.
type Summary struct {
	Nodes, Turns int
	// Silent turns changed nothing and were not captured.
	Silent               int
	Checkpoints          int
	Withheld, Pending    int
	Files, Process, Both int
}

// Summarise counts.
func Summarise(nodes []*pb.Node) (s Summary) {
	checkpoints := map[string]bool{}
	for _, n := range nodes {
		s.Nodes++
		if n.CheckpointId != "" {
			checkpoints[n.CheckpointId] = true
		}
		switch n.Capture {
		case pb.CaptureStatus_CAPTURE_STATUS_WITHHELD:
			s.Withheld++
		case pb.CaptureStatus_CAPTURE_STATUS_RECORDED:
			s.Pending++
		}
		if n.ParentId == "" {
			continue
		}
		s.Turns++
		switch n.Verdict {
		case pb.Verdict_VERDICT_NONE:
			s.Silent++
		case pb.Verdict_VERDICT_FILES:
			s.Files++
		case pb.Verdict_VERDICT_PROCESS:
			s.Process++
		case pb.Verdict_VERDICT_BOTH:
			s.Both++
		}
	}
	s.Checkpoints = len(checkpoints)
	return s
}

func (s Summary) String() string {
	text := fmt.Sprintf("%d nodes, %d checkpoints", s.Nodes, s.Checkpoints)
	if s.Turns > 0 {
		text += fmt.Sprintf("; %d of %d turns (%.0f %%) changed nothing", s.Silent, s.Turns, 100*float64(s.Silent)/float64(s.Turns))
	}
	if s.Withheld > 0 {
		text += fmt.Sprintf("; %d withheld", s.Withheld)
	}
	if s.Pending > 0 {
		text += fmt.Sprintf("; %d being captured", s.Pending)
	}
	return text
}
