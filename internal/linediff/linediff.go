// Package linediff says in which lines two texts differ, as `diff -u` does.
package linediff

import (
	"fmt"
	"strings"
)

// maxWork bounds the comparison: texts that differ in more than two thousand lines are told as replaced, which is as true and less
// to look at.
const maxWork = 4 << 20

// Unified gives the hunks that lead from a to b, with context unchanged lines around each; none: they are equal. Its lines have no
// ends; that a text doesn't end its last line is a line of its own.
func Unified(a, b string, context int) []string {
	x, y := split(a), split(b)
	// What is equal at both ends needs no search.
	head := 0
	for head < len(x) && head < len(y) && x[head] == y[head] {
		head++
	}
	tail := 0
	for tail < len(x)-head && tail < len(y)-head && x[len(x)-1-tail] == y[len(y)-1-tail] {
		tail++
	}
	keep := common(x[head:len(x)-tail], y[head:len(y)-tail])
	var all []op
	for i := range head {
		all = append(all, op{' ', x[i]})
	}
	i, j := head, head
	for _, k := range append(keep, pair{len(x) - tail - head, len(y) - tail - head}) {
		for ; i < head+k.a; i++ {
			all = append(all, op{'-', x[i]})
		}
		for ; j < head+k.b; j++ {
			all = append(all, op{'+', y[j]})
		}
		if i < len(x) && j < len(y) {
			all = append(all, op{' ', x[i]})
			i, j = i+1, j+1
		}
	}
	for ; i < len(x); i++ {
		all = append(all, op{' ', x[i]})
	}
	return hunks(all, context)
}

type op struct {
	sign byte
	line string
}

type pair struct{ a, b int }

const noEnd = "\n\\ No newline at end of file"

// split gives lines without their ends; one that has none isn't equal to one that has.
func split(text string) []string {
	if text == "" {
		return nil
	}
	lines := strings.Split(text, "\n")
	if last := len(lines) - 1; lines[last] == "" {
		return lines[:last]
	} else {
		lines[last] += noEnd
	}
	return lines
}

// common finds a longest list of lines that both have in the same order (Myers 1986, O(ND)), or nothing if that takes too much.
func common(x, y []string) []pair {
	if len(x) == 0 || len(y) == 0 {
		return nil
	}
	most := len(x) + len(y)
	at := make([]int, 2*most+2)
	var trace [][]int
	work := 0
	for d := 0; d <= most; d++ {
		trace = append(trace, append([]int(nil), at[most-d:most+d+2]...))
		if work += 2*d + 2; work > maxWork {
			return nil
		}
		for k := -d; k <= d; k += 2 {
			var i int
			if k == -d || k != d && at[most+k-1] < at[most+k+1] {
				i = at[most+k+1]
			} else {
				i = at[most+k-1] + 1
			}
			for i < len(x) && i-k < len(y) && x[i] == y[i-k] {
				i++
			}
			if at[most+k] = i; i >= len(x) && i-k >= len(y) {
				return back(trace, x, y)
			}
		}
	}
	return nil
}

// back follows the way that was found from its end.
func back(trace [][]int, x, y []string) []pair {
	var keep []pair
	i, j := len(x), len(y)
	for d := len(trace) - 1; d >= 0; d-- {
		// trace[d] holds diagonals -d to d+1 as they were before step d.
		was := func(k int) int { return trace[d][k+d] }
		k, from := i-j, 0
		if k == -d || k != d && was(k-1) < was(k+1) {
			from = k + 1
		} else {
			from = k - 1
		}
		pi := 0
		if d > 0 {
			pi = was(from)
		}
		pj := pi - from
		if d == 0 {
			pi, pj = 0, 0
		}
		for i > pi && j > pj {
			i, j = i-1, j-1
			keep = append(keep, pair{i, j})
		}
		i, j = pi, pj
	}
	for l, r := 0, len(keep)-1; l < r; l, r = l+1, r-1 {
		keep[l], keep[r] = keep[r], keep[l]
	}
	return keep
}

func hunks(all []op, context int) (out []string) {
	a, b := 1, 1 // numbers of the next lines
	for i := 0; i < len(all); {
		if all[i].sign == ' ' {
			i, a, b = i+1, a+1, b+1
			continue
		}
		from := max(0, i-context)
		to, quiet := i, 0
		for k := i; k < len(all) && quiet <= 2*context; k++ {
			if all[k].sign == ' ' {
				quiet++
			} else {
				to, quiet = k+1, 0
			}
		}
		end := min(len(all), to+context)
		before, after := 0, 0
		for _, o := range all[from:end] {
			if o.sign != '+' {
				before++
			}
			if o.sign != '-' {
				after++
			}
		}
		back := i - from
		out = append(out, fmt.Sprintf("@@ -%s +%s @@", span(a-back, before), span(b-back, after)))
		for _, o := range all[from:end] {
			out = append(out, strings.Split(string(o.sign)+o.line, "\n")...)
		}
		a, b, i = a-back+before, b-back+after, end
	}
	return out
}

func span(first, count int) string {
	switch count {
	case 0:
		return fmt.Sprintf("%d,0", first-1)
	case 1:
		return fmt.Sprint(first)
	}
	return fmt.Sprintf("%d,%d", first, count)
}
