package view

import (
	"bufio"
	"io"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// TextOptions of Text.
type TextOptions struct {
	// Width of the terminal in cells; 0: as wide as it needs.
	Width int
	Color bool
	// IDs shows each node's id.
	IDs bool
}

// row is one line of the picture.
type row struct {
	lead string // branches and marker
	b    *branch
}

// Text draws a tree, one node a line. An only child stands below its parent in
// the same column, so that a rollout of a hundred turns stays readable; the
// children of a fork are indented.
func Text(w io.Writer, nodes []*pb.Node, o TextOptions) error {
	var rows []row
	for _, root := range grow(nodes) {
		rows = append(rows, rowsOf(root)...)
	}
	var leadWidth, actionWidth, shareWidth, outcomeWidth, rewardsWidth int
	for _, r := range rows {
		leadWidth = max(leadWidth, printable.Width(r.lead)+min(printable.Width(r.b.action()), 60))
		shareWidth = max(shareWidth, len(r.b.share()))
		outcomeWidth = max(outcomeWidth, len(r.b.outcome()))
		rewardsWidth = max(rewardsWidth, printable.Width(r.b.rewards()))
	}
	const verdictWidth = 7
	rest := 2 + verdictWidth + 2 + shareWidth
	for _, width := range []int{outcomeWidth, rewardsWidth} {
		if width > 0 {
			rest += 2 + width
		}
	}
	if o.IDs {
		rest += 2 + 29
	}
	actionWidth = leadWidth
	if o.Width > 0 {
		actionWidth = min(actionWidth, max(20, o.Width-rest))
	}

	out := bufio.NewWriter(w)
	for _, r := range rows {
		paint := colors[r.b.Verdict]
		if r.b.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD {
			paint = "31"
		}
		action := printable.Cut(r.b.action(), max(1, actionWidth-printable.Width(r.lead)))
		verdict := VerdictName(r.b.Verdict)
		if r.b.isRoot() {
			verdict = "" // no turn led to it
		}
		line := printable.Pad(r.lead+action, actionWidth) +
			"  " + colored(printable.Pad(verdict, verdictWidth), paint, o.Color) +
			"  " + printable.Pad(r.b.share(), shareWidth)
		if outcomeWidth > 0 {
			line += "  " + colored(printable.Pad(r.b.outcome(), outcomeWidth), "33", o.Color)
		}
		if rewardsWidth > 0 {
			line += "  " + colored(printable.Pad(r.b.rewards(), rewardsWidth), "32", o.Color)
		}
		if o.IDs {
			line += "  " + printable.Line(r.b.Id)
		}
		out.WriteString(strings.TrimRight(line, " "))
		out.WriteByte('\n')
	}
	return out.Flush()
}

// rowsOf lays a tree out, without recursion: rollouts can be deep.
func rowsOf(root *branch) (rows []row) {
	type place struct {
		b            *branch
		lead, indent string // of its own line, of the lines below it
	}
	stack := []place{{b: root}}
	for len(stack) > 0 {
		p := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		rows = append(rows, row{p.lead + marker(p.b) + " ", p.b})
		switch n := len(p.b.children); n {
		case 0:
		case 1:
			stack = append(stack, place{p.b.children[0], p.indent, p.indent})
		default:
			for i := n - 1; i >= 0; i-- {
				lead, below := "├─", "│ "
				if i == n-1 {
					lead, below = "└─", "  "
				}
				stack = append(stack, place{p.b.children[i], p.indent + lead, p.indent + below})
			}
		}
	}
	return rows
}

func marker(b *branch) string {
	switch {
	case b.isRoot():
		return "◆"
	case b.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD:
		return "×"
	case b.own:
		return "●"
	}
	return "○"
}

var colors = map[pb.Verdict]string{
	pb.Verdict_VERDICT_NONE:    "2",  // dim
	pb.Verdict_VERDICT_FILES:   "36", // cyan
	pb.Verdict_VERDICT_PROCESS: "35",
	pb.Verdict_VERDICT_BOTH:    "33",
}

func colored(s, code string, on bool) string {
	if !on || code == "" || strings.TrimSpace(s) == "" {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}
