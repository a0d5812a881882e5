package inspector

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/tree"
)

var (
	corpusN    = flag.Int("corpus.n", 200, "random turns")
	corpusSeed = flag.Uint64("corpus.seed", 0, "seed; 0 takes one from the clock")
)

// digest is the oracle: what a walker sees of the sandbox's own root, the image's
// unchanged part left out. It shares no code with the inspector. Directory times
// and access times are no state.
func digest(t *testing.T, b *box) string {
	t.Helper()
	h := sha256.New()
	var top unix.Stat_t
	b.must(unix.Stat(b.root, &top))
	fmt.Fprintln(h, top.Mode, top.Uid, top.Gid)
	for _, top := range []string{"w", "lw"} {
		root := filepath.Join(b.root, top)
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil {
				return err
			}
			fmt.Fprintf(h, "%q %o %d %d %d", strings.TrimPrefix(path, b.root), st.Mode, st.Uid, st.Gid, st.Rdev)
			if !d.IsDir() {
				fmt.Fprintf(h, " %d %d %d", st.Nlink, st.Size, st.Mtim.Nano())
			}
			if d.Type()&fs.ModeSymlink != 0 {
				to, _ := os.Readlink(path)
				fmt.Fprintf(h, " -> %q", to)
			}
			if d.Type().IsRegular() {
				data, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				fmt.Fprintf(h, " %x", sha256.Sum256(data))
			}
			if d.Type().IsRegular() || d.IsDir() {
				f, err := os.Open(path)
				if err != nil {
					return err
				}
				chattr, _ := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
				fmt.Fprintf(h, " %x", chattr&0xff)
				f.Close()
			}
			names := make([]byte, 4096)
			n, _ := unix.Llistxattr(path, names)
			list := strings.Split(string(names[:max(n, 0)]), "\x00")
			slices.Sort(list)
			for _, name := range list {
				if strings.HasPrefix(name, "user.") {
					v := make([]byte, 4096)
					n, _ := unix.Lgetxattr(path, name, v)
					fmt.Fprintf(h, " %s=%q", name, v[:max(n, 0)])
				}
			}
			fmt.Fprintln(h)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// randomTurn is a few shell lines over few names, so that they meet, some of them
// ways of testdata/ways.c. About half of the turns end as they began.
func randomTurn(r *rand.Rand) (script string) {
	name := func() string {
		return []string{"old", "other", "x", "d/f", "d", "e", "t1", "t2", "e/t3", "/lw/tmp/t4", "/lw/file", "/lw/t5"}[r.IntN(12)]
	}
	temp := func() string { return []string{"t1", "t2", "e/t3", "/lw/tmp/t4", "/lw/t5"}[r.IntN(5)] }
	ways := func() string { return []string{"/ways ", "/ways -t "}[r.IntN(2)] }
	quietly := []func() string{
		func() string { f := temp() + ".q"; return fmt.Sprintf("echo x >%s; rm -f %s", f, f) },
		func() string { f := temp() + ".q"; return fmt.Sprintf("mkdir %s && touch %s/a && rm -r %s", f, f, f) },
		func() string { return "cat old other >/dev/null; ls -lR . >/dev/null & wait" },
		func() string { return "(echo a | sort | uniq) >/dev/null" },
		func() string {
			f := temp() + ".q"
			return fmt.Sprintf("echo x >%s; chmod 600 %s; mv %s %s2; rm %s2", f, f, f, f, f)
		},
		func() string { return fmt.Sprintf("stat %s >/dev/null; test -w %s", name(), name()) },
		func() string { return ways() + quiet[r.IntN(len(quiet))] },
		func() string { return "cat </etc/none/x; rmdir d; mkdir old; true" },
	}
	loudly := []func() string{
		func() string { return fmt.Sprintf("echo %d >>%s", r.IntN(9), name()) },
		func() string { return fmt.Sprintf("echo %d >%s", r.IntN(9), name()) },
		func() string { return fmt.Sprintf("rm -rf %s", name()) },
		func() string { return fmt.Sprintf("mv -f %s %s", name(), name()) },
		func() string { return fmt.Sprintf("mv -f %s %s.m; mv -f %s.m %s", "old", "old", "old", "old") },
		func() string { return fmt.Sprintf("ln -f %s %s", name(), temp()) },
		func() string { return fmt.Sprintf("ln -sfn %s %s", name(), temp()) },
		func() string { return fmt.Sprintf("chmod %o %s", 0o600+r.IntN(0o100), name()) },
		func() string { return fmt.Sprintf("chown %d %s", r.IntN(3), name()) },
		func() string { return fmt.Sprintf("touch -c %s", name()) },
		func() string { return fmt.Sprintf("mkdir -p %s", name()) },
		func() string { return fmt.Sprintf("truncate -s %d %s", r.IntN(20000), name()) },
		func() string { return fmt.Sprintf("dd if=/dev/zero of=%s bs=100 count=1 conv=notrunc", name()) },
		func() string { return fmt.Sprintf("cp -a %s %s", name(), temp()) },
		func() string { return fmt.Sprintf("sed -i s/a/b/ %s", name()) },
		func() string { return ways() + fileWays()[r.IntN(len(fileWays()))] },
	}
	pool := quietly
	if r.IntN(2) == 0 {
		pool = append(loudly, quietly...)
	}
	var lines []string
	for range 1 + r.IntN(4) {
		lines = append(lines, pool[r.IntN(len(pool))]())
	}
	return strings.Join(lines, "\n")
}

// Random turns against an independent oracle. A change that is judged none fails;
// the reverse is counted.
func TestRandomTurns(t *testing.T) {
	seed := *corpusSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d (repeat with -corpus.seed)", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	k := mustKernel(t, Options{})
	var b *box
	var w Watch
	unchanged, falsePositives, missed := 0, 0, 0
	before, base := "", ""
	for i := range *corpusN {
		if i%20 == 0 { // random deletions wear a sandbox out
			b = mustBox(t, nil)
			w = mustWatch(t, k, b)
			base = digest(t, b)
			before = base
		}
		script := randomTurn(r)
		w.BeginTurn()
		out, _ := b.try("/bin/sh", "-c", "exec 2>/dev/null; "+script)
		_ = out // lines may fail: that is part of the corpus
		rep := barrier(w)
		mustSeeAll(t, w)
		after := digest(t, b)
		changed := after != base
		files := rep.Verdict == tree.Files || rep.Verdict == tree.Both
		switch {
		case changed && !files:
			missed++
			t.Errorf("turn %d of seed %d: a change judged %d: %q\n%s", i, seed, rep.Verdict, rep.Reasons, script)
		case after != before && rep.Turn == tree.None:
			t.Logf("turn %d: the turn's own change isn't reported (the verdict is): %s", i, script)
		case !changed && files:
			falsePositives++
			t.Logf("turn %d: a false positive: %q %q\n%s", i, rep.Reasons, effectsOf(rep), script)
		}
		if !changed {
			unchanged++
		}
		before = after
		if files {
			w.NewEpoch(b.snapshot())
			mustHold(t, w)
			base = after
		}
	}
	t.Logf("%d turns, %d unchanged, %d missed, %d false positives", *corpusN, unchanged, missed, falsePositives)
	if unchanged == 0 || unchanged == *corpusN {
		t.Errorf("%d of %d turns are unchanged: the corpus shows nothing", unchanged, *corpusN)
	}
}
