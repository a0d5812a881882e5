package inspector

import (
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/tree"
)

// Commands that agents run, as they run them. Each says what it needs; make setup-dev
// installs it.
func TestRealCommands(t *testing.T) {
	k := mustKernel(t, Options{})
	prepare := `set -e
		printf 'int main(void) { return 0; }' >m.c
		printf 'def f():\n  return 1\n' >p.py
		export GIT_CONFIG_COUNT=0
		if command -v git >/dev/null; then
			git init -q repo; cd repo; git config user.email a@b; git config user.name a
			echo 1 >f; touch -d '2020-01-01' f; git add f; git commit -qm m; touch -d '2020-01-02' .git/index; git status >/dev/null; cd ..
		fi
		mkdir src; for i in 1 2 3 4 5; do echo $i >src/$i; done; tar cf src.tar src`
	for _, c := range []struct {
		needs, script string
		want          tree.Verdict
	}{
		{"sh", "ls -la; cat old | grep a | wc; find . -name 'x*'; head -1 m.c; diff old other; true", tree.None},
		{"sh", "t=$(mktemp); sort <old >$t; rm $t; d=$(mktemp -d); cp -r src $d; rm -rf $d", tree.None},
		{"sh", "cat <<E\nheredoc\nE\necho x | tee /dev/null | cat", tree.None},
		{"sh", "cd d; export A=1; umask 077; ulimit -c 0; kill -0 $$; sleep 0 & wait", tree.None},
		{"sh", "which true; uname -a; id; env; date; df . ; ps >/dev/null; true", tree.None},
		{"git", "cd repo; git status; git log; git diff; git show --stat | cat", tree.None},
		{"python3", "PYTHONDONTWRITEBYTECODE=1 python3 -c 'import p, threading, subprocess; t = threading.Thread(target=lambda: subprocess.run([\"true\"])); t.start(); t.join(); print(p.f())'", tree.None},
		{"python3", "python3 -c 'import tempfile; f = tempfile.NamedTemporaryFile(); f.write(b\"x\"); f.flush(); d = tempfile.TemporaryDirectory(); open(d.name + \"/x\", \"w\").write(\"y\"); d.cleanup()'", tree.None},
		{"gcc", "gcc -fsyntax-only m.c", tree.None},
		{"gcc", "d=$(mktemp -d) && gcc -o $d/a m.c && $d/a; rm -r $d", tree.None},
		{"tar", "tar tf src.tar; tar xf src.tar -O >/dev/null", tree.None},
		{"getent", "getent hosts localhost; getent passwd root", tree.None},

		{"gcc", "gcc -o a m.c", tree.Files},
		{"git", "cd repo; echo 2 >>f; git commit -qam n", tree.Files},
		{"git", "cd repo; git branch b", tree.Files},
		{"python3", "python3 -c 'import p'", tree.Files}, // __pycache__
		{"python3", "python3 -c 'f = open(\"old\", \"r+b\"); f.seek(5); f.write(b\"z\")'", tree.Files},
		{"python3", "python3 -c 'import mmap; f = open(\"old\", \"r+b\"); m = mmap.mmap(f.fileno(), 0); m[3] = 65'", tree.Files},
		{"python3", "python3 -c 'import shutil; shutil.copyfile(\"other\", \"old\")'", tree.Files},
		{"sed", "sed -i s/a/b/ old", tree.Files},
		{"dd", "dd if=other of=old bs=100 count=1 conv=notrunc", tree.Files},
		{"sh", "exec 3>>old; (echo x >&3)", tree.Files},
		{"sh", "exec 1>>old; echo x", tree.Files},
		{"sh", "touch -c old", tree.Files},
		{"sh", "cp --reflink=always other old", tree.Files},
		{"sh", "fallocate -p -o 0 -l 4096 big", tree.Files},
		{"sh", "mkdir -p /dev/shm /run/x; echo 1 >/run/x/y", tree.Files},
		{"sh", "mv d e; mv e/d d2", tree.Files},
		{"sh", "rm -rf src && mkdir src", tree.Files},
		{"tar", "rm -rf src && tar xf src.tar", tree.Files},
		{"setsid", "setsid sleep 100 >/dev/null 2>&1 </dev/null &", tree.Process},
		{"setsid", "echo x >>old; (sleep 100 >/dev/null 2>&1 </dev/null &)", tree.Both},
		{"ip", "ip link set lo up", tree.Process},
		{"ip", "ip addr; ip route", tree.None},
		{"hostname", "hostname y", tree.Process},
		{"ipcmk", "ipcmk -M 4096", tree.Process},
		{"ipcs", "ipcs", tree.None},
	} {
		t.Run(c.script, func(t *testing.T) {
			testenv.Require(t, testenv.Program(c.needs))
			b := mustBox(t, nil)
			w := mustWatch(t, k, b)
			w.BeginTurn()
			b.turn("/bin/sh", "-c", prepare)
			expect(t, "preparing", barrier(w), tree.Files, tree.Files)
			w.NewEpoch(b.snapshot())
			w.BeginTurn()
			out, err := b.try("/bin/sh", "-c", c.script)
			if err != nil {
				t.Errorf("it failed, which shows nothing: %v: %s", err, out)
			}
			r := barrier(w)
			if !shows(r.Verdict, c.want) {
				t.Errorf("missed: verdict %d, want %d: %q %q", r.Verdict, c.want, r.Reasons, effectsOf(r))
			} else if r.Verdict != c.want {
				t.Errorf("too much: verdict %d, want %d: %q %q", r.Verdict, c.want, r.Reasons, effectsOf(r))
			}
		})
	}
}
