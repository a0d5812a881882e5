package report

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"cell":    cell,
	"number":  func(n int) string { return grouped(int64(n)) },
	"numeric": func(v any) bool { _, text := v.(string); return !text },
	"warns":   func(f *Figure, row []any) bool { return f.warn != nil && f.warn(row) },
}).Parse(pageText))

// shown is a figure with its picture.
type shown struct {
	*Figure
	SVG template.HTML
}

// WriteHTML writes the page. It needs nothing beside it, and runs nothing.
// sources says what the figures are of.
func WriteHTML(w io.Writer, title string, sources []string, figures []*Figure) error {
	var all []shown
	for _, f := range figures[1:] {
		s := shown{Figure: f}
		if f.draw != nil {
			svg, err := f.draw().svg(f.Title)
			if err != nil {
				return err
			}
			s.SVG = template.HTML(svg) // made by draw.go alone, which escapes texts
		}
		all = append(all, s)
	}
	var light strings.Builder
	for _, name := range slices.Sorted(maps.Keys(palette)) {
		fmt.Fprintf(&light, "--%s:%s;", name, hexOf(palette[name]))
	}
	return page.Execute(w, map[string]any{"Light": template.CSS(light.String()), "Title": title, "Sources": sources, "Overview": figures[0], "Figures": all})
}

// WriteJSON writes the figures as an object {"figures": [...]}.
func WriteJSON(w io.Writer, figures []*Figure) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(map[string]any{"figures": figures})
}

// Draws says whether there is anything to draw.
func (f *Figure) Draws() bool { return f.draw != nil }

// WritePNG draws the figure, with its title and n above.
func (f *Figure) WritePNG(w io.Writer) error {
	return f.draw().writePNG(w, fmt.Sprintf("%s (n = %s %s)", f.Title, grouped(int64(f.N)), f.Of))
}

// cell is a value as the page has it.
func cell(value any, unit string) string {
	switch v := value.(type) {
	case nil:
		return "–"
	case int64:
		if unit == "bytes" {
			return cell(float64(v), unit)
		}
		return grouped(v)
	case float64:
		switch unit {
		case "bytes":
			name, scale := byteUnit(v)
			if scale == 1 {
				return fmt.Sprintf("%.0f B", v)
			}
			return fmt.Sprintf("%.1f %s", v/scale, name)
		case "ms":
			if v >= 1000 {
				return grouped(int64(v))
			}
			return fmt.Sprintf("%.3g", v)
		}
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprint(value)
}

// grouped is a number with its thousands apart.
func grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
