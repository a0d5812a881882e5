package view

import (
	"bufio"
	"fmt"
	"html"
	"io"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Sizes of the picture in pixels. charWidth is that of 11 px monospace, rounded up.
const (
	rowHeight  = 34.0
	charWidth  = 6.7
	smallStep  = 26.0 // into a silent turn of a run, which has no label
	bucket     = 8.0  // contours are kept in steps of x this wide
	marginX    = 32.0
	headHeight = 92.0
	goodWidth  = 2000.0 // labels get shorter before the picture gets wider
)

// spot is where a node is drawn.
type spot struct {
	*branch
	parent   *spot
	children []*spot
	x, y     float64
	label    string // what led to it; on its incoming edge
	note     string // to the right of a leaf: outcome and rewards
}

// SVG draws a tree as a picture that stands alone and reads on light and dark
// grounds. Time runs to the right; the label on an edge is the action. Nodes
// are coloured by verdict; those that share one checkpoint lie on one band of
// colour, and the node that it was made for carries its letter. Every node has
// its full text as a tooltip.
func SVG(w io.Writer, title string, nodes []*pb.Node) error {
	roots := grow(nodes)
	var spots []*spot
	var width, height float64
	for _, length := range []int{30, 24, 18, 14} {
		spots, width, height = layout(roots, length)
		if width <= goodWidth {
			break
		}
	}
	out := bufio.NewWriter(w)
	width, height = max(width+marginX, 760), height+headHeight
	fmt.Fprintf(out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f" role="img">`+"\n", width, height, width, height)
	fmt.Fprintf(out, "<title>%s</title>\n<style>%s</style>\n", esc(printable.Line(title)), style)
	fmt.Fprintf(out, `<rect class="ground" width="%.0f" height="%.0f" rx="8"/>`+"\n", width, height)
	head(out, title, Summarise(nodes))
	bands(out, spots)
	for _, s := range spots {
		if s.parent != nil {
			fmt.Fprintf(out, `<path class="edge" d="%s"/>`+"\n", edge(s.parent, s))
		}
	}
	for _, s := range spots {
		drawNode(out, s)
	}
	out.WriteString("</svg>\n")
	return out.Flush()
}

// style holds the colours. The verdicts' fills have a contrast of at least 3
// to both grounds and differ in lightness, too, for the colour-blind.
const style = `
text{font:11px ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;fill:#3a4048}
.ground{fill:#fff}.title{font:600 15px system-ui,"DejaVu Sans",sans-serif;fill:#1b1f24}.sub{font:12px system-ui,"DejaVu Sans",sans-serif;fill:#6a737d}
.edge{fill:none;stroke:#a3acb8;stroke-width:1.5}.label{fill:#57606a}.note{font-weight:600;fill:#1a7f37}.bad{font-weight:600;fill:#bc4c00}
.letter{font:700 10px system-ui,"DejaVu Sans",sans-serif;fill:#fff;text-anchor:middle}
.none{fill:#8c959f}.files{fill:#0969da}.process{fill:#8250df}.both{fill:#bf3989}.root{fill:#24292f}.withheld{fill:#fff;stroke:#cf222e;stroke-width:2}.pending{fill:#fff;stroke:#8c959f;stroke-width:1.5;stroke-dasharray:2 2}
.cross{stroke:#cf222e;stroke-width:2}.ring{fill:none;stroke:#1a7f37;stroke-width:2}
.b0{stroke:#54aeff}.b1{stroke:#4ac26b}.b2{stroke:#d4a72c}.b3{stroke:#c297ff}.b4{stroke:#ff8182}.b5{stroke:#39c5bb}.band{stroke-width:20;stroke-linecap:round;stroke-linejoin:round;fill:none;stroke-opacity:.28}
@media (prefers-color-scheme:dark){text{fill:#c9d1d9}.ground{fill:#0d1117}.title{fill:#f0f6fc}.sub{fill:#8b949e}.edge{stroke:#57606a}.label{fill:#adbac7}.note{fill:#56d364}.bad{fill:#ffa657}.root{fill:#6e7681}.none{fill:#768390}.withheld,.pending{fill:#0d1117}.ring{stroke:#56d364}.band{stroke-opacity:.3}}
`

// layout places every node and gives the picture's size without the head.
func layout(roots []*branch, length int) (spots []*spot, width, height float64) {
	top := headHeight
	for _, root := range roots {
		// Parents come before their children in spots, so x goes down the list and
		// contours come up it.
		first := len(spots)
		var pairs []*spot
		byBranch := map[*branch]*spot{}
		walk([]*branch{root}, func(b *branch) {
			s := &spot{branch: b}
			for _, c := range b.children {
				byBranch[c] = s // the parent of c, until c is visited
			}
			s.parent = byBranch[b]
			pairs = append(pairs, s)
			place(s, length)
			if s.parent != nil {
				s.parent.children = append(s.parent.children, s)
			}
		})
		spots = append(spots, pairs...)
		contours := map[*spot]contour{}
		for i := len(spots) - 1; i >= first; i-- {
			contours[spots[i]] = tidy(spots[i], contours)
		}
		// Until here y is relative to the parent.
		whole := contours[spots[first]]
		low, high := whole.extent()
		spots[first].y = top - low + rowHeight/2
		for _, s := range spots[first+1:] {
			s.y += s.parent.y
		}
		for _, s := range spots[first:] {
			width = max(width, s.x+12+charWidth*float64(printable.Width(s.note)))
		}
		top += high - low + rowHeight
	}
	return spots, width, top - headHeight + 8
}

// place decides a node's x and texts; both depend on its ancestors alone.
func place(s *spot, length int) {
	if len(s.children) == 0 && len(s.branch.children) == 0 {
		s.note = strings.TrimSpace(s.outcome() + " " + s.rewards())
	} else {
		s.note = s.rewards()
	}
	if s.parent == nil {
		s.x = marginX
		return
	}
	silentRun := s.Verdict == pb.Verdict_VERDICT_NONE && !s.own && len(s.branch.children) == 1 &&
		len(s.parent.branch.children) == 1 && s.note == "" && s.Capture != pb.CaptureStatus_CAPTURE_STATUS_WITHHELD
	if silentRun {
		s.x = s.parent.x + smallStep
		return
	}
	s.label = printable.Cut(s.action(), length)
	lead := 18.0
	if len(s.parent.branch.children) > 1 {
		lead = 36
	}
	if s.parent.note != "" {
		lead += charWidth * float64(printable.Width(s.parent.note))
	}
	s.x = s.parent.x + lead + charWidth*float64(printable.Width(s.label)) + 16
}

// contour is how far a subtree reaches up and down in each bucket of x,
// relative to its root: what Reingold and Tilford call its two contours, kept
// by x since nodes of one depth don't stand at one x here. All reaches are off
// by dy, so that a subtree moves without touching its cells.
type contour struct {
	reach map[int][2]float64
	dy    float64
}

func (c contour) extent() (low, high float64) {
	for _, r := range c.reach {
		low, high = min(low, r[0]+c.dy), max(high, r[1]+c.dy)
	}
	return low, high
}

// below says how far c must move down to lie under above.
func (c contour) below(above contour) float64 {
	shift := 0.0
	fewer, more, sign := c, above, 1
	if len(above.reach) < len(c.reach) {
		fewer, more, sign = above, c, -1
	}
	for x, a := range fewer.reach {
		b, ok := more.reach[x]
		if !ok {
			continue
		}
		if sign > 0 {
			shift = max(shift, b[1]+more.dy-(a[0]+fewer.dy)+rowHeight)
		} else {
			shift = max(shift, a[1]+fewer.dy-(b[0]+more.dy)+rowHeight)
		}
	}
	return shift
}

// join is both contours as one. It uses up the larger one, so that a deep tree
// costs no more than its size times its logarithm.
func join(a, b contour) contour {
	if len(a.reach) < len(b.reach) {
		a, b = b, a
	}
	for x, r := range b.reach {
		a.add(x, r[0]+b.dy, r[1]+b.dy)
	}
	return a
}

func (c contour) add(x int, low, high float64) {
	low, high = low-c.dy, high-c.dy
	if there, ok := c.reach[x]; ok {
		low, high = min(low, there[0]), max(high, there[1])
	}
	c.reach[x] = [2]float64{low, high}
}

// tidy stacks the children of s as close as their contours allow, centres s
// beside them and gives the contour of the whole.
func tidy(s *spot, contours map[*spot]contour) contour {
	stacked := contour{reach: map[int][2]float64{}}
	for i, child := range s.children {
		c := contours[child]
		delete(contours, child)
		if i > 0 {
			child.y = max(s.children[i-1].y+rowHeight, c.below(stacked))
			c.dy += child.y
		}
		stacked = join(stacked, c)
	}
	if n := len(s.children); n > 0 {
		middle := (s.children[0].y + s.children[n-1].y) / 2
		for _, child := range s.children {
			child.y -= middle
		}
		stacked.dy -= middle
	}
	from := s.x - 12
	if s.parent != nil {
		from = s.parent.x + 4
	}
	to := s.x + 14 + charWidth*float64(printable.Width(s.note))
	for x := int(from / bucket); x <= int(to/bucket); x++ {
		stacked.add(x, 0, 0)
	}
	return stacked
}

// edge leaves the parent, bends within 24 px and runs level to the child, so
// that the label has a straight line to stand on.
func edge(from, to *spot) string {
	if from.y == to.y {
		return fmt.Sprintf("M%.1f %.1fH%.1f", from.x, from.y, to.x)
	}
	start := from.x
	if from.note != "" {
		start += 10 + charWidth*float64(printable.Width(from.note))
	}
	return fmt.Sprintf("M%.1f %.1fH%.1fC%.1f %.1f %.1f %.1f %.1f %.1fH%.1f",
		from.x, from.y, start, start+16, from.y, start+8, to.y, start+24, to.y, to.x)
}

// bands draws what shares a checkpoint under the nodes: one path each, so that
// it doesn't get darker where its strokes meet.
func bands(out io.Writer, spots []*spot) {
	paths := map[string]*strings.Builder{}
	var order []string
	for _, s := range spots {
		if s.CheckpointId == "" {
			continue
		}
		d := fmt.Sprintf("M%.1f %.1fh.01", s.x, s.y)
		if s.parent != nil && s.parent.CheckpointId == s.CheckpointId {
			d = edge(s.parent, s)
		} else if !s.own && !s.isRoot() {
			continue
		}
		if paths[s.CheckpointId] == nil {
			paths[s.CheckpointId] = &strings.Builder{}
			order = append(order, s.CheckpointId)
		}
		paths[s.CheckpointId].WriteString(d)
	}
	for i, id := range order {
		fmt.Fprintf(out, `<path class="band b%d" d="%s"/>`+"\n", i%6, paths[id])
	}
}

func drawNode(out io.Writer, s *spot) {
	class, radius := VerdictName(s.Verdict), 5.0
	switch {
	case s.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD:
		class, radius = "withheld", 7
	case s.isRoot():
		class, radius = "root", 9
	case s.letter == "":
		class, radius = "pending", 6
	case s.own:
		radius = 9
	}
	fmt.Fprintf(out, "<g><title>%s</title>", esc(tooltip(s)))
	fmt.Fprintf(out, `<circle class="%s" cx="%.1f" cy="%.1f" r="%.0f"/>`, class, s.x, s.y, radius)
	end := s.x - radius - 5
	if s.Pinned {
		end -= 4
		fmt.Fprintf(out, `<circle class="ring" cx="%.1f" cy="%.1f" r="%.0f"/>`, s.x, s.y, radius+3)
	}
	switch {
	case class == "withheld":
		fmt.Fprintf(out, `<path class="cross" d="M%.1f %.1fl6 6m0 -6l-6 6"/>`, s.x-3, s.y-3)
	case s.own || s.isRoot():
		fmt.Fprintf(out, `<text class="letter" x="%.1f" y="%.1f">%s</text>`, s.x, s.y+3.6, s.letter)
	}
	if s.label != "" {
		fmt.Fprintf(out, `<text class="label" x="%.1f" y="%.1f" text-anchor="end">%s</text>`, end, s.y-5, esc(s.label))
	}
	if s.note != "" {
		class, y := "note", s.y+4
		if len(s.children) > 0 {
			y = s.y - 5 // above the edge that goes on
		}
		if s.outcome() != "" && len(s.children) == 0 {
			class = "bad"
		}
		fmt.Fprintf(out, `<text class="%s" x="%.1f" y="%.1f">%s</text>`, class, s.x+radius+5, y, esc(s.note))
	}
	fmt.Fprintln(out, "</g>")
}

func tooltip(s *spot) string {
	lines := []string{s.action(), printable.Line(s.Id)}
	if v := VerdictName(s.Verdict); v != "" {
		lines = append(lines, "verdict "+v)
	}
	switch {
	case s.WithheldReason != "":
		lines = append(lines, "withheld: "+printable.Line(s.WithheldReason))
	case s.own:
		lines = append(lines, "has checkpoint "+s.letter)
	case s.letter != "":
		lines = append(lines, "shares checkpoint "+s.letter)
	}
	for _, more := range []string{s.outcome(), s.rewards()} {
		if more != "" {
			lines = append(lines, more)
		}
	}
	return strings.Join(lines, "\n")
}

func head(out io.Writer, title string, s Summary) {
	fmt.Fprintf(out, `<text class="title" x="%.0f" y="30">%s</text><text class="sub" x="%.0f" y="50">%s</text>`+"\n",
		marginX-9, esc(printable.Line(title)), marginX-9, esc(s.String()))
	x := marginX - 3
	for _, k := range []struct {
		class, word string
		shown       bool
	}{
		{"none", "nothing changed", s.Silent > 0}, {"files", "files", s.Files > 0}, {"process", "process", s.Process > 0},
		{"both", "files and process", s.Both > 0}, {"withheld", "withheld", s.Withheld > 0}, {"pending", "being captured", s.Pending > 0},
	} {
		if !k.shown {
			continue
		}
		fmt.Fprintf(out, `<circle class="%s" cx="%.0f" cy="70" r="5"/><text class="sub" x="%.0f" y="74">%s</text>`, k.class, x, x+10, k.word)
		x += 30 + 6.6*float64(len(k.word))
	}
	fmt.Fprintf(out, `<path class="band b0" d="M%.0f 70h18"/><text class="sub" x="%.0f" y="74">one checkpoint</text>`+"\n", x+6, x+40)
}

func esc(s string) string { return html.EscapeString(s) }
