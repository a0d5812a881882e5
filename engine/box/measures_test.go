package box

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/tree"
)

var (
	measuresOut    = flag.String("measures.out", "", "file that BenchmarkMeasures writes its JSON lines to")
	measuresRounds = flag.Int("measures.rounds", 60, "rounds of BenchmarkMeasures")
)

// A measure of the box, and how pid 1 is built, or the host opened, without it.
var measures = []struct {
	name, flags string
	unlimited   bool
}{
	{"filter", "-DWITHOUT_FILTER -Wno-unused-variable", false},
	{"capabilities", "-DWITHOUT_CAPABILITIES", false},
	{"limits", "-DWITHOUT_LIMITS -Wno-unused-variable", false},
	{"masks", "-DWITHOUT_MASKS", false},
	{"nesting", "-DWITHOUT_NESTING", false},
	{"no_new_privs", "-DWITHOUT_NO_NEW_PRIVS", false},
	{"cgroup_limits", "", true},
	{"all", "-DWITHOUT_FILTER -DWITHOUT_CAPABILITIES -DWITHOUT_LIMITS -DWITHOUT_MASKS -DWITHOUT_NESTING -DWITHOUT_NO_NEW_PRIVS -Wno-unused-variable", true},
}

// BenchmarkMeasures tells what each measure adds to a fork, from a zygote to the end of the first /bin/true, and to a
// box made from nothing. In each round a box with all measures and one without each are made, in an order that is drawn; a
// measure's figure is the median of the differences within rounds.
func BenchmarkMeasures(b *testing.B) {
	if *measuresOut == "" {
		b.Skip("it writes a file: -measures.out names it")
	}
	shipped := boxinit
	defer func() { boxinit = shipped }()
	open := func(program []byte, unlimited bool, zygotes int) *Host {
		boxinit = program
		return openHost(b, func(c *Config) {
			if c.Zygotes = zygotes; unlimited {
				c.Limits = tree.Limits{}
			} else {
				c.Limits = tree.Limits{MemoryBytes: 1 << 30, Pids: 512, CPUMillis: 2000}
			}
		})
	}
	type variant struct {
		fork, create *Host
	}
	all := []variant{{open(shipped, false, 1), open(shipped, false, 0)}}
	for _, m := range measures {
		program := shipped
		if m.flags != "" {
			path := filepath.Join(b.TempDir(), m.name)
			c := exec.Command("init/build.sh", path)
			c.Env = append(os.Environ(), "CFLAGS="+m.flags)
			if out, err := c.CombinedOutput(); err != nil {
				b.Fatalf("building pid 1 without %s: %v\n%s", m.name, err, out)
			}
			var err error
			if program, err = os.ReadFile(path); err != nil {
				b.Fatal(err)
			}
		}
		all = append(all, variant{open(program, m.unlimited, 1), open(program, m.unlimited, 0)})
	}
	once := func(h *Host) time.Duration {
		ctx := context.Background()
		root := newRoot(b)
		for _, v := range all { // nobody makes a zygote meanwhile
			if err := v.fork.WaitReady(ctx, 1); err != nil {
				b.Fatal(err)
			}
		}
		start := time.Now()
		box, err := h.Start(ctx, root, testIdentity)
		if err != nil {
			b.Fatal(err)
		}
		if e, err := box.Exec(ctx, Command{Argv: []string{"/bin/true"}}); err != nil || e.Code != 0 {
			b.Fatal(e, err)
		}
		took := time.Since(start)
		mustKill(b, box)
		return took
	}
	added := [2][]([]time.Duration){make([][]time.Duration, len(all)), make([][]time.Duration, len(all))}
	var whole [2][]time.Duration
	for b.Loop() {
		for round := range *measuresRounds {
			for kind := range 2 {
				took := make([]time.Duration, len(all))
				for _, i := range rand.Perm(len(all)) {
					took[i] = once([2]*Host{all[i].fork, all[i].create}[kind])
				}
				if round < 3 { // until caches are warm
					continue
				}
				whole[kind] = append(whole[kind], took[0])
				for i := range all {
					added[kind][i] = append(added[kind][i], took[0]-took[i])
				}
			}
		}
	}
	var u unix.Utsname
	_ = unix.Uname(&u)
	how := fmt.Sprintf("from a request to the end of the first /bin/true, no pool and no daemon; rounds in which each is left out once; %d cores, Linux %s", runtime.NumCPU(), unix.ByteSliceToString(u.Release[:]))
	out, err := os.Create(*measuresOut)
	if err != nil {
		b.Fatal(err)
	}
	defer out.Close()
	line := func(metric string, d []time.Duration) {
		text, err := json.Marshal(map[string]any{"bench": "isolation", "metric": metric, "value": float64(median(d).Microseconds()) / 1000, "unit": "ms", "n": len(d), "conditions": how})
		if err == nil {
			_, err = fmt.Fprintf(out, "%s\n", text)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	line("fork_to_true_ms.p50", whole[0])
	line("create_to_true_ms.p50", whole[1])
	for i, m := range measures {
		line(m.name+".added_ms.p50", added[0][i+1])
		line(m.name+".create_added_ms.p50", added[1][i+1])
	}
}
