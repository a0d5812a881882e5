package report

import (
	"bytes"
	"cmp"
	"fmt"
	"html"
	"image/color"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The colours, by name, on light ground: pictures have them as they are, and in
// the page each is a variable that has another value on dark ground. The verdicts'
// are those of `boxwood tree show --svg`, and differ in lightness for the
// colour-blind.
var palette = map[string]color.RGBA{
	"paper": rgb(0xffffff), "ink": rgb(0x24292f), "faint": rgb(0xd0d7de),
	"none": rgb(0x8c959f), "files": rgb(0x0969da), "process": rgb(0x8250df), "both": rgb(0xbf3989),
	"red": rgb(0xcf222e), "green": rgb(0x1a7f37), "orange": rgb(0xbc4c00),
}

// hexOf is a colour as the SVG has it.
func hexOf(c color.RGBA) string { return fmt.Sprintf("#%02X%02X%02X", c.R, c.G, c.B) }

func rgb(v uint32) color.RGBA { return color.RGBA{uint8(v >> 16), uint8(v >> 8), uint8(v), 255} }

// The size of a picture, in points.
const (
	width        = 640
	legendHeight = 24
	margin       = 6
)

// picture is a plot with a legend above it.
type picture struct {
	*plot.Plot
	height vg.Length
	legend []key
}

type key struct {
	name, colour string
	mark         rune // what stands for it: 'b' a box, '-' a line, '.' a disc, 'o' a ring, 'x' a cross
	dashes       []vg.Length
}

func newPicture(x, y string, height vg.Length) *picture {
	p := plot.New()
	p.BackgroundColor = nil
	p.X.Label.Text, p.Y.Label.Text = x, y
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Color, axis.Tick.Color = palette["ink"], palette["ink"]
		axis.Padding, axis.Label.Padding = 4, 4
		styled(&axis.Label.TextStyle, 12)
		styled(&axis.Tick.Label, 11)
	}
	return &picture{Plot: p, height: height}
}

func styled(s *text.Style, size font.Length) {
	s.Font = font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}
	s.Color = palette["ink"]
}

func (p *picture) grid(vertical, horizontal bool) {
	g := plotter.NewGrid()
	g.Vertical.Color, g.Horizontal.Color = nil, nil
	if vertical {
		g.Vertical.Color, g.Vertical.Width = palette["faint"], 0.6
	}
	if horizontal {
		g.Horizontal.Color, g.Horizontal.Width = palette["faint"], 0.6
	}
	p.Add(g)
}

// paint draws the picture and, where one is wanted, its title.
func (p *picture) paint(c draw.Canvas, title string) {
	c = draw.Crop(c, margin, -margin, margin, -margin)
	style := draw.TextStyle{Handler: plot.DefaultTextHandler, YAlign: draw.YCenter}
	if title != "" {
		styled(&style, 14)
		c.FillText(style, vg.Point{X: c.Min.X, Y: c.Max.Y - legendHeight/2}, title)
		c = draw.Crop(c, 0, 0, 0, -legendHeight)
	}
	styled(&style, 11)
	x, y := c.Min.X, c.Max.Y-legendHeight/2
	for _, k := range p.legend {
		switch k.mark {
		case 'b':
			mark := vg.Path{}
			c.SetColor(palette[k.colour])
			mark.Move(vg.Point{X: x, Y: y - 5})
			mark.Line(vg.Point{X: x + 10, Y: y - 5})
			mark.Line(vg.Point{X: x + 10, Y: y + 5})
			mark.Line(vg.Point{X: x, Y: y + 5})
			mark.Close()
			c.Fill(mark)
		case '-':
			c.StrokeLine2(draw.LineStyle{Color: palette[k.colour], Width: 2, Dashes: k.dashes}, x, y, x+22, y)
			x += 12
		default:
			glyph(&c, k.mark, k.colour, vg.Point{X: x + 5, Y: y}, 4.5)
		}
		c.FillText(style, vg.Point{X: x + 15, Y: y}, k.name)
		x += 15 + style.Width(k.name) + 16
	}
	if len(p.legend) > 0 {
		c = draw.Crop(c, 0, 0, 0, -legendHeight)
	}
	p.Draw(c)
}

// glyph draws one node, or the mark of one in the legend.
func glyph(c *draw.Canvas, mark rune, colour string, at vg.Point, r vg.Length) {
	c.SetColor(palette[colour])
	c.SetLineWidth(1.6)
	c.SetLineDash(nil, 0)
	p := vg.Path{}
	switch mark {
	case 'x':
		p.Move(vg.Point{X: at.X - r, Y: at.Y - r})
		p.Line(vg.Point{X: at.X + r, Y: at.Y + r})
		p.Move(vg.Point{X: at.X - r, Y: at.Y + r})
		p.Line(vg.Point{X: at.X + r, Y: at.Y - r})
		c.Stroke(p)
	default:
		p.Move(vg.Point{X: at.X + r, Y: at.Y})
		p.Arc(at, r, 0, 2*math.Pi)
		if mark == 'o' {
			c.Stroke(p)
		} else {
			c.Fill(p)
		}
	}
}

func (p *picture) size(title string) (w, h vg.Length) {
	h = p.height
	if title != "" {
		h += legendHeight
	}
	if len(p.legend) > 0 {
		h += legendHeight
	}
	return width, h
}

// writePNG draws the picture with its title, three dots a point.
func (p *picture) writePNG(w io.Writer, title string) error {
	wide, high := p.size(title)
	c := vgimg.NewWith(vgimg.UseWH(wide, high), vgimg.UseDPI(3*72), vgimg.UseBackgroundColor(palette["paper"]))
	p.paint(draw.New(c), title)
	_, err := vgimg.PngCanvas{Canvas: c}.WriteTo(w)
	return err
}

var (
	styles = regexp.MustCompile(`style="[^"]*"`)
	hex    = regexp.MustCompile(`#[0-9A-F]{6}`)
	texts  = regexp.MustCompile(`(<text [^>]*font-size:([0-9.]+)px[^>]*)>([^<]*)</text>`)
	family = regexp.MustCompile(`font-family:[^;"]*;font-variant:normal;font-weight:normal;font-style:normal;`)
)

// svg draws the picture for the page: colours are variables, and the letters are
// the reader's, as wide as those that were measured. In texts quotes and brackets
// are escaped, so that none looks like a style or an element.
func (p *picture) svg(title string) (string, error) {
	variables := map[string]string{}
	for name, c := range palette {
		variables[hexOf(c)] = "var(--" + name + ")"
	}
	wide, high := p.size("")
	c := vgsvg.New(wide, high)
	p.paint(draw.New(c), "")
	var b bytes.Buffer
	if _, err := c.WriteTo(&b); err != nil {
		return "", err
	}
	out := styles.ReplaceAllStringFunc(b.String(), func(style string) string {
		return hex.ReplaceAllStringFunc(family.ReplaceAllString(style, ""), func(c string) string { return cmp.Or(variables[c], c) })
	})
	out = texts.ReplaceAllStringFunc(out, func(element string) string {
		part := texts.FindStringSubmatch(element)
		size, _ := strconv.ParseFloat(part[2], 64)
		style := draw.TextStyle{Handler: plot.DefaultTextHandler}
		styled(&style, font.Length(size))
		return fmt.Sprintf(`%s textLength="%.5g" lengthAdjust="spacingAndGlyphs">%s</text>`, part[1], style.Width(html.UnescapeString(part[3])).Points(), part[3])
	})
	_, body, ok := strings.Cut(out, "xlink\">")
	if !ok {
		return "", fmt.Errorf("drawing %s: an unknown form of SVG", title)
	}
	return fmt.Sprintf(`<svg viewBox="0 0 %g %g" role="img" aria-label="%s">`, wide.Points(), high.Points(), html.EscapeString(title)) + body, nil
}

// box is a rectangle in the data's coordinates.
type box struct {
	x0, x1, y0, y1 float64
	colour         string
}

// boxes draws rectangles, each at least narrowest wide.
type boxes struct {
	all       []box
	narrowest vg.Length
}

func (b boxes) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for _, r := range b.all {
		left, right := x(r.x0), x(r.x1)
		right = max(right, left+b.narrowest)
		c.FillPolygon(palette[r.colour], []vg.Point{{X: left, Y: y(r.y0)}, {X: right, Y: y(r.y0)}, {X: right, Y: y(r.y1)}, {X: left, Y: y(r.y1)}})
	}
}

func (b boxes) DataRange() (xmin, xmax, ymin, ymax float64) {
	xmin, xmax, ymin, ymax = math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)
	for _, r := range b.all {
		xmin, xmax, ymin, ymax = min(xmin, r.x0), max(xmax, r.x1), min(ymin, r.y0), max(ymax, r.y1)
	}
	return xmin, xmax, ymin, ymax
}

// rows names the rows of a plot, the first on top.
func (p *picture) rows(names []string) {
	var ticks plot.ConstantTicks
	for i, name := range names {
		ticks = append(ticks, plot.Tick{Value: float64(len(names) - 1 - i), Label: name})
	}
	p.Y.Tick.Marker, p.Y.Tick.Length, p.Y.Width = ticks, 0, 0
	p.Y.Min, p.Y.Max = -0.6, float64(len(names))-0.4
}

var verdictLegend = []key{{name: "nothing changed", colour: "none", mark: 'b'}, {name: "files", colour: "files", mark: 'b'},
	{name: "process", colour: "process", mark: 'b'}, {name: "both", colour: "both", mark: 'b'}}

// shareBars draws rows of name, turns and how many have each verdict.
func shareBars(rows [][]any) *picture {
	p := newPicture("share of turns (%)", "", vg.Length(60+22*len(rows)))
	p.legend = verdictLegend
	p.grid(true, false)
	var names []string
	var all []box
	for i, row := range rows {
		y, at := float64(len(rows)-1-i), 0.0
		names = append(names, fmt.Sprintf("%s (%s)", row[0], cell(row[1], "")))
		for j, verdict := range verdictWords {
			part := share(row[2+j].(int64), int(row[1].(int64)))
			if part > 0 {
				all = append(all, box{at, at + part, y - 0.36, y + 0.36, verdict})
			}
			at += part
		}
	}
	p.Add(boxes{all, 0})
	p.rows(names)
	p.X.Min, p.X.Max = 0, 100
	p.X.Tick.Marker = plot.ConstantTicks{{Value: 0, Label: "0"}, {Value: 25, Label: "25"}, {Value: 50, Label: "50"}, {Value: 75, Label: "75"}, {Value: 100, Label: "100"}}
	return p
}

// byteBars draws rows of policy, bytes a turn and their parts by kind.
func byteBars(rows [][]any) *picture {
	kinds := []key{{name: "files alone", colour: "files", mark: 'b'}, {name: "with shells", colour: "process", mark: 'b'}, {name: "with a dump", colour: "both", mark: 'b'}}
	most := 0.0
	for _, row := range rows {
		most = max(most, row[4].(float64))
	}
	unit, scale := byteUnit(most)
	p := newPicture("captured, a turn ("+unit+")", "", vg.Length(60+34*len(rows)))
	p.legend = kinds
	p.grid(true, false)
	var names []string
	var all []box
	for i, row := range rows {
		y, at := float64(len(rows)-1-i), 0.0
		names = append(names, fmt.Sprintf("%s (%s)", row[0], cell(row[1], "")))
		for j := range kinds {
			part := float64(row[5+j].(int64)) / float64(row[1].(int64)) / scale
			if part > 0 {
				all = append(all, box{at, at + part, y - 0.36, y + 0.36, kinds[j].colour})
			}
			at += part
		}
	}
	p.Add(boxes{all, 0})
	p.rows(names)
	p.X.Min, p.X.Max = 0, max(most/scale*1.04, 1)
	return p
}

func byteUnit(most float64) (string, float64) {
	for _, u := range []struct {
		name  string
		scale float64
	}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if most >= u.scale {
			return u.name, u.scale
		}
	}
	return "bytes", 1
}

// curve is a line of a plot, with its name in the legend.
type curve struct {
	name string
	xys  plotter.XYs
}

func (c *curve) add(x, y float64) { c.xys = append(c.xys, plotter.XY{X: x, Y: y}) }

// look is how a curve is drawn: dashes tell curves apart in print, too.
type look struct {
	colour string
	dashes []vg.Length
}

var (
	policyLooks = map[string]look{"uncaptured": {"none", []vg.Length{8, 3, 2, 3}}, "files": {"files", []vg.Length{3, 2}}, "sparse": {"green", nil}, "full": {"orange", []vg.Length{8, 3}}}
	batchLooks  = []look{{"green", nil}, {"files", []vg.Length{8, 3}}, {"orange", []vg.Length{3, 2}}, {"process", []vg.Length{8, 3, 2, 3}}}
)

func (p *picture) curve(c curve, as look, step plotter.StepKind) {
	l := &plotter.Line{XYs: c.xys, StepStyle: step}
	l.Color, l.Width, l.Dashes = palette[as.colour], 1.8, as.dashes
	p.Add(l)
	p.legend = append(p.legend, key{c.name, as.colour, '-', as.dashes})
}

func cumulativeCurves(curves []curve, checkpoints bool) *picture {
	most, longest := 0.0, 0.0
	for _, c := range curves {
		end := c.xys[len(c.xys)-1]
		most, longest = max(most, end.Y), max(longest, end.X)
	}
	what, scale := "checkpoints", 1.0
	if !checkpoints {
		what, scale = byteUnit(most)
	}
	p := newPicture("turns", what, 260)
	p.grid(true, true)
	if checkpoints {
		p.curve(curve{"one each turn", plotter.XYs{{}, {X: longest, Y: longest}}}, look{"none", []vg.Length{1, 3}}, plotter.NoStep)
	}
	for _, c := range curves {
		c.xys = slices.Clone(c.xys)
		for j := range c.xys {
			c.xys[j].Y /= scale
		}
		as, ok := policyLooks[c.name]
		if !ok {
			as.colour = "process"
		}
		p.curve(c, as, plotter.NoStep)
	}
	p.X.Min, p.Y.Min = 0, 0
	p.X.Max, p.Y.Max = max(p.X.Max, 1), max(p.Y.Max, 1)
	return p
}

// distribution is how many of the sorted values, in percent, aren't above each.
// Its points are closer where few values are: at the end.
func distribution(name string, sorted []float64) curve {
	c := curve{name: name}
	n := len(sorted)
	step := max(1, n/maxPoints)
	for i, v := range sorted {
		if i == 0 || i%step == 0 || i >= n-maxPoints/8 {
			c.add(v, 100*float64(i+1)/float64(n))
		}
	}
	return c
}

// distributions are drawn over decades; what is 0 stands at their beginning.
func distributions(curves []curve, x, y string) *picture {
	low, high := math.Inf(1), 0.0
	for _, c := range curves {
		for _, at := range c.xys {
			if at.X > 0 {
				low, high = min(low, at.X), max(high, at.X)
			}
		}
	}
	low, high = max(low, 1e-3), max(high, 1e-3)
	low, high = math.Pow(10, math.Floor(math.Log10(low))), math.Pow(10, math.Ceil(math.Log10(high)))
	if high <= low {
		high = low * 10
	}
	p := newPicture(x, y, 260)
	p.grid(true, true)
	for i, c := range curves {
		c.xys = slices.Clone(c.xys)
		for j := range c.xys {
			c.xys[j].X = max(c.xys[j].X, low)
		}
		c.xys = append(plotter.XYs{{X: c.xys[0].X}}, c.xys...)
		if c.xys[1].X <= low {
			c.xys = c.xys[1:]
		}
		c.add(high, 100)
		p.curve(c, batchLooks[i%len(batchLooks)], plotter.PostStep)
	}
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = low, high, 0, 100
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, decades{}
	return p
}

// decades are ticks of a logarithmic axis, with labels that are read at a glance.
type decades struct{}

func (decades) Ticks(low, high float64) (ticks []plot.Tick) {
	for at := low; at <= high*1.001; at *= 10 {
		ticks = append(ticks, plot.Tick{Value: at, Label: fmt.Sprintf("%.4g", at)})
		for i := 2.0; i < 10 && at*i < high; i++ {
			ticks = append(ticks, plot.Tick{Value: at * i})
		}
	}
	return ticks
}

// timelines draws what sandboxes did, each from its first turn on.
func timelines(lines []line, waits map[string]int64, saved map[string]capture) *picture {
	p := newPicture("seconds since its first turn", "", vg.Length(60+30*len(lines)))
	p.legend = append(slices.Clone(verdictLegend), key{name: "waited for a capture", colour: "red", mark: 'b'}, key{name: "capture", colour: "orange", mark: 'b'})
	p.grid(true, false)
	var names []string
	var all []box
	for i, l := range lines {
		names = append(names, l.name)
		y := float64(len(lines) - 1 - i)
		start := l.turns[0].from
		at := func(ns int64) float64 { return float64(ns-start) / 1e9 }
		for _, t := range l.turns {
			verdict := t.verdict
			if verdict == "" {
				verdict = "none"
			}
			all = append(all, box{at(t.from), at(t.to), y - 0.16, y + 0.36, verdict})
			if wait := waits[t.id]; wait > 0 {
				all = append(all, box{max(0, at(t.from-wait)), at(t.from), y - 0.16, y + 0.36, "red"})
			}
			if c, ok := saved[t.id]; ok && c.from >= start {
				all = append(all, box{at(c.from), at(c.from + c.took), y - 0.36, y - 0.22, "orange"})
			}
		}
	}
	p.Add(boxes{all, 1.2})
	p.rows(names)
	p.X.Min = 0
	p.X.Max = max(p.X.Max, 1e-3)
	return p
}

// drawing is a tree: nodes by depth, and each one's place from the top.
type drawing struct {
	nodes []*node
	y     map[string]float64
}

func drawTree(nodes []*node) *picture {
	d := drawing{nodes, map[string]float64{}}
	here := map[string]bool{}
	for _, n := range nodes {
		here[n.id] = true
	}
	children := map[string][]*node{}
	var stack []*node
	for _, n := range slices.Backward(nodes) {
		if here[n.parent] && n.parent != n.id {
			children[n.parent] = append(children[n.parent], n) // the last first, as they are taken from a stack
		} else {
			stack = append(stack, n)
		}
	}
	leaves := 0.0
	for len(stack) > 0 {
		n := stack[len(stack)-1]
		stack = append(stack[:len(stack)-1], children[n.id]...)
		if len(children[n.id]) == 0 {
			d.y[n.id] = -leaves
			leaves++
		}
	}
	for _, n := range slices.Backward(nodes) { // children before parents
		if all := children[n.id]; len(all) > 0 {
			d.y[n.id] = (d.y[all[0].id] + d.y[all[len(all)-1].id]) / 2
		}
	}
	p := newPicture("turns from the root", "", vg.Length(min(700, 80+14*leaves)))
	p.legend = append(slices.Clone(verdictLegend), key{name: "withheld", colour: "red", mark: 'x'}, key{name: "not captured yet", colour: "none", mark: 'o'})
	for i := range p.legend[:4] {
		p.legend[i].mark = '.'
	}
	p.HideY()
	p.Add(d)
	last := nodes[len(nodes)-1].depth
	p.X.Min, p.X.Max = float64(nodes[0].depth), max(float64(last), 1)
	p.X.Tick.Marker = wholes{}
	p.Y.Min, p.Y.Max = -max(leaves-1, 0)-0.5, 0.5
	return p
}

// wholes are the default ticks without those between whole numbers.
type wholes struct{}

func (wholes) Ticks(low, high float64) (ticks []plot.Tick) {
	for _, t := range (plot.DefaultTicks{}).Ticks(low, high) {
		if t.Value == math.Trunc(t.Value) {
			ticks = append(ticks, t)
		}
	}
	return ticks
}

func (d drawing) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	at := func(n *node) vg.Point { return vg.Point{X: x(float64(n.depth)), Y: y(d.y[n.id])} }
	places := map[string]vg.Point{}
	for _, n := range d.nodes {
		places[n.id] = at(n)
	}
	c.SetColor(palette["faint"])
	c.SetLineWidth(1.2)
	for _, n := range d.nodes {
		from, ok := places[n.parent]
		if !ok {
			continue
		}
		to := places[n.id]
		bend := from.X + (to.X-from.X)/2
		path := vg.Path{}
		path.Move(from)
		path.Line(vg.Point{X: bend, Y: from.Y})
		path.Line(vg.Point{X: bend, Y: to.Y})
		path.Line(to)
		c.Stroke(path)
	}
	// As large as the closest two can be.
	r := min(5, max(1.2, (c.Max.X-c.Min.X)/vg.Length(p.X.Max-p.X.Min)/2.4), max(1.2, (c.Max.Y-c.Min.Y)/vg.Length(p.Y.Max-p.Y.Min)/2.4))
	for _, n := range d.nodes {
		mark, colour, size := '.', cmp.Or(n.verdict, "ink"), r*0.62
		if n.own {
			size = r
		}
		switch n.capture {
		case "withheld":
			mark, colour, size = 'x', "red", r*0.8
		case "recorded":
			mark, colour, size = 'o', "none", r*0.8
		}
		glyph(&c, mark, colour, places[n.id], size)
	}
}
