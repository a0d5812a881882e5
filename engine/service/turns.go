package service

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// The bounds of one message's content.
const (
	maxInline = 4 << 20
	chunkSize = 256 << 10
)

func (s *Service) RunTurn(req *boxwoodv1.RunTurnRequest, out grpc.ServerStreamingServer[boxwoodv1.TurnEvent]) error {
	if err := checkCommand(req.GetCommand()); err != nil {
		return err
	}
	ctx := out.Context()
	var unstreamed int64
	var made *boxwoodv1.TurnResult
	result, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.TurnResult{}, func(rec record) (*boxwoodv1.TurnResult, error) {
		c := command(req.GetCommand())
		relay := &relay{out: out}
		if !req.GetResultOnly() {
			c.Output = relay.write
		}
		r, err := s.e.RunTurn(ctx, ids.Sandbox(req.GetSandboxId()), c, nodeInput(req.GetNode()),
			time.Duration(req.GetBusyWaitNs()), recordResult(rec, &made))
		relay.close()
		if err != nil {
			return nil, err
		}
		unstreamed = relay.unstreamed
		return s.answer(r, made), nil
	})
	if err == nil {
		err = s.acknowledge(ctx, result, req.GetAck())
	}
	if err != nil {
		return err
	}
	result.Unstreamed = unstreamed
	return out.Send(&boxwoodv1.TurnEvent{Event: &boxwoodv1.TurnEvent_Result{Result: result}})
}

// recordResult keeps the turn's answer with its node. It sets made.
func recordResult(rec record, made **boxwoodv1.TurnResult) engine.Commit {
	return func(tx *tree.Tx, r engine.TurnResult) error {
		*made = resultMessage(tx, r)
		return rec(tx, *made)
	}
}

// answer is that of a turn. made is what was recorded with its node, nil if it has none.
func (s *Service) answer(r engine.TurnResult, made *boxwoodv1.TurnResult) *boxwoodv1.TurnResult {
	if made != nil { // how long recording took is all that is new
		made.Timings = timingsMessage(r.Timings)
		return made
	}
	return resultMessage(s.e.Store.View(), r)
}

// acknowledge waits for the capture of a turn's node, if that is asked for. An
// answer that was recorded for its key was recorded before the capture.
func (s *Service) acknowledge(ctx context.Context, m *boxwoodv1.TurnResult, ack boxwoodv1.Ack) error {
	n := m.GetNode()
	if ack != boxwoodv1.Ack_ACK_CAPTURED || n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_RECORDED {
		return nil
	}
	began := time.Now()
	waited, err := s.e.WaitCaptured(ctx, []ids.Node{ids.Node(n.GetId())})
	if fault.Is(err, fault.NotFound) {
		return nil // pruned since: the answer stays what it was
	}
	if err != nil {
		return err
	}
	c := node(s.e.Store.View(), waited[0])
	n.Capture, n.CheckpointId, n.CheckpointNodeId, n.ProcessKind = c.Capture, c.CheckpointId, c.CheckpointNodeId, c.ProcessKind
	n.WithheldReason, n.FrozenAt, n.ModifyIndex = c.WithheldReason, c.FrozenAt, c.ModifyIndex
	m.Timings.CaptureNs = int64(time.Since(began))
	return nil
}

func checkCommand(c *boxwoodv1.Command) error {
	if len(c.GetStdin()) > maxInline {
		return fault.New(fault.Invalid, "stdin_too_large", "stdin has %d bytes; at most %d can be sent", len(c.GetStdin()), maxInline).
			WithHint("upload a file and redirect it")
	}
	if c.GetDeadlineNs() < 0 || c.GetOutputLimit() < 0 || c.GetOutputLimit() > tree.MaxObservation {
		return fault.New(fault.Invalid, "bad_command", "a deadline can't be negative, an output limit is 0 to %d", tree.MaxObservation)
	}
	return nil
}

// relay sends output to the client. A client that is slow to take it holds up its
// own command, but for no longer than patience in all; what comes after that and
// finds no room is left out of the stream and counted (the observation has head
// and tail of everything). Its goroutine begins with the first output, since
// most turns of an agent's loop are short and many are silent. One goroutine at a time
// writes and closes.
type relay struct {
	out    grpc.ServerStreamingServer[boxwoodv1.TurnEvent]
	chunks chan *boxwoodv1.TurnEvent // nil: no output yet
	done   chan struct{}

	waited     time.Duration
	unstreamed int64
}

// patience is short beside the deadlines of turns, which wait for it.
const patience = 2 * time.Second

func (r *relay) start() {
	r.chunks, r.done = make(chan *boxwoodv1.TurnEvent, 64), make(chan struct{})
	go func() {
		defer close(r.done)
		for m := range r.chunks {
			if r.out.Send(m) != nil {
				break // the client is gone: its context ends the turn
			}
		}
		for range r.chunks {
			continue
		}
	}()
}

func (r *relay) write(stderr bool, p []byte) {
	if r.chunks == nil {
		r.start()
	}
	for len(p) > 0 {
		n := min(len(p), chunkSize)
		part := append([]byte(nil), p[:n]...)
		p = p[n:]
		m := &boxwoodv1.TurnEvent{Event: &boxwoodv1.TurnEvent_Stdout{Stdout: part}}
		if stderr {
			m.Event = &boxwoodv1.TurnEvent_Stderr{Stderr: part}
		}
		if !r.offer(m) {
			r.unstreamed += int64(n)
		}
	}
}

func (r *relay) offer(m *boxwoodv1.TurnEvent) bool {
	select {
	case r.chunks <- m:
		return true
	default:
	}
	if r.waited >= patience {
		return false
	}
	began := time.Now()
	timer := time.NewTimer(patience - r.waited)
	defer timer.Stop()
	defer func() { r.waited += time.Since(began) }()
	select {
	case r.chunks <- m:
		return true
	case <-timer.C:
		return false
	}
}

// close waits until what was taken is sent: Send isn't for two goroutines.
func (r *relay) close() {
	if r.chunks != nil {
		close(r.chunks)
		<-r.done
	}
}

func (s *Service) BeginTurn(ctx context.Context, req *boxwoodv1.BeginTurnRequest) (*boxwoodv1.BeginTurnResponse, error) {
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.BeginTurnResponse{}, func(record) (*boxwoodv1.BeginTurnResponse, error) {
		id, err := s.e.BeginTurn(ctx, ids.Sandbox(req.GetSandboxId()), time.Duration(req.GetBusyWaitNs()), time.Duration(req.GetDeadlineNs()))
		return &boxwoodv1.BeginTurnResponse{TurnId: string(id)}, err
	})
	return got, err
}

func (s *Service) Exec(req *boxwoodv1.ExecRequest, out grpc.ServerStreamingServer[boxwoodv1.TurnEvent]) error {
	if err := checkCommand(req.GetCommand()); err != nil {
		return err
	}
	c := command(req.GetCommand())
	relay := &relay{out: out}
	if !req.GetResultOnly() {
		c.Output = relay.write
	}
	r, err := s.e.Exec(out.Context(), ids.Turn(req.GetTurnId()), c)
	relay.close()
	if err != nil {
		return err
	}
	return out.Send(&boxwoodv1.TurnEvent{Event: &boxwoodv1.TurnEvent_Command{Command: &boxwoodv1.CommandResult{
		Observation: observationMessage(r.Observation), Status: boxwoodv1.TurnStatus(r.Status), WallNs: int64(r.Wall),
		Unstreamed: relay.unstreamed, SessionEnded: r.SessionEnded,
	}}})
}

func (s *Service) EndTurn(ctx context.Context, req *boxwoodv1.EndTurnRequest) (*boxwoodv1.TurnResult, error) {
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.TurnResult{}, func(rec record) (*boxwoodv1.TurnResult, error) {
		var made *boxwoodv1.TurnResult
		r, err := s.e.EndTurn(ctx, ids.Turn(req.GetTurnId()), nodeInput(req.GetNode()), recordResult(rec, &made))
		if err != nil {
			return nil, err
		}
		return s.answer(r, made), nil
	})
	if err == nil {
		err = s.acknowledge(ctx, got, req.GetAck())
	}
	return got, err
}

func (s *Service) CancelTurn(_ context.Context, req *boxwoodv1.CancelTurnRequest) (*boxwoodv1.CancelTurnResponse, error) {
	was, err := s.e.CancelTurn(ids.Sandbox(req.GetSandboxId()))
	return &boxwoodv1.CancelTurnResponse{WasRunning: was}, err
}

func (s *Service) ReadFile(ctx context.Context, req *boxwoodv1.ReadFileRequest) (*boxwoodv1.ReadFileResponse, error) {
	limit := req.GetLimit()
	if limit == 0 {
		limit = maxInline
	}
	if limit < 0 || limit > maxInline || req.GetOffset() < 0 {
		return nil, fault.New(fault.Invalid, "bad_range", "an offset can't be negative, a limit is at most %d", maxInline).
			WithHint("Download takes files of any size")
	}
	content, size, mode, err := s.e.ReadFile(ctx, ids.Sandbox(req.GetSandboxId()), ids.Turn(req.GetTurnId()), req.GetPath(), req.GetOffset(), limit)
	return &boxwoodv1.ReadFileResponse{Content: content, Size: size, Mode: mode}, err
}

func (s *Service) WriteFile(ctx context.Context, req *boxwoodv1.WriteFileRequest) (*boxwoodv1.WriteFileResponse, error) {
	if len(req.GetContent()) > maxInline {
		return nil, fault.New(fault.Invalid, "content_too_large", "the content has %d bytes; WriteFile takes %d", len(req.GetContent()), maxInline).
			WithHint("Upload takes files of any size")
	}
	if req.GetMode()&^0o7777 != 0 {
		return nil, fault.New(fault.Invalid, "bad_mode", "mode %#o has more than permission bits", req.GetMode())
	}
	mode := req.GetMode()
	if mode == 0 {
		mode = 0o644
	}
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.WriteFileResponse{}, func(rec record) (*boxwoodv1.WriteFileResponse, error) {
		commit := func(tx *tree.Tx, r engine.TurnResult) error {
			return rec(tx, &boxwoodv1.WriteFileResponse{Result: resultMessage(tx, r)})
		}
		r, err := s.e.WriteFile(ctx, ids.Sandbox(req.GetSandboxId()), ids.Turn(req.GetTurnId()), req.GetPath(), req.GetContent(), mode, req.GetAppend(), commit)
		if err != nil || r == nil {
			return &boxwoodv1.WriteFileResponse{}, err
		}
		return &boxwoodv1.WriteFileResponse{Result: resultMessage(s.e.Store.View(), *r)}, nil
	})
	return got, err
}

func (s *Service) Upload(in grpc.ClientStreamingServer[boxwoodv1.UploadRequest, boxwoodv1.UploadResponse]) error {
	first, err := in.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return fault.New(fault.Invalid, "bad_upload", "the first message of an upload must be its start")
	}
	ctx := in.Context()
	got, replayed, err := once(ctx, s, start.GetIdempotencyKey(), start, &boxwoodv1.UploadResponse{}, func(rec record) (*boxwoodv1.UploadResponse, error) {
		answer := func(u engine.Unpacked) *boxwoodv1.UploadResponse {
			return &boxwoodv1.UploadResponse{Entries: u.Entries, Bytes: u.Bytes}
		}
		commit := func(tx *tree.Tx, r engine.TurnResult, u engine.Unpacked) error {
			m := answer(u)
			m.Result = resultMessage(tx, r)
			return rec(tx, m)
		}
		content := &chunkReader{next: func() ([]byte, error) {
			m, err := in.Recv()
			if err == nil && m.GetStart() != nil {
				err = fault.New(fault.Invalid, "bad_upload", "an upload has one start")
			}
			return m.GetChunk(), err
		}}
		r, u, err := s.e.Upload(ctx, ids.Sandbox(start.GetSandboxId()), ids.Turn(start.GetTurnId()), start.GetPath(), content, commit)
		if err != nil {
			return nil, err
		}
		m := answer(u)
		if r != nil {
			m.Result = resultMessage(s.e.Store.View(), *r)
		}
		return m, nil
	})
	if err != nil {
		return err
	}
	if replayed {
		drain(in)
	}
	return in.SendAndClose(got)
}

func (s *Service) Download(req *boxwoodv1.DownloadRequest, out grpc.ServerStreamingServer[boxwoodv1.DownloadResponse]) error {
	w := chunks(func(p []byte) error { return out.Send(&boxwoodv1.DownloadResponse{Chunk: p}) })
	if err := s.e.Download(out.Context(), ids.Sandbox(req.GetSandboxId()), ids.Turn(req.GetTurnId()), req.GetPath(), w); err != nil {
		return err
	}
	return w.flush()
}

// chunkReader reads the chunks of a client's stream as one; next gives io.EOF at the end.
type chunkReader struct {
	next func() ([]byte, error)
	rest []byte
}

func (r *chunkReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		var err error
		if r.rest, err = r.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// drain lets go of what a client still sends for an answer that is there already.
func drain[Req, Res any](in grpc.ClientStreamingServer[Req, Res]) {
	for {
		if _, err := in.Recv(); err != nil {
			return
		}
	}
}

// chunked gathers writes into messages of chunkSize.
type chunked struct {
	send func([]byte) error
	buf  []byte
}

var _ io.Writer = (*chunked)(nil)

func chunks(send func([]byte) error) *chunked { return &chunked{send: send} }

func (c *chunked) Write(p []byte) (int, error) {
	total := len(p)
	for len(p) > 0 {
		if c.buf == nil { // what was sent may not be touched again
			c.buf = make([]byte, 0, chunkSize)
		}
		n := min(len(p), chunkSize-len(c.buf))
		c.buf = append(c.buf, p[:n]...)
		p = p[n:]
		if len(c.buf) == chunkSize {
			if err := c.flush(); err != nil {
				return 0, err
			}
		}
	}
	return total, nil
}

func (c *chunked) flush() error {
	if len(c.buf) == 0 {
		return nil
	}
	full := c.buf
	c.buf = nil
	return c.send(full)
}
