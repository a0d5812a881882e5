package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/tree"
)

// GraderLabel marks the trees that stand for the time of one evaluation.
const GraderLabel = "boxwood.grader"

// maxRewards bounds the file that a grader writes its rewards to.
const maxRewards = 1 << 20

// File is one to write into a sandbox.
type File struct {
	Path    string
	Content []byte
	Mode    uint32
}

// Grader says how a node is graded. Without Start it runs in a scratch fork of the
// node, in which everything is the agent's: its interpreters, its PATH, its
// /etc/profile. With Start it runs in a fresh sandbox that gets of the node only
// what lies at Paths, and nothing else there is the agent's.
type Grader struct {
	Start   Start    // image or node; the zero Start: none
	Paths   []string // copied from the node, at the same places
	Files   []File   // hidden from the agent; they win over Paths
	Command Command
	// RewardsFile is read after the command: a JSON object of numbers, or one number,
	// which is the reward. Empty: the reward is 1 if the command exits with 0, else 0.
	RewardsFile string
	Limits      tree.Limits
}

// Evaluation is what a grader came to. Rewards are nil if the command ran and gave
// none: it reached its deadline, or it didn't write its file, or it wasn't run, as what it was to grade had no room; Problem says so. A
// failure of the host is an error and never an Evaluation.
type Evaluation struct {
	Rewards     map[string]float64
	Observation tree.Observation
	Status      tree.TurnStatus
	Problem     string
	// Missing are the Paths that the node doesn't have.
	Missing []string
	Wall    time.Duration
}

// Evaluate grades a node. Nothing of it stays: the sandboxes are scratch and released, and
// the node is as it was.
func (e *Engine) Evaluate(ctx context.Context, id ids.Node, g Grader) (Evaluation, error) {
	if err := g.check(); err != nil {
		return Evaluation{}, err
	}
	subject, err := e.scratch(ctx, id, g.Limits)
	if err != nil {
		return Evaluation{}, err
	}
	defer e.discard(ctx, subject)
	at, missing := subject, []string(nil)
	if g.Start != (Start{}) && !sabotage.On("grader") {
		fresh, done, err := e.freshBox(ctx, g)
		if err != nil {
			return Evaluation{}, fmt.Errorf("making the grader's sandbox: %w", err)
		}
		defer done()
		to, err := e.find(fresh)
		if err != nil {
			return Evaluation{}, err
		}
		room := to.limits.DiskBytes
		missing, err = e.hand(ctx, subject, fresh, g, &room)
		if room < 0 && !sabotage.On("room") { // the agent's doing, as a file with a hole that no disk has room for: no failure of the host
			return Evaluation{Status: tree.Completed, Missing: missing, Problem: "the command wasn't run: the paths hold more than the grader's sandbox may have on its disk"}, nil
		}
		if err != nil {
			return Evaluation{}, err
		}
		at = fresh
	}
	out, err := e.grade(ctx, at, g)
	out.Missing = missing
	return out, err
}

func (g Grader) check() error {
	if g.Start.Image != "" && g.Start.Node != "" {
		return fault.New(fault.Invalid, "bad_grader", "a grader starts from an image or from a node, not from both")
	}
	if g.Start == (Start{}) && len(g.Paths) > 0 {
		return fault.New(fault.Invalid, "bad_grader", "paths are copied into a fresh sandbox, so an image or a node must be named for it")
	}
	for i, p := range g.Paths {
		if !path.IsAbs(p) || path.Clean(p) == "/" {
			return fault.New(fault.Invalid, "bad_path", "%q is not an absolute path below /", p)
		}
		for _, q := range g.Paths[:i] {
			// A link below the one could lead what lies below the other astray.
			if within(p, q) || within(q, p) {
				return fault.New(fault.Invalid, "bad_path", "of the paths %q and %q one lies below the other: name the upper one only", q, p)
			}
		}
	}
	for _, f := range g.Files {
		if !path.IsAbs(f.Path) || f.Path != path.Clean(f.Path) || f.Path == "/" {
			return fault.New(fault.Invalid, "bad_path", "%q is not an absolute path of a file", f.Path)
		}
	}
	if g.RewardsFile != "" && !path.IsAbs(g.RewardsFile) {
		return fault.New(fault.Invalid, "bad_path", "%q is not an absolute path of a file", g.RewardsFile)
	}
	return nil
}

// within reports whether p is q or lies below it.
func within(p, q string) bool {
	p, q = path.Clean(p), path.Clean(q)
	return p == q || strings.HasPrefix(p, q+"/")
}

// scratch forks a node once.
func (e *Engine) scratch(ctx context.Context, id ids.Node, limits tree.Limits) (ids.Sandbox, error) {
	var child Child
	o := ForkOptions{Scratch: true, ReplaceFailed: true, Limits: limits}
	err := e.Fork(ctx, time.Now(), []Want{{Node: id, Count: 1}}, o, func(c Child) { child = c })
	return child.Sandbox.ID, errors.Join(err, child.Err)
}

func (e *Engine) discard(ctx context.Context, id ids.Sandbox) {
	if _, err := e.Release(context.WithoutCancel(ctx), []ids.Sandbox{id}); err != nil {
		e.log.ErrorContext(ctx, "releasing the sandbox of an evaluation", "sandbox", id, "error", err)
	}
}

// freshBox makes a sandbox that the agent never was in. A node is forked; an image needs a
// tree for that, which goes with it.
func (e *Engine) freshBox(ctx context.Context, g Grader) (ids.Sandbox, func(), error) {
	if g.Start.Node != "" {
		id, err := e.scratch(ctx, g.Start.Node, g.Limits)
		return id, func() { e.discard(ctx, id) }, err
	}
	made, err := e.CreateTree(ctx, NewTree{Start: g.Start, Labels: map[string]string{GraderLabel: "1"}}, nil)
	if err != nil {
		return "", nil, err
	}
	done := func() {
		if err := e.uproot(ctx, made.Tree); err != nil {
			e.log.ErrorContext(ctx, "removing the tree of an evaluation", "tree", made.Tree.ID, "error", err)
		}
	}
	id, err := e.scratch(ctx, made.Root.ID, g.Limits)
	if err != nil {
		done()
	}
	return id, done, err
}

// uprootGraders removes the trees of evaluations that the last daemon didn't finish.
func (e *Engine) uprootGraders(ctx context.Context) {
	var left []*tree.Tree
	for t := range e.Store.View().Trees() {
		if t.Labels[GraderLabel] != "" {
			left = append(left, t)
		}
	}
	for _, t := range left {
		if err := e.uproot(ctx, t); err != nil {
			e.log.ErrorContext(ctx, "removing the tree of an evaluation of the last run", "tree", t.ID, "error", err)
		}
	}
}

// hand copies the grader's paths from one sandbox into another. The one is hostile, and
// so is what it sends. What it takes is taken from room, which is below 0 if there was more.
func (e *Engine) hand(ctx context.Context, from, to ids.Sandbox, g Grader, room *int64) (missing []string, err error) {
	for _, p := range g.Paths {
		p = path.Clean(p)
		pr, pw := io.Pipe()
		sent := make(chan error, 1)
		go func() {
			err := e.Download(ctx, from, "", p, pw)
			pw.CloseWithError(err)
			sent <- err
		}()
		sieved, sw := io.Pipe()
		go func() { sw.CloseWithError(sieve(pr, sw, p, g.Files, room)) }()
		_, _, err := e.Upload(ctx, to, "", path.Dir(p), sieved, func(*tree.Tx, TurnResult, Unpacked) error { return nil })
		sieved.CloseWithError(io.ErrClosedPipe)
		pr.CloseWithError(io.ErrClosedPipe)
		serr := <-sent
		if fault.Is(serr, fault.NotFound) && fault.As(serr).Reason == "no_such_file" {
			missing = append(missing, p)
			continue
		}
		if err = errors.Join(serr, err); err != nil {
			return nil, fmt.Errorf("copying %s to the grader: %w", p, err)
		}
	}
	return missing, nil
}

// sieve lets pass of a tar stream of what lies at p only what ends up there: folders, files and
// links, each below a folder that came before it, none twice. So a link never leads an
// entry elsewhere. What a hidden file needs for itself doesn't pass either. It ends when there is no room: see hand.
func sieve(r io.Reader, w io.Writer, p string, hidden []File, room *int64) error {
	in, out := tar.NewReader(r), tar.NewWriter(w)
	root := path.Base(p)
	folders, seen := map[string]bool{".": true}, map[string]bool{}
	for {
		h, err := in.Next()
		if err == io.EOF {
			if _, err := io.Copy(io.Discard, r); err != nil { // the stream's padding
				return err
			}
			return out.Close()
		}
		if err != nil {
			return err
		}
		if *room -= h.Size; *room < 0 {
			return fault.New(fault.Exhausted, "graded_too_large", "%s is too large", h.Name)
		}
		name := path.Clean(h.Name)
		folder := h.Typeflag == tar.TypeDir
		ok := within(name, root) && folders[path.Dir(name)] && !seen[name] &&
			(folder || h.Typeflag == tar.TypeReg || h.Typeflag == tar.TypeSymlink)
		at := path.Join(path.Dir(p), name)
		ok = ok && !slices.ContainsFunc(hidden, func(f File) bool {
			return f.Path == at || !folder && within(f.Path, at)
		})
		if !ok {
			continue
		}
		seen[name] = true
		folders[name] = folder
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(out, in); err != nil {
			return err
		}
	}
}

// grade brings the hidden files in and runs the command, all in one turn.
func (e *Engine) grade(ctx context.Context, at ids.Sandbox, g Grader) (Evaluation, error) {
	turn, err := e.BeginTurn(ctx, at, 0, 24*time.Hour) // the command's deadline and ctx bound it
	if err != nil {
		return Evaluation{}, err
	}
	defer func() {
		_, err := e.EndTurn(context.WithoutCancel(ctx), turn, NodeInput{}, nil)
		if err != nil && !fault.Is(err, fault.NotFound) { // lost, or its deadline passed
			e.log.ErrorContext(ctx, "ending the turn of an evaluation", "sandbox", at, "error", err)
		}
	}()
	if len(g.Files) > 0 {
		archive, err := archiveOf(g.Files)
		if err != nil {
			return Evaluation{}, err
		}
		if _, _, err := e.Upload(ctx, at, turn, "/", archive, nil); err != nil {
			return Evaluation{}, fmt.Errorf("writing the grader's files: %w", err)
		}
	}
	r, err := e.Exec(ctx, turn, g.Command)
	if err != nil {
		return Evaluation{}, fmt.Errorf("running the grader: %w", err)
	}
	out := Evaluation{Observation: r.Observation, Status: r.Status, Wall: r.Wall}
	code := r.Observation.ExitCode
	switch {
	case r.Status == tree.TimedOut:
		out.Problem = "the grader's command reached its deadline"
		return out, nil
	case r.Status != tree.Completed:
		return Evaluation{}, fault.New(fault.Unavailable, "grader_lost", "the grader was stopped before it ended").
			WithHint("that is no reward: grade the node again")
	case g.Start != (Start{}) && (code == 126 || code == 127):
		return Evaluation{}, fault.New(fault.Unsupported, "grader_not_started", "the grader's command could not be started: exit status %d: %s",
			code, brief(r.Observation.Stderr, 200)).WithHint("the grader's image lacks what the command needs")
	case g.RewardsFile == "":
		out.Rewards = map[string]float64{"reward": 0}
		if code == 0 {
			out.Rewards["reward"] = 1
		}
		return out, nil
	}
	content, size, _, err := e.ReadFile(ctx, at, turn, g.RewardsFile, 0, maxRewards)
	switch {
	case fault.Is(err, fault.NotFound):
		out.Problem = fmt.Sprintf("the grader wrote no %s", g.RewardsFile)
	case err != nil:
		return Evaluation{}, fmt.Errorf("reading the rewards: %w", err)
	case size > maxRewards:
		out.Problem = fmt.Sprintf("%s has %d bytes, at most %d are read", g.RewardsFile, size, maxRewards)
	default:
		if out.Rewards, err = parseRewards(content); err != nil {
			out.Rewards, out.Problem = nil, fmt.Sprintf("%s holds no rewards: %v", g.RewardsFile, err)
		}
	}
	return out, nil
}

// parseRewards reads {"name": number, ...}, or one number.
func parseRewards(content []byte) (map[string]float64, error) {
	text := string(bytes.TrimSpace(content))
	if v, err := strconv.ParseFloat(text, 64); err == nil {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil, fmt.Errorf("%s is no finite number", text)
		}
		return map[string]float64{"reward": v}, nil
	}
	var rewards map[string]float64
	if err := json.Unmarshal(content, &rewards); err != nil {
		return nil, err
	}
	if len(rewards) == 0 {
		return nil, errors.New("it is empty")
	}
	return rewards, nil
}

func archiveOf(files []File) (*bytes.Buffer, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		mode := f.Mode
		if mode == 0 {
			mode = 0o644
		}
		h := &tar.Header{Name: f.Path[1:], Typeflag: tar.TypeReg, Mode: int64(mode), Size: int64(len(f.Content)), ModTime: time.Now()}
		if err := w.WriteHeader(h); err != nil {
			return nil, fault.New(fault.Invalid, "bad_file", "packing %s: %w", f.Path, err)
		}
		if _, err := w.Write(f.Content); err != nil {
			return nil, err
		}
	}
	return &b, w.Close()
}
