package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// Whatever is wrong with what the daemon is told, it says so in one line that names it, and starts nothing.
func TestServeRefusesWhatItIsTold(t *testing.T) {
	testenv.Require(t, testenv.Root)
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	clients := file("clients.json", `{"clients": [{"name": "a", "uids": [1000]}]}`)
	folder := filepath.Join(dir, "folder")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(folder, link); err != nil {
		t.Fatal(err)
	}
	none, text := filepath.Join(dir, "none"), file("text", "no certificate\n")
	const pair = "../../python-client/tests/tls/"
	cert, key := pair+"daemon.crt", pair+"daemon.key"
	tls := []string{"--tls-cert", cert, "--tls-key", key, "--clients", clients}
	for _, c := range []struct {
		args []string
		want string // in the line
	}{
		{[]string{"--clients", none}, none + ": open " + none + ": no such file or directory"},
		{[]string{"--clients", folder}, "it must be a file of root's that nobody else can write to"},
		{[]string{"--clients", text}, "invalid character"},
		{[]string{"--clients", file("odd.json", `{"clients": [{"name": "a\u001b[2J", "uids": [1]}]}`)}, `is no name for a client`},
		{[]string{"--clients", file("verb.json", `{"clients": [{"name": "a", "uids": [1], "verbs": ["fly"]}]}`)}, `there is no verb "fly"`},
		{[]string{"--clients", file("calls.json", `{"clients": [{"name": "a", "uids": [1], "allow_calls": ["fly"]}]}`)}, `"fly" is no group of system calls`},

		{[]string{"--listen", "127.0.0.1:0"}, "--listen needs --tls-cert, --tls-key and --clients"},
		{[]string{"--listen", "127.0.0.1:0", "--clients", clients}, "--listen needs --tls-cert, --tls-key and --clients"},
		{append([]string{"--listen", "127.0.0.1"}, tls...), "listening on 127.0.0.1: "},
		{append([]string{"--listen", "127.0.0.1:123456"}, tls...), "listening on 127.0.0.1:123456: "},
		{append([]string{"--listen", "192.0.2.1:0"}, tls...), "listening on 192.0.2.1:0: "},
		{[]string{"--tls-cert", cert}, "are for --listen, which isn't there"},
		{[]string{"--tls-client-ca", cert}, "are for --listen, which isn't there"},
		{[]string{"--listen", "127.0.0.1:0", "--clients", clients, "--tls-cert", none, "--tls-key", key}, "reading the daemon's certificate and key: open " + none},
		{[]string{"--listen", "127.0.0.1:0", "--clients", clients, "--tls-cert", cert, "--tls-key", none}, "reading the daemon's certificate and key: open " + none},
		{[]string{"--listen", "127.0.0.1:0", "--clients", clients, "--tls-cert", text, "--tls-key", key}, "reading the daemon's certificate and key: "},
		{[]string{"--listen", "127.0.0.1:0", "--clients", clients, "--tls-cert", key, "--tls-key", cert}, "reading the daemon's certificate and key: "},
		{append([]string{"--listen", "127.0.0.1:0", "--tls-client-ca", none}, tls...), "reading the authority of clients: open " + none},
		{append([]string{"--listen", "127.0.0.1:0", "--tls-client-ca", text}, tls...), text + " has no certificate in it"},

		{[]string{"--import-from", none}, none + " can't be imported from: "},
		{[]string{"--import-from", text}, text + " can't be imported from: "},
		{[]string{"--import-from", link}, link + " can't be imported from: "},
		{[]string{"--import-from", "folder"}, "folder can't be imported from: it must be an absolute path"},
		{[]string{"--import-from", ""}, "can't be imported from: it must be an absolute path"},
		{[]string{"--socket-group", "no-such-group"}, `there is no group "no-such-group"`},
		{[]string{"--socket-group", "-1"}, `there is no group "-1"`},
		{[]string{"--socket-group", "4294967295"}, `there is no group "4294967295"`},

		{[]string{"--keep-bytes", "much"}, `--keep-bytes: "much" is not a size such as 100G`},
		{[]string{"--keep-bytes", "-1G"}, `--keep-bytes: "-1G" is not a size such as 100G`},
		{[]string{"--keep-bytes", "NaN"}, `--keep-bytes: "NaN" is not a size such as 100G`},
		{[]string{"--keep-states", "-1"}, "can't be negative"},
		{[]string{"--keep-states", "few"}, `"few"`},
		{[]string{"--keep-depth", "-1"}, "can't be negative"},
		{[]string{"--keep-age", "-1h"}, "can't be negative"},
		{[]string{"--keep-age", "long"}, `"long"`},
		{[]string{"--max-sandboxes", "-1"}, "can't be negative"},
		{[]string{"--zygotes", "-1"}, "can't be negative"},
		{[]string{"--lease", "-1s"}, "can't be negative"},
		{[]string{"--memory", "all"}, `--memory: "all" is not a size such as 100G`},
		{[]string{"--cpus", "all"}, `--cpus: "all" is no list of cores`},
		{[]string{"--audit", "2"}, "--audit takes a share from 0 to 1"},
		{[]string{"--verify", "-0.1"}, "--verify takes a share from 0 to 1"},
		{[]string{"--log-format", "xml"}, `there is no log format "xml"`},
	} {
		state := filepath.Join(dir, "state")
		out, errOut, status := newCLI(t).run(append([]string{"serve", "--state", state, "--socket", filepath.Join(dir, "sock")}, c.args...)...)
		line, rest, _ := strings.Cut(errOut, "\n")
		if status != failureStatus || out != "" || !strings.HasPrefix(line, "boxwood: ") || !strings.Contains(line, c.want) {
			t.Errorf("%q: status %d, %q, %q, and not %q", c.args, status, out, errOut, c.want)
		}
		if rest != "" && (!strings.HasPrefix(rest, "  hint: ") || strings.Count(rest, "\n") != 1) || strings.ContainsRune(errOut, 0x1b) {
			t.Errorf("%q: more than a line and a hint, or not as text: %q", c.args, errOut)
		}
		for _, made := range []string{state, filepath.Join(dir, "sock")} {
			if _, err := os.Lstat(made); !os.IsNotExist(err) {
				t.Fatalf("%q: %s was made", c.args, made)
			}
		}
	}
}
