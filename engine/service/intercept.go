package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/boxwood-rl/boxwood/internal/about"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// requestHeader names the id of a call; the client may choose it, the answer's
// trailer and every failure repeat it.
const requestHeader = "x-request-id"

type requestKey struct{}

func requestID(ctx context.Context) string {
	id, _ := ctx.Value(requestKey{}).(string)
	return id
}

// admit gives a call its id and its deadline.
func admit(ctx context.Context) (context.Context, context.CancelFunc, string) {
	id := ""
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		if v := md.Get(requestHeader); len(v) > 0 && len(v[0]) <= 128 {
			id = v[0]
		}
	}
	if id == "" {
		id = ulid.Make().String()
	}
	ctx = about.With(context.WithValue(ctx, requestKey{}, id), about.Request, id)
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}, id
	}
	ctx, cancel := context.WithTimeout(ctx, DefaultDeadline)
	return ctx, cancel, id
}

// knows refuses a call of somebody who has no account when its header is there: the interceptors come when all of a first
// message is.
func (s *Service) knows(ctx context.Context, call *tap.Info) (context.Context, error) {
	_, err := s.access.who(ctx)
	if err == nil {
		return ctx, nil
	}
	id := ""
	if v := call.Header.Get(requestHeader); len(v) > 0 && len(v[0]) <= 128 {
		id = v[0]
	}
	from := ""
	if p, ok := peer.FromContext(ctx); ok {
		if p.Addr != nil {
			from = p.Addr.String()
		}
		if r, ok := p.AuthInfo.(interface{ refuse() }); ok {
			r.refuse()
		}
	}
	s.log.DebugContext(ctx, "call refused", "request", id, "uid", clientOf(ctx).uid, "from", from, "method", call.FullMethodName, "reason", fault.As(err).Reason)
	return nil, toStatus(id, err)
}

func (s *Service) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (resp any, err error) {
	began := time.Now()
	ctx, cancel, id := admit(ctx)
	defer cancel()
	_ = grpc.SetTrailer(ctx, metadata.Pairs(requestHeader, id))
	defer func() { err = s.outcome(ctx, id, info.FullMethod, began, recover(), err) }()
	who, err := s.admits(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	defer who.done()
	if err := fits(req); err != nil {
		return nil, err
	}
	if err := who.request(req); err != nil {
		return nil, err
	}
	within, leave, err := s.fence.enter(ctx, info.FullMethod, s.e.Store.View)
	if err != nil {
		return nil, err
	}
	defer func() { err = leave(err) }()
	about.Note(within, about.Run, runOf(within))
	s.note(within, req)
	if resp, err = handle(context.WithValue(within, callerKey{}, who), req); err == nil {
		who.answer(resp)
	}
	return resp, err
}

// stream has a goroutine of its own for the handler, which may be in a Send that its client doesn't read, or in a Recv of what
// that doesn't write: only the end of the whole stream interrupts those. See streamWith.
func (s *Service) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	call := &streamWith{ServerStream: ss, stalled: make(chan struct{}), done: make(chan struct{})}
	ended := make(chan error, 1)
	go func() {
		defer close(call.done)
		ended <- s.streamed(srv, call, info, handle)
	}()
	select {
	case err := <-ended:
		return err
	case <-call.stalled:
		return toStatus(call.id, call.over())
	}
}

func (s *Service) streamed(srv any, call *streamWith, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	began := time.Now()
	ctx, cancel, id := admit(call.ServerStream.Context())
	defer cancel()
	call.SetTrailer(metadata.Pairs(requestHeader, id))
	defer func() { err = s.outcome(ctx, id, info.FullMethod, began, recover(), err) }()
	who, err := s.admits(ctx, info.FullMethod)
	if err != nil {
		return err
	}
	defer who.done()
	within, leave, err := s.fence.enter(ctx, info.FullMethod, s.e.Store.View)
	if err != nil {
		return err
	}
	defer func() { err = leave(err) }()
	about.Note(within, about.Run, runOf(within))
	call.id, call.who, call.note, call.ctx = id, who, s.note, context.WithValue(within, callerKey{}, who)
	defer context.AfterFunc(call.ctx, call.lastWords)()
	return handle(srv, call)
}

// streamWith is a stream whose call has an end of its own, a deadline or another attempt of its run, of which
// grpc doesn't know. A client that lives, but neither reads nor writes, must not hold up its handler beyond that, as others
// wait for the handler: when the call has ended, all Sends and Recvs together wait for no more than patience.
type streamWith struct {
	grpc.ServerStream
	ctx  context.Context
	who  *caller
	id   string
	note func(context.Context, any)

	waiting atomic.Int32  // Sends and Recvs
	cut     atomic.Bool   // no more of them
	stalled chan struct{} // closed when it is cut during one
	done    chan struct{} // closed when the handler has ended
}

// lastWords begins when the call has ended.
func (s *streamWith) lastWords() {
	const step = 50 * time.Millisecond
	tick := time.NewTicker(step)
	defer tick.Stop()
	for waited := time.Duration(0); waited < patience; {
		select {
		case <-s.done:
			return
		case <-tick.C:
		}
		if s.waiting.Load() > 0 {
			waited += step
		}
	}
	s.cut.Store(true)
	if s.waiting.Load() > 0 {
		close(s.stalled)
	}
}

// over is why.
func (s *streamWith) over() error {
	err := context.Cause(s.ctx)
	if f := (&fault.Error{}); errors.As(err, &f) {
		return f
	}
	return fmt.Errorf("the call has ended, and its client is slow: %w", err)
}

func (s *streamWith) RecvMsg(m any) error {
	s.waiting.Add(1)
	defer s.waiting.Add(-1)
	if s.cut.Load() {
		return s.over()
	}
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	if err := fits(m); err != nil {
		return err
	}
	if err := s.who.request(m); err != nil {
		return err
	}
	s.note(s.ctx, m)
	return nil
}

// note has the log say on each line of a call what its request names, if that is there and the only one of its kind. Which node a
// turn has made, the engine adds.
func (s *Service) note(ctx context.Context, m any) {
	say := func(id string, kind string) {
		if t := s.e.TreeOf(id); id != "" && t != nil {
			about.Note(ctx, about.Tree, string(t.ID))
			about.Note(ctx, kind, id)
		}
	}
	if r, ok := m.(interface{ GetTreeId() string }); ok {
		say(r.GetTreeId(), about.Tree)
	}
	if r, ok := m.(interface{ GetNodeId() string }); ok {
		say(r.GetNodeId(), about.Node)
	}
	if r, ok := m.(interface{ GetNodeIds() []string }); ok && len(r.GetNodeIds()) == 1 {
		say(r.GetNodeIds()[0], about.Node)
	}
	if r, ok := m.(interface{ GetTurnId() string }); ok {
		say(s.e.SandboxOf(ids.Turn(r.GetTurnId())), about.Sandbox)
	}
	if r, ok := m.(interface{ GetSandboxId() string }); ok {
		say(r.GetSandboxId(), about.Sandbox)
	}
	if r, ok := m.(interface{ GetSandboxIds() []string }); ok && len(r.GetSandboxIds()) == 1 {
		say(r.GetSandboxIds()[0], about.Sandbox)
	}
	switch r := m.(type) {
	case *boxwoodv1.ForkRequest:
		if len(r.GetWants()) == 1 {
			s.note(ctx, r.GetWants()[0])
		}
	case *boxwoodv1.UploadRequest:
		if r.GetStart() != nil {
			s.note(ctx, r.GetStart())
		}
	}
}

func (s *streamWith) SendMsg(m any) error {
	s.waiting.Add(1)
	defer s.waiting.Add(-1)
	if s.cut.Load() {
		return s.over()
	}
	s.who.answer(m)
	return s.ServerStream.SendMsg(m)
}

func (s *streamWith) Context() context.Context { return s.ctx }

// outcome translates a failure, once, and logs who has called.
func (s *Service) outcome(ctx context.Context, id, method string, began time.Time, panicked any, err error) error {
	who := clientOf(ctx)
	if a, err := s.access.who(ctx); err == nil && a != nil {
		who.name = a.Name
	}
	if panicked != nil {
		s.log.ErrorContext(ctx, "a call panicked", "request", id, "uid", who.uid, "pid", who.pid, "client", who.name, "method", method, "panic", panicked, "stack", string(debug.Stack()))
		err = fault.New(fault.Internal, "panic", "a defect in the daemon ended this call").
			WithHint("the daemon's log has the details under request %s", id)
	}
	if err == nil {
		s.log.DebugContext(ctx, "call", "request", id, "uid", who.uid, "pid", who.pid, "client", who.name, "method", method, "took", time.Since(began))
		return nil
	}
	f := fault.As(err)
	level := slog.LevelDebug
	switch {
	case status.Code(err) == codes.Unimplemented: // a call of Arrow Flight that there isn't here
		f = fault.New(fault.Unsupported, "no_such_call", "%w", err)
	case f.Origin() == fault.Infrastructure && f.Kind != fault.Exhausted:
		level = slog.LevelWarn
	}
	s.log.Log(ctx, level, "call failed", "request", id, "uid", who.uid, "pid", who.pid, "client", who.name, "method", method, "took", time.Since(began), "reason", f.Reason, "error", short(err.Error()))
	return toStatus(id, err)
}

var codeOf = map[fault.Kind]codes.Code{
	fault.Internal: codes.Internal, fault.Invalid: codes.InvalidArgument, fault.NotFound: codes.NotFound,
	fault.Exists: codes.AlreadyExists, fault.Precondition: codes.FailedPrecondition, fault.Busy: codes.Aborted,
	fault.Exhausted: codes.ResourceExhausted, fault.Unavailable: codes.Unavailable, fault.Deadline: codes.DeadlineExceeded,
	fault.Cancelled: codes.Canceled, fault.DataLoss: codes.DataLoss, fault.Unsupported: codes.Unimplemented,
	fault.Denied: codes.PermissionDenied,
}

// toStatus is the one place where a failure becomes a gRPC status.
func toStatus(id string, err error) error {
	if st, ok := status.FromError(err); ok && st.Code() != codes.Unknown {
		return err // grpc's own, e.g. of a stream that broke
	}
	f, code := classify(err)
	st, derr := status.New(code, short(f.Message)).WithDetails(errorDetail(id, f))
	if derr != nil {
		return status.Error(code, short(f.Message))
	}
	return st.Err()
}

func classify(err error) (*fault.Error, codes.Code) {
	f := fault.As(err)
	if f.Reason == "internal" {
		switch {
		case errorsIs(err, context.DeadlineExceeded):
			f = fault.New(fault.Deadline, "deadline", "%s", f.Message)
		case errorsIs(err, context.Canceled):
			f = fault.New(fault.Cancelled, "cancelled", "%s", f.Message)
		}
	}
	return f, codeOf[f.Kind]
}

func errorDetail(id string, f *fault.Error) *boxwoodv1.Error {
	origin := boxwoodv1.Error_ORIGIN_INFRASTRUCTURE
	switch f.Origin() {
	case fault.Client:
		origin = boxwoodv1.Error_ORIGIN_CLIENT
	case fault.Agent:
		origin = boxwoodv1.Error_ORIGIN_AGENT
	}
	return &boxwoodv1.Error{
		Reason: f.Reason, Origin: origin, Retryable: f.Retryable(), Hint: short(f.Hint), RequestId: id, RetryAfterNs: int64(f.RetryAfter),
		NearestNodeId: f.Nearest, NearestTurns: int32(f.Turns),
	}
}
