package inspector

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/tree"
)

// What the rows of TestRealTools begin with.
const (
	project = `printf 'int f(void) { return 1; }' >f.c; printf 'int f(void); int main(void) { return f() - 1; }' >main.c
		printf 'all: prog\nprog: main.o f.o\n\tgcc -o $@ $^\n%%.o: %%.c\n\tgcc -c $<\ntest: prog\n\t./prog\n' >Makefile
		make -s`
	tests = `printf 'import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(1, 1)\n' >test_it.py
		python3 -m unittest -q; python3 -m unittest -q`
	deb = `mkdir -p p/DEBIAN p/opt; echo x >p/opt/demo-file
		printf 'Package: boxwood-demo\nVersion: 1\nArchitecture: all\nMaintainer: a\nDescription: a\n' >p/DEBIAN/control
		dpkg-deb -b p demo.deb`
	// A package for pip, without building tools.
	wheel = `python3 -c '
import zipfile
with zipfile.ZipFile("demo-1.0-py3-none-any.whl", "w") as z:
    z.writestr("demo.py", "answer = 42\n")
    z.writestr("demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    z.writestr("demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    z.writestr("demo-1.0.dist-info/RECORD", "demo.py,,\ndemo-1.0.dist-info/METADATA,,\ndemo-1.0.dist-info/WHEEL,,\ndemo-1.0.dist-info/RECORD,,\n")'`
	// Telemetry is a process that stays for a while.
	module   = `mkdir -p .config/go/telemetry; echo off >.config/go/telemetry/mode; mkdir g; printf 'module g\n' >g/go.mod; printf 'package main\n\nfunc main() { println(1) }\n' >g/g.go`
	pyTest   = `printf 'def test():\n    assert 1 == 1\n' >test_it.py`
	npm      = `mkdir n; printf '{"name": "demo", "version": "1.0.0"}' >n/package.json`
	commit   = `git init -q r; cd r; git config user.name a; git config user.email b; echo x >f; git add f; git commit -qm m`
	database = `sqlite3 db 'create table t(a, b); insert into t values (1, 2)'`
	source   = `mkdir src; echo x >src/f; `
	hunk     = `echo x >f; printf -- '--- f\n+++ f\n@@ -1 +1 @@\n-x\n+y\n' >p`
	// PostgreSQL refuses to run as root.
	postgres = `PATH=$PATH:$(echo /usr/lib/postgresql/*/bin); pg() { setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }
		cd /pg; `
	cluster = `mkdir /pg; chown 65534:65534 /pg; ` + postgres + `pg initdb -N -U pg -D data >/dev/null`
	serve   = postgres + `pg pg_ctl -s -w -D data -o "-k /pg -c listen_addresses= -c fsync=off" -l log start; psql -h /pg -U pg -d postgres -c `
)

// Builds, test runs, package managers, editors and databases, without a network.
// What a row's set-up leaves is captured before its command runs.
func TestRealTools(t *testing.T) {
	k := mustKernel(t, Options{})
	goTool, pytest := goTool(), testenv.Python("pytest")
	for _, c := range []struct {
		name, needs   string
		setup, script string
		want          tree.Verdict
	}{
		{"make, nothing to do", "make gcc", project, "make -s; make -n; make -s test", tree.None},
		{"make, one file touched", "make gcc", project, "touch f.c; make -s", tree.Files},
		{"make from nothing", "make gcc", project, "rm -f *.o prog; make -s -j4", tree.Files},
		{"go build", "go", module, "cd g; " + goTool + " build -o g . && ./g", tree.Files},
		{"go version", "go", module, goTool + " version", tree.None},
		{"unittest", "python3", tests, "python3 -m unittest -q", tree.None},
		{"unittest, first run", "python3", "printf 'x = 1\\n' >m.py; printf 'import unittest, m\\n' >test_it.py", "python3 -m unittest -q || true", tree.Files},
		{"pytest", "pytest", pyTest, "PYTHONDONTWRITEBYTECODE=1 " + pytest.Path + " -m pytest -q -p no:cacheprovider test_it.py", tree.None},
		{"pytest with its cache", "pytest", pyTest, pytest.Path + " -m pytest -q test_it.py", tree.Files},
		{"dpkg -l", "dpkg-deb", deb, "dpkg -l >/dev/null; dpkg -I demo.deb; dpkg-deb -c demo.deb; dpkg -s dpkg >/dev/null", tree.None},
		{"dpkg -i", "dpkg-deb", deb, "dpkg -i demo.deb && test -f /opt/demo-file", tree.Files},
		{"dpkg -r", "dpkg-deb", deb + "; dpkg -i demo.deb", "dpkg -r boxwood-demo && test ! -e /opt/demo-file", tree.Files},
		{"apt-get install", "apt-get", deb, "apt-get -qq -y -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=/dev/null -o APT::Sandbox::User=root install ./demo.deb && test -f /opt/demo-file", tree.Files},
		{"pip install", "python3", wheel, "python3 -m pip install -q --no-index --no-deps --target site demo-1.0-py3-none-any.whl && PYTHONPATH=site python3 -c 'import demo'", tree.Files},
		{"pip list", "python3", "true", "PYTHONDONTWRITEBYTECODE=1 python3 -m pip -q --disable-pip-version-check --no-cache-dir list >/dev/null", tree.None},
		{"venv", "python3", "true", "python3 -m venv --without-pip v && v/bin/python -c 1", tree.Files},
		{"npm pack and install", "npm", npm, "cd n && npm pack --offline --silent && cd .. && npm install --offline --silent --no-audit ./n/demo-1.0.0.tgz && test -d node_modules/demo", tree.Files},
		{"node", "node", "true", "node -e 'console.log(require(\"os\").cpus().length)'", tree.None},
		{"git clone", "git", commit, "git clone -q r s", tree.Files},
		{"git checkout, there and back", "git", commit + "; git branch x", "cd r; git checkout -q x; git checkout -q -", tree.Files}, // its reflog
		{"git grep, blame, fsck", "git", commit, "cd r; git grep x; git blame f; git rev-parse HEAD; git fsck --no-progress", tree.None},
		{"vi, a change", "vi", "true", "vi -es -u NONE -c 'normal ihello' -c wq old", tree.Files},
		{"vi, a look", "vi", "true", "vi -es -u NONE -i NONE -c 'normal G' -c q! old", tree.None}, // its swap file is gone again
		{"sqlite3, an insert", "sqlite3", database, "sqlite3 db 'insert into t values (3, 4)'", tree.Files},
		{"sqlite3, a query", "sqlite3", database, "sqlite3 db 'select count(*) from t; explain select * from t'", tree.None},
		{"sqlite3, rolled back", "sqlite3", database, "sqlite3 db 'begin; insert into t values (5, 6); rollback'", tree.None},
		// It locks its folder by a System V segment, and those aren't netted.
		{"initdb", "postgresql", "true", cluster, tree.Both},
		{"postgres, up and down", "postgresql", cluster, serve + "'create table t(a int)'; pg pg_ctl -s -w -D data stop", tree.Both},
		{"postgres, left running", "postgresql", cluster, serve + "'select 1'", tree.Both},
		{"rsync", "rsync", source, "rsync -a src/ dst", tree.Files},
		{"rsync, nothing to do", "rsync", source + "rsync -a src/ dst", "rsync -a --delete src/ dst; rsync -nrc src/ dst", tree.None},
		{"tar", "tar", source, "tar czf src.tgz src", tree.Files},
		{"tar into a pipe", "tar", source, "tar cf - src | tar tf -", tree.None},
		{"patch", "patch", hunk, "patch -s f p", tree.Files},
		{"patch --dry-run", "patch", hunk, "patch -s --dry-run f p", tree.None},
	} {
		t.Run(c.name, func(t *testing.T) {
			for n := range strings.FieldsSeq(c.needs) {
				switch n {
				case "pytest":
					testenv.Require(t, pytest.Need)
				case "postgresql":
					testenv.Require(t, postgresql)
				default:
					testenv.Require(t, testenv.Program(n))
				}
			}
			b := mustBox(t, nil)
			w := mustWatch(t, k, b)
			b.turn("/bin/bash", "-e", "-c", c.setup)
			w.NewEpoch(b.snapshot())
			w.BeginTurn()
			b.turn("/bin/bash", "-e", "-c", c.script)
			r := barrier(w)
			if !shows(r.Verdict, c.want) {
				t.Errorf("missed: verdict %d, want %d: %q %q", r.Verdict, c.want, r.Reasons, effectsOf(r))
			} else if r.Verdict != c.want {
				t.Errorf("too much: verdict %d, want %d: %q %q", r.Verdict, c.want, r.Reasons, effectsOf(r))
			}
		})
	}
}

// postgresql is met by Debian's, whose programs aren't in PATH.
func postgresql() string {
	if found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb"); len(found) == 0 {
		return "needs PostgreSQL (Debian: postgresql)"
	}
	return ""
}

// goTool is the go that runs these tests, with what it has compiled already.
func goTool() string {
	path, err := exec.LookPath("go")
	if err != nil {
		return "go"
	}
	cache, err := exec.Command(path, "env", "GOCACHE").Output()
	if err != nil {
		return "go"
	}
	return "CGO_ENABLED=0 GOFLAGS= GOTOOLCHAIN=local GOCACHE=" + strings.TrimSpace(string(cache)) + " " + path
}
