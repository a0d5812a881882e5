package corpus

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/boxwood-rl/boxwood/tree"
)

// step is one command of a program.
type step struct {
	stratum
	still bool // it is meant to change nothing
}

// program is what one turn runs.
type program struct {
	dir   string // /w: files of the image, /u: the sandbox's own
	steps []step
	// together runs all steps at once instead of one after the other.
	together bool
}

var interpreter = map[string]string{"c": "/opt/ways", "p": "/opt/py", "s": "bash /opt/ways.sh"}

// line is the step as a shell command that tells its status.
func (s step) line() string {
	words := []string{interpreter[s.lang], option[s.origin], s.way}
	if s.way == "" {
		words[1] = "-s" // it leaves a process behind
	}
	return strings.Join(strings.Fields(strings.Join(words, " ")), " ") + " >/dev/null 2>&1; echo $?"
}

// stays says that it is the turn which leaves the process behind that the next one asks.
func (p program) stays() bool { return p.steps[0].way == "" }

func (p program) script() string {
	lines := make([]string, len(p.steps))
	for i, s := range p.steps {
		lines[i] = s.line()
		if p.together {
			lines[i] = "(" + lines[i] + ") &"
		}
	}
	if p.together {
		lines = append(lines, "wait")
	}
	return "cd " + p.dir + "\n" + strings.Join(lines, "\n")
}

func (p program) String() string {
	return strings.ReplaceAll(p.script(), " >/dev/null 2>&1; echo $?", "")
}

// without is the program less step i.
func (p program) without(i int) program {
	p.steps = append(p.steps[:i:i], p.steps[i+1:]...)
	return p
}

// generator writes the programs of one run: the same seed, the same programs.
type generator struct {
	r    *rand.Rand
	left []stratum // strata in random order, so that every one has its turn
	idle []stratum // the same of those that about is about
}

// about is a life that is about these strata, as briefly as it can be: one or two turns
// that may change something.
func (g *generator) about(idle []stratum) []program {
	if len(g.idle) == 0 {
		slices.SortFunc(idle, func(a, b stratum) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
		g.r.Shuffle(len(idle), func(i, j int) { idle[i], idle[j] = idle[j], idle[i] })
		g.idle = idle
	}
	next := func() stratum {
		s := g.idle[0]
		g.idle = g.idle[1:]
		return s
	}
	dirs := []string{"/w", "/u"}
	g.r.Shuffle(2, func(i, j int) { dirs[i], dirs[j] = dirs[j], dirs[i] })
	first := next()
	turns := g.beside(dirs[0], first)
	// What follows needs a capture between, so that its verdict is its own.
	if rowOf(first.way).half == tree.Files && first.origin != survivors && len(g.idle) > 0 && g.idle[0].origin != survivors {
		turns = append(turns, g.beside(dirs[1], next())...)
	}
	return turns
}

func (g *generator) stratum() stratum {
	if len(g.left) == 0 {
		g.left = strata()
		g.r.Shuffle(len(g.left), func(i, j int) { g.left[i], g.left[j] = g.left[j], g.left[i] })
	}
	s := g.left[0]
	g.left = g.left[1:]
	return s
}

func (g *generator) quietStep(lang string) step {
	if lang == "" {
		lang = string("cccsssp"[g.r.IntN(7)])
	}
	origin := own
	if lang != "s" && g.r.IntN(5) == 0 {
		origin = shared
	}
	return step{stratum{still[lang][g.r.IntN(len(still[lang]))], lang, origin}, true}
}

// life is a few turns of one sandbox: most change nothing, the last may.
func (g *generator) life() (turns []program) {
	dir := []string{"/w", "/u"}[g.r.IntN(2)]
	quiet := func() program {
		p := program{dir: dir, together: g.r.IntN(10) == 0}
		for range 1 + g.r.IntN(3) {
			p.steps = append(p.steps, g.quietStep(""))
		}
		return p
	}
	for range g.r.IntN(3) {
		turns = append(turns, quiet())
	}
	last := g.stratum()
	if last.origin == survivors {
		return g.beside(dir, last)
	}
	// A change of the one before that is captured: files alone.
	if other := g.stratum(); rowOf(other.way).half != tree.Files || other.origin == survivors {
		g.left = append(g.left, other)
	} else if g.r.IntN(3) == 0 {
		turns = append(turns, program{dir: dir, steps: []step{{other, false}}}, quiet())
	} else {
		g.left = append([]stratum{other}, g.left...)
	}
	return append(turns, g.beside(dir, last)...)
}

// beside is a turn that does this among steps that change nothing, and the one
// before it that it needs.
func (g *generator) beside(dir string, s stratum) []program {
	loud := program{dir: dir, steps: []step{{s, false}}}
	if s.origin == survivors {
		start := program{dir: dir, steps: []step{{stratum{"", s.lang, "stays"}, false}}}
		return []program{start, loud}
	}
	for range g.r.IntN(3) {
		at := g.r.IntN(len(loud.steps) + 1)
		loud.steps = append(loud.steps[:at:at], append([]step{g.quietStep("")}, loud.steps[at:]...)...)
	}
	loud.together = len(loud.steps) > 1 && g.r.IntN(8) == 0
	return []program{loud}
}

func history(turns []program) string {
	var b strings.Builder
	for i, p := range turns {
		fmt.Fprintf(&b, "turn %d: %s\n", i+1, strings.ReplaceAll(p.String(), "\n", "\n        "))
	}
	return b.String()
}
