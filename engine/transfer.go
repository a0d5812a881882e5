package engine

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// transfer moves files into or out of a box. Its context ends with its turn or with
// a release, whatever its client does.
type transfer func(ctx context.Context, b box.Box) error

// withinTurn is within for what has to know its turn.
func (e *Engine) withinTurn(ctx context.Context, id ids.Sandbox, open ids.Turn, s *tree.Step, commit Commit, do func(context.Context, *turn) error) (*TurnResult, error) {
	t, err := e.stepTurn(ctx, id, open)
	if err != nil {
		return nil, err
	}
	if err := t.step(ctx, s, func(ctx context.Context, _ box.Box) error { return do(ctx, t) }); err != nil {
		if open == "" {
			_, endErr := t.end(ctx, NodeInput{}, nil) // what it wrote before it failed is a change
			err = errors.Join(err, endErr)
		}
		return nil, err
	}
	if open != "" {
		return nil, nil
	}
	r, err := t.end(ctx, NodeInput{}, commit)
	return &r, err
}

// within runs one transfer as a step of an open turn or (turn empty) as a turn
// of its own, whose result it returns.
func (e *Engine) within(ctx context.Context, id ids.Sandbox, open ids.Turn, s *tree.Step, commit Commit, do transfer) (*TurnResult, error) {
	return e.withinTurn(ctx, id, open, s, commit, func(ctx context.Context, t *turn) error { return do(ctx, t.b.box) })
}

func (e *Engine) stepTurn(ctx context.Context, id ids.Sandbox, open ids.Turn) (*turn, error) {
	if open == "" {
		return e.begin(ctx, id, 0)
	}
	t, err := e.openTurn(open)
	if err == nil && id != "" && t.s.id != id {
		return nil, fault.New(fault.Invalid, "wrong_turn", "turn %s belongs to sandbox %s, not %s", open, t.s.id, id)
	}
	return t, err
}

// step carries out a transfer. do may add to s what only the transfer itself shows.
func (t *turn) step(ctx context.Context, s *tree.Step, do transfer) error {
	return t.alone(ctx, func() error {
		t.noteText(textOf(s))
		t.touched = true
		err := do(t.ctx, t.b.box)
		if err != nil {
			s.Failed = fault.As(err).Reason
		}
		t.keep(*s)
		return err
	})
}

// WriteFile writes or appends to a file of a sandbox.
func (e *Engine) WriteFile(ctx context.Context, id ids.Sandbox, open ids.Turn, path string, content []byte, mode uint32, appendTo bool, commit Commit) (*TurnResult, error) {
	s := &tree.Step{Kind: tree.WriteStep, Path: path, Content: content, Mode: int64(mode), Append: appendTo}
	return e.within(ctx, id, open, s, commit, func(ctx context.Context, b box.Box) error {
		return b.WriteFile(ctx, path, content, mode, appendTo)
	})
}

// Unpacked says what an upload brought.
type Unpacked struct{ Entries, Bytes int64 }

// Upload unpacks a tar stream below a folder of a sandbox.
func (e *Engine) Upload(ctx context.Context, id ids.Sandbox, open ids.Turn, path string, r io.Reader, commit func(*tree.Tx, TurnResult, Unpacked) error) (*TurnResult, Unpacked, error) {
	var u Unpacked
	s := &tree.Step{Kind: tree.UploadStep, Path: path}
	res, err := e.within(ctx, id, open, s, func(tx *tree.Tx, r TurnResult) error { return commit(tx, r, u) }, func(ctx context.Context, b box.Box) (err error) {
		// A client that stops sending in the middle must not hold up the turn's end.
		pr, pw := io.Pipe()
		go func() {
			_, err := io.Copy(pw, r)
			pw.CloseWithError(err)
		}()
		defer context.AfterFunc(ctx, func() { pw.CloseWithError(context.Cause(ctx)) })()
		defer pr.Close()
		kept := &firstBytes{limit: tree.MaxRecipe + 1}
		u.Entries, u.Bytes, err = b.Unpack(ctx, path, io.TeeReader(pr, kept))
		s.Content = kept.b
		return err
	})
	return res, u, err
}

// ReadFile reads from a file of a sandbox; it is no turn and changes nothing.
func (e *Engine) ReadFile(ctx context.Context, id ids.Sandbox, open ids.Turn, path string, offset, limit int64) (content []byte, size int64, mode uint32, err error) {
	err = e.reading(ctx, id, open, func(ctx context.Context, b box.Box) error {
		content, size, mode, err = b.ReadFile(ctx, path, offset, limit)
		return err
	})
	return content, size, mode, err
}

// Download packs a file or folder of a sandbox into a tar stream.
func (e *Engine) Download(ctx context.Context, id ids.Sandbox, open ids.Turn, path string, w io.Writer) error {
	// A client that stops reading in the middle holds up this call alone.
	pr, pw := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(w, pr)
		pr.CloseWithError(err)
		sent <- err
	}()
	err := e.reading(ctx, id, open, func(ctx context.Context, b box.Box) error {
		defer context.AfterFunc(ctx, func() { pr.CloseWithError(context.Cause(ctx)) })()
		return b.Pack(ctx, path, pw)
	})
	pw.CloseWithError(err)
	if serr := <-sent; err == nil {
		err = serr
	}
	return err
}

// reading runs a read-only transfer inside an open turn or between turns.
func (e *Engine) reading(ctx context.Context, id ids.Sandbox, open ids.Turn, do transfer) error {
	if open != "" {
		t, err := e.stepTurn(ctx, id, open)
		if err != nil {
			return err
		}
		t.one.Lock()
		defer t.one.Unlock()
		if t.ended {
			return errTurnOver(open)
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(t.ctx, cancel)()
		return do(ctx, t.b.box)
	}
	s, err := e.find(id)
	if err != nil {
		return err
	}
	if _, err := s.acquire(ctx, 0); err != nil {
		return err
	}
	defer s.releaseSlot()
	s.renew(0)
	ctx, done := s.reading(ctx)
	defer done()
	s.mu.Lock()
	b := s.body
	s.mu.Unlock()
	// A read that is cancelled is killed with its leaf, in which nothing else may be.
	if err := b.box.BeginTurn(); err != nil {
		return fmt.Errorf("reading from sandbox %s: %w", id, err)
	}
	return do(ctx, b.box)
}
