package service

import (
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// A process that goes on in several children draws the same there, as long as nobody tells
// it to draw anew: what the documentation says to do makes them differ.
func TestReseed(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	for _, p := range []payload{
		python("reseed"),
		{name: "reseed.js", needs: "node", step: `echo 'step()' >/in; cat /out`,
			start: `mkfifo /in /out; exec 8<>/in; node -i <&8 >/tmp/log 2>&1 & cat /p/reseed.js >/in; echo 'fs.writeFileSync("/out", "ready")' >/in; cat /out`},
	} {
		t.Run(p.name, func(t *testing.T) {
			p.wanted(t)
			sb := d.newPayload(t, p)
			node := d.saved(t, d.run(t, sb.GetId(), p.start).GetNode().GetId())
			children := d.fork(t, node, 2)
			drawn := map[string]string{} // by what and whom
			for _, c := range children {
				d.stepTo(t, c, p, 1)
				for line := range strings.Lines(d.ok(t, c.GetId(), "cat /root/drawn")) {
					what, value, _ := strings.Cut(strings.TrimSpace(line), " ")
					if before, seen := drawn[what]; !seen {
						drawn[what] = value
					} else if same := before == value; same != (what == "plain") {
						t.Errorf("%s: one child has drawn %s, the other %s", what, before, value)
					}
				}
			}
			if len(drawn) != 3 {
				t.Errorf("drawn: %v", drawn)
			}
			free(t, d, children...)
		})
	}
}
