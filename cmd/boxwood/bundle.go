package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/internal/fault"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) bundleCommand() *cobra.Command {
	var b bundle
	c := &cobra.Command{
		Use:   "bundle NODE",
		Short: "Gather what is known of a node into one archive, for a bug report",
		Long: `Writes a .tar.gz with what explain says of the node, the turns that lead to it (what ran, what it printed, effects), the rows of
the tables about these, the versions and capabilities of daemon and host, the lines of the daemon's log about
them (--log), and the cases that audits kept of them (from --state, if it can be read).

Values of secrets are in none of these. Files and memory of the sandboxes aren't in it unless
--with-state asks for them: then the archive of "tree export" is, without processes that were given secrets.
What the turns printed is in it: look through it before you hand it on.`,
		Example: `  boxwood bundle nd_01j... --log /var/log/boxwood.log
  journalctl -u boxwood -o cat | boxwood bundle nd_01j... --log - -o report.tar.gz`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if b.to == "" {
				b.to = args[0] + ".tar.gz"
			}
			return a.bundle(c.Context(), args[0], b)
		},
	}
	c.Flags().StringVarP(&b.to, "output", "o", "", `file to write (default: the id and ".tar.gz")`)
	c.Flags().StringVar(&b.log, "log", "", `file that the daemon's log goes to, "-": standard input`)
	c.Flags().StringVar(&b.state, "state", "/var/lib/boxwood", "the daemon's state folder, for cases of audits")
	c.Flags().BoolVar(&b.withState, "with-state", false, "put in the node, and what lies below it, as tree export writes it: files and memory")
	return c
}

type bundle struct {
	to, log, state string
	withState      bool
}

// Bounds of what is gathered; what was left out is said.
const (
	maxLogLines  = 20000
	maxCaseBytes = 16 << 20
)

func (a *app) bundle(ctx context.Context, id string, b bundle) error {
	s, err := a.story(ctx, id)
	if err != nil {
		return err
	}
	client, err := a.client()
	if err != nil {
		return err
	}
	path, err := pathTo(ctx, client, id)
	if err != nil {
		return err
	}
	info, err := client.GetInfo(ctx, &pb.GetInfoRequest{})
	if err != nil {
		return err
	}
	err = writeFile(b.to, func(f *os.File) error {
		z := gzip.NewWriter(f)
		w := &bundleWriter{tar: tar.NewWriter(z), at: time.Now()}
		if err := a.fillBundle(ctx, client, w, b, s, path, info); err != nil {
			return err
		}
		return errors.Join(w.tar.Close(), z.Close())
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(a.out, b.to)
	return nil
}

func (a *app) fillBundle(ctx context.Context, client pb.BoxwoodClient, w *bundleWriter, b bundle, s *story, path []*pb.Node, info *pb.GetInfoResponse) error {
	var told bytes.Buffer
	if err := s.tell(&told); err != nil {
		return err
	}
	w.add("explain.txt", told.Bytes())
	w.addJSON("explain.json", s)
	var nodes []json.RawMessage
	about := map[string]bool{} // ids whose lines, rows and cases are wanted
	var ids []string
	for _, n := range path {
		data, err := toJSON(n)
		if err != nil {
			return err
		}
		nodes = append(nodes, data)
		ids = append(ids, n.Id)
		for _, one := range []string{n.Id, n.SandboxId, n.CheckpointId} {
			about[one] = one != ""
		}
	}
	w.addJSON("path.json", nodes)
	facts, err := toJSON(info)
	if err != nil {
		return err
	}
	w.add("daemon.json", facts)
	w.addJSON("client.json", map[string]string{"version": fullVersion(), "go": runtime.Version()})
	rows, err := a.rowsOf(ctx, s.node.TreeId, ids...)
	if err != nil {
		return err
	}
	w.addJSON("rows.json", rows)
	if b.log != "" {
		lines, err := a.linesAbout(b.log, about)
		if err != nil {
			return err
		}
		w.add("log.txt", []byte(strings.Join(lines, "\n")+"\n"))
	}
	if err := w.addCases(filepath.Join(b.state, "audit"), about); err != nil {
		return err
	}
	if b.withState {
		if err := w.addState(ctx, client, s.node.Id); err != nil {
			return err
		}
	}
	return w.err
}

// bundleWriter keeps its first error.
type bundleWriter struct {
	tar *tar.Writer
	at  time.Time
	err error
}

func (w *bundleWriter) add(name string, data []byte) {
	w.stream(name, int64(len(data)), bytes.NewReader(data))
}

func (w *bundleWriter) addJSON(name string, v any) {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil && w.err == nil {
		w.err = err
	}
	w.add(name, data)
}

func (w *bundleWriter) stream(name string, size int64, r io.Reader) {
	if w.err == nil {
		w.err = w.tar.WriteHeader(&tar.Header{Name: name, Size: size, Mode: 0o600, ModTime: w.at})
	}
	if w.err == nil {
		_, w.err = io.Copy(w.tar, r)
	}
	if w.err != nil {
		w.err = fault.New(fault.Invalid, "bad_file", "writing the bundle: %w", w.err)
	}
}

// linesAbout are the last lines of a log that name one of these, and those of the requests that such lines name.
func (a *app) linesAbout(file string, about map[string]bool) ([]string, error) {
	bad := func(err error) ([]string, error) {
		return nil, fault.New(fault.Invalid, "bad_log", "reading the log: %w", err)
	}
	in := a.in
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return bad(err)
		}
		defer f.Close()
		in = f
	}
	names := func(line string, ids map[string]bool) bool {
		for _, word := range strings.FieldsFunc(line, func(r rune) bool { return strings.ContainsRune("\"=,:;[]{}() \t", r) }) {
			if ids[word] {
				return true
			}
		}
		return false
	}
	requests := map[string]bool{}
	var kept []string
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line = strings.TrimRight(line, "\r\n"); line != "" && (names(line, about) || names(line, requests)) {
			if id := requestOf(line); id != "" {
				requests[id] = true
			}
			if kept = append(kept, line); len(kept) > 2*maxLogLines {
				kept = slices.Clone(kept[len(kept)-maxLogLines:])
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return bad(err)
		}
	}
	if n := len(kept); n > maxLogLines {
		kept = append([]string{fmt.Sprintf("(%d earlier lines were left out)", n-maxLogLines)}, kept[n-maxLogLines:]...)
	}
	return kept, nil
}

// requestOf finds the id of a request in a line of the log, of either format.
func requestOf(line string) string {
	for _, mark := range []string{`"request":"`, "request="} {
		if _, rest, ok := strings.Cut(line, mark); ok {
			id, _, _ := strings.Cut(rest, `"`)
			id, _, _ = strings.Cut(id, " ")
			return id
		}
	}
	return ""
}

// addCases puts in what audits kept, if it can be read: the state folder is root's, and may be on another host.
func (w *bundleWriter) addCases(dir string, about map[string]bool) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		w.add("audit/not-read.txt", []byte(err.Error()+"\n"))
		return nil
	}
	room := maxCaseBytes
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return fault.New(fault.Invalid, "bad_case", "reading a case: %w", err)
		}
		wanted := about[strings.TrimSuffix(e.Name(), ".json")]
		for id := range about {
			wanted = wanted || about[id] && bytes.Contains(data, []byte(id))
		}
		if !wanted {
			continue
		}
		if room -= len(data); room < 0 {
			w.add("audit/left-out.txt", []byte("there are more cases than fit\n"))
			return nil
		}
		w.add("audit/"+e.Name(), data)
	}
	return nil
}

func (w *bundleWriter) addState(ctx context.Context, client pb.BoxwoodClient, node string) error {
	f, err := os.CreateTemp("", "boxwood-bundle-")
	if err != nil {
		return fault.New(fault.Invalid, "bad_file", "writing the state: %w", err)
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil {
		return err
	}
	stream, err := client.ExportTree(ctx, &pb.ExportTreeRequest{NodeId: node})
	if err != nil {
		return err
	}
	if err := writeArchive(f, "the state", stream); err != nil {
		return err
	}
	size, err := f.Seek(0, io.SeekCurrent)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return err
	}
	w.stream("state.tree", size, f)
	return nil
}
