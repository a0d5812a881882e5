package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/boxwood-rl/boxwood/engine/shell"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/linediff"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) diffCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "diff [BEFORE] NODE",
		Short: "Show what differs between two nodes, or between a node and its parent",
		Long: `Compares two nodes, of one tree or of two: files with what is in them, processes, and
what each shell session holds (variables, functions, aliases, options, folder, traps).
Without BEFORE, it is the node's parent: what the turn changed. Both nodes stay as they are:
processes and shells are looked at in scratch forks, which end with the command.

Of text files up to 1 MiB the lines that differ are shown, of others size and digest. A process
is told by its pid, command line, folder and user; its memory isn't compared.

The exit status is 0 if nothing differs, 1 if something does, 125 if that couldn't be found out.`,
		Example: `  boxwood diff nd_01j...
  boxwood diff nd_01j... nd_01k...
  boxwood diff nd_01j... nd_01k... --json | jq -r '.files[].path'`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			if len(args) == 1 {
				n, err := client.GetNode(c.Context(), &pb.GetNodeRequest{NodeId: args[0]})
				if err != nil {
					return err
				}
				if n.ParentId == "" {
					return usage(c, fmt.Errorf("%s is a root, which has no parent to compare it with: name two nodes", n.Id))
				}
				args = []string{n.ParentId, n.Id}
			}
			d, err := compareNodes(c.Context(), client, args[0], args[1])
			if err != nil {
				return err
			}
			if a.json {
				err = a.printJSON(d)
			} else {
				err = d.show(a.out)
			}
			if err == nil && !d.equal() {
				err = exitStatus(1)
			}
			return err
		},
	}
	c.Flags().BoolVar(&a.json, "json", false, "print JSON")
	return c
}

// The bounds of what is shown of files. Whatever is beyond them is still told to differ.
const (
	maxTextFile  = 1 << 20
	maxTextFiles = 64 << 20 // read in all
	maxFileLines = 200
)

// difference is how two nodes differ. Text in it came out of a sandbox.
type difference struct {
	Before    string            `json:"before"`
	After     string            `json:"after"`
	Files     []fileDifference  `json:"files"`
	Processes []lineDifference  `json:"processes"` // those that only one has
	Sessions  []shellDifference `json:"sessions"`
}

type fileDifference struct {
	Path   string        `json:"path"`
	Before *pb.FileState `json:"before"` // nil: there is none
	After  *pb.FileState `json:"after"`
	What   []string      `json:"what"` // in words
	Lines  []string      `json:"lines,omitempty"`
	Cut    int           `json:"lines_cut,omitempty"`
}

type lineDifference struct {
	Sign string `json:"sign"` // - before, + after
	Text string `json:"text"`
}

type shellDifference struct {
	Session string           `json:"session"`
	Lines   []lineDifference `json:"lines"`
}

func (d *difference) equal() bool { return len(d.Files)+len(d.Processes)+len(d.Sessions) == 0 }

func compareNodes(ctx context.Context, client pb.BoxwoodClient, before, after string) (*difference, error) {
	changes, err := client.Diff(ctx, &pb.DiffRequest{NodeIds: []string{before, after}})
	if err != nil {
		return nil, err
	}
	files, err := all(changes.Recv)
	if err != nil {
		return nil, err
	}
	boxes, release, err := scratchForks(ctx, client, before, after)
	if err != nil {
		return nil, err
	}
	defer release()
	d := &difference{Before: before, After: after, Files: []fileDifference{}}
	room := maxTextFiles
	for _, f := range files {
		one, err := describeFile(ctx, client, boxes, f, &room)
		if err != nil {
			return nil, err
		}
		d.Files = append(d.Files, one)
	}
	var running [2]string
	var sessions [2]map[string]string
	for i, box := range boxes {
		if running[i], err = processesIn(ctx, client, box); err != nil {
			return nil, err
		}
		if sessions[i], err = shellsIn(ctx, client, box); err != nil {
			return nil, err
		}
	}
	d.Processes = onlyLines(running[0], running[1])
	d.Sessions = []shellDifference{}
	names := maps.Clone(sessions[0])
	maps.Copy(names, sessions[1])
	for _, name := range slices.Sorted(maps.Keys(names)) {
		was, had := sessions[0][name]
		is, has := sessions[1][name]
		switch lines := onlyLines(was, is); {
		case !had:
			d.Sessions = append(d.Sessions, shellDifference{name, []lineDifference{{"+", "the session was opened"}}})
		case !has:
			d.Sessions = append(d.Sessions, shellDifference{name, []lineDifference{{"-", "the session is gone"}}})
		case len(lines) > 0:
			d.Sessions = append(d.Sessions, shellDifference{name, lines})
		}
	}
	return d, nil
}

// scratchForks are sandboxes at nodes that write none. They end with release, or with their lease if this program is killed.
func scratchForks(ctx context.Context, client pb.BoxwoodClient, nodes ...string) (boxes []string, release func(), err error) {
	release = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, _ = client.Release(ctx, &pb.ReleaseRequest{SandboxIds: slices.DeleteFunc(boxes, func(id string) bool { return id == "" })})
	}
	r := &pb.ForkRequest{Scratch: true, LeaseNs: int64(scratchLease), MinReady: int32(len(nodes))}
	for _, n := range nodes {
		r.Wants = append(r.Wants, &pb.ForkRequest_Want{Count: 1, From: &pb.ForkRequest_Want_NodeId{NodeId: n}})
	}
	results, err := client.Fork(ctx, r)
	if err != nil {
		return nil, nil, err
	}
	boxes = make([]string, len(nodes))
	var failed error
	for {
		child, err := results.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			failed = errors.Join(failed, err)
			break
		}
		if s := child.GetSandbox(); s != nil {
			boxes[child.Want] = s.Id
		} else if failed == nil {
			failed = fault.New(fault.Internal, "fork_failed", "forking %s: %s", nodes[child.Want], child.Message).WithHint("%s", child.GetError().GetHint())
		}
	}
	if failed != nil {
		release()
		return nil, nil, failed
	}
	return boxes, release, nil
}

// scratchLease is how long a scratch fork of this program lives without a call.
const scratchLease = 5 * time.Minute

func describeFile(ctx context.Context, client pb.BoxwoodClient, boxes []string, f *pb.FileDifference, room *int) (fileDifference, error) {
	d := fileDifference{Path: path.Join("/", string(f.Path)), Before: f.Was, After: f.Is, What: []string{}}
	if f.Was == nil || f.Is == nil {
		d.What = append(d.What, fileWords(oneSide(f)))
	} else {
		d.What = append(d.What, changedWords(f.Was, f.Is)...)
	}
	if f.Was.GetSha256() == f.Is.GetSha256() {
		return d, nil
	}
	var texts [2]string
	for i, s := range []*pb.FileState{f.Was, f.Is} {
		if s.GetKind() != "file" {
			continue
		}
		if s.Size > maxTextFile || int(s.Size) > *room {
			return d, nil
		}
		*room -= int(s.Size)
		reply, err := client.ReadFile(ctx, &pb.ReadFileRequest{SandboxId: boxes[i], Path: d.Path})
		if status.Code(err) == codes.NotFound {
			return d, nil // what runs in the fork has moved on
		}
		if err != nil {
			return d, err
		}
		if sum := sha256.Sum256(reply.Content); hex.EncodeToString(sum[:]) != s.Sha256 || bytes.IndexByte(reply.Content, 0) >= 0 || !utf8.Valid(reply.Content) {
			return d, nil
		}
		texts[i] = string(reply.Content)
	}
	d.Lines = linediff.Unified(texts[0], texts[1], 3)
	if n := len(d.Lines); n > maxFileLines {
		d.Lines, d.Cut = d.Lines[:maxFileLines], n-maxFileLines
	}
	return d, nil
}

// oneSide is the side that there is.
func oneSide(f *pb.FileDifference) *pb.FileState {
	if f.Was != nil {
		return f.Was
	}
	return f.Is
}

func fileWords(s *pb.FileState) string {
	words := fmt.Sprintf("%s %04o %d:%d", s.Kind, s.Mode, s.Uid, s.Gid)
	if s.Kind == "file" {
		words += ", " + contentWords(s)
	}
	if s.Kind == "link" {
		words += fmt.Sprintf(" to %s", s.Target)
	}
	return words
}

func contentWords(s *pb.FileState) string {
	return fmt.Sprintf("%d bytes, sha256 %.12s", s.Size, s.Sha256)
}

func changedWords(was, is *pb.FileState) (out []string) {
	if was.Kind != is.Kind {
		return []string{fileWords(was) + " -> " + fileWords(is)}
	}
	say := func(differs bool, format string, args ...any) {
		if differs {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	say(was.Sha256 != is.Sha256, "content: %s -> %s", contentWords(was), contentWords(is))
	say(was.Mode != is.Mode, "mode: %04o -> %04o", was.Mode, is.Mode)
	say(was.Uid != is.Uid || was.Gid != is.Gid, "owner: %d:%d -> %d:%d", was.Uid, was.Gid, is.Uid, is.Gid)
	say(!bytes.Equal(was.Target, is.Target), "leads to: %s -> %s", was.Target, is.Target)
	names := maps.Clone(was.Attributes)
	if names == nil {
		names = map[string][]byte{}
	}
	maps.Copy(names, is.Attributes)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		a, had := was.Attributes[name]
		b, has := is.Attributes[name]
		say(had != has || !bytes.Equal(a, b), "attribute %s: %q -> %q", name, a, b)
	}
	say(len(out) == 0, "time: %s -> %s", stamp(was.Mtime), stamp(is.Mtime))
	return out
}

func stamp(ns int64) string { return time.Unix(0, ns).UTC().Format(time.RFC3339Nano) }

// listProcesses prints a line a process: pid, user, folder and command line, and takes no more than a shell and what any image has. It
// leaves out itself, pid 1, and what has ended.
const listProcesses = `for d in /proc/[0-9]*; do p=${d#/proc/}; case $p in 1|$$) continue;; esac
c=$(tr '\0\n' '  ' <$d/cmdline) 2>/dev/null || continue; w=$(readlink $d/cwd)
u=; n=; while read -r k v _; do case $k in Uid:) u=$v;; Name:) n=$v;; State:) s=$v;; esac; done <$d/status 2>/dev/null || continue
[ "$s" = Z ] && c="$n (ended, nobody has taken its status)"
printf '%s uid %s in %s: %s\n' "$p" "$u" "$w" "${c:-[$n]}"; done`

func processesIn(ctx context.Context, client pb.BoxwoodClient, box string) (string, error) {
	out, err := hear(ctx, client, &pb.RunTurnRequest{SandboxId: box, Command: &pb.Command{
		Argv: [][]byte{[]byte("/bin/sh"), []byte("-c"), []byte(listProcesses)}, User: "0:0", Cwd: "/", DeadlineNs: int64(time.Minute)}})
	if err != nil {
		return "", fmt.Errorf("listing processes: %w", err)
	}
	lines := strings.Split(out, "\n")
	slices.Sort(lines)
	return strings.TrimPrefix(strings.Join(lines, "\n"), "\n") + "\n", nil
}

// describeShell prints what a shell holds.
const describeShell = `builtin declare -p; builtin declare -f; builtin alias -p; builtin set +o; builtin shopt -p; builtin trap -p; builtin umask -p; builtin dirs -l -p`

func shellsIn(ctx context.Context, client pb.BoxwoodClient, box string) (map[string]string, error) {
	list, err := client.ListSessions(ctx, &pb.ListSessionsRequest{SandboxId: box})
	if err != nil {
		return nil, err
	}
	said := map[string]string{}
	for _, s := range list.Sessions {
		out, err := hear(ctx, client, &pb.RunTurnRequest{SandboxId: box, Command: &pb.Command{
			Session: s.Name, Shell: []byte(describeShell), DeadlineNs: int64(time.Minute)}})
		if err != nil {
			return nil, fmt.Errorf("asking session %s: %w", s.Name, err)
		}
		var b strings.Builder
		for line := range strings.Lines(strings.ReplaceAll(out, "\r\n", "\n")) {
			if words := strings.SplitN(line, " ", 3); len(words) == 3 && words[0] == "declare" {
				if name, _, _ := strings.Cut(strings.TrimSpace(words[2]), "="); shell.Volatile(name) {
					continue
				}
			}
			b.WriteString(line)
		}
		said[s.Name] = b.String()
	}
	return said, nil
}

// maxHeard bounds what a sandbox may say to a question of this program.
const maxHeard = 64 << 20

// hear runs a turn of a scratch fork for what it says.
func hear(ctx context.Context, client pb.BoxwoodClient, r *pb.RunTurnRequest) (string, error) {
	var out bytes.Buffer
	result, err := runTurn(ctx, client, r, &boundedWriter{&out, maxHeard}, io.Discard)
	if err != nil {
		return "", err
	}
	if result.Node.GetTurnStatus() != pb.TurnStatus_TURN_STATUS_COMPLETED || result.Unstreamed > 0 {
		return "", fault.New(fault.Internal, "no_answer", "the sandbox gave no whole answer: it %s", ended(result.Node))
	}
	return out.String(), nil
}

type boundedWriter struct {
	w    io.Writer
	room int
}

func (b *boundedWriter) Write(p []byte) (int, error) {
	if b.room -= len(p); b.room < 0 {
		return 0, errors.New("the sandbox says too much")
	}
	return b.w.Write(p)
}

// onlyLines are those that only one of two texts has.
func onlyLines(was, is string) []lineDifference {
	out := []lineDifference{}
	for _, l := range linediff.Unified(was, is, 0) {
		if sign := l[:1]; sign == "-" || sign == "+" {
			out = append(out, lineDifference{sign, l[1:]})
		}
	}
	return out
}

// show prints a difference for a person; what came out of a sandbox is escaped.
func (d *difference) show(w io.Writer) error {
	var b strings.Builder
	say := func(indent, format string, args ...any) {
		b.WriteString(indent + printable.Line(fmt.Sprintf(format, args...)) + "\n")
	}
	if d.equal() {
		say("", "nothing differs")
	}
	for _, f := range d.Files {
		sign := "~"
		switch {
		case f.Before == nil:
			sign = "+"
		case f.After == nil:
			sign = "-"
		}
		say("", "%s %s  %s", sign, f.Path, strings.Join(f.What, "; "))
		for _, l := range f.Lines {
			say("    ", "%s", l)
		}
		if f.Cut > 0 {
			say("    ", "... and %d more lines", f.Cut)
		}
	}
	for _, p := range d.Processes {
		say("", "%s process %s", p.Sign, p.Text)
	}
	for _, s := range d.Sessions {
		say("", "~ session %s", s.Session)
		for _, l := range s.Lines {
			say("    ", "%s%s", l.Sign, l.Text)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
