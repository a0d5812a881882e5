package service

import (
	"context"
	"math"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

func sessionMessage(s engine.Session) *boxwoodv1.Session {
	return &boxwoodv1.Session{Name: s.Name, Kind: boxwoodv1.SessionKind_SESSION_KIND_BASH, Tty: s.TTY, Pid: int32(s.PID)}
}

func (s *Service) OpenSession(ctx context.Context, req *boxwoodv1.OpenSessionRequest) (*boxwoodv1.OpenSessionResponse, error) {
	if k := req.GetKind(); k != boxwoodv1.SessionKind_SESSION_KIND_UNSPECIFIED && k != boxwoodv1.SessionKind_SESSION_KIND_BASH {
		return nil, fault.New(fault.Invalid, "bad_session", "there are no sessions of kind %d; bash is kind 1", k)
	}
	if req.GetRows() < 0 || req.GetRows() > math.MaxUint16 || req.GetCols() < 0 || req.GetCols() > math.MaxUint16 {
		return nil, fault.New(fault.Invalid, "bad_session", "a terminal has up to %d rows and columns", math.MaxUint16)
	}
	n := engine.NewSession{
		Name: req.GetName(), TTY: req.GetTty(), Rows: uint16(req.GetRows()), Cols: uint16(req.GetCols()),
		Cwd: req.GetCwd(), User: req.GetUser(), Env: req.GetEnv(), Secrets: req.GetSecretEnv(),
	}
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.OpenSessionResponse{}, func(rec record) (*boxwoodv1.OpenSessionResponse, error) {
		commit := func(tx *tree.Tx, made engine.Session, r engine.TurnResult) error {
			return rec(tx, &boxwoodv1.OpenSessionResponse{Session: sessionMessage(made), Result: resultMessage(tx, r)})
		}
		made, r, err := s.e.OpenSession(ctx, ids.Sandbox(req.GetSandboxId()), ids.Turn(req.GetTurnId()), n, commit)
		if err != nil {
			return nil, err
		}
		m := &boxwoodv1.OpenSessionResponse{Session: sessionMessage(made)}
		if r != nil {
			m.Result = resultMessage(s.e.Store.View(), *r)
		}
		return m, nil
	})
	return got, err
}

func (s *Service) CloseSession(ctx context.Context, req *boxwoodv1.CloseSessionRequest) (*boxwoodv1.CloseSessionResponse, error) {
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.CloseSessionResponse{}, func(rec record) (*boxwoodv1.CloseSessionResponse, error) {
		commit := func(tx *tree.Tx, r engine.TurnResult) error {
			return rec(tx, &boxwoodv1.CloseSessionResponse{Result: resultMessage(tx, r)})
		}
		r, err := s.e.CloseSession(ctx, ids.Sandbox(req.GetSandboxId()), ids.Turn(req.GetTurnId()), req.GetName(), commit)
		if err != nil || r == nil {
			return &boxwoodv1.CloseSessionResponse{}, err
		}
		return &boxwoodv1.CloseSessionResponse{Result: resultMessage(s.e.Store.View(), *r)}, nil
	})
	return got, err
}

func (s *Service) ListSessions(_ context.Context, req *boxwoodv1.ListSessionsRequest) (*boxwoodv1.ListSessionsResponse, error) {
	list, err := s.e.Sessions(ids.Sandbox(req.GetSandboxId()))
	if err != nil {
		return nil, err
	}
	m := &boxwoodv1.ListSessionsResponse{}
	for _, one := range list {
		m.Sessions = append(m.Sessions, sessionMessage(one))
	}
	return m, nil
}

func (s *Service) Interrupt(_ context.Context, req *boxwoodv1.InterruptRequest) (*boxwoodv1.InterruptResponse, error) {
	was, err := s.e.Interrupt(ids.Sandbox(req.GetSandboxId()), req.GetSession())
	return &boxwoodv1.InterruptResponse{WasRunning: was}, err
}

func (s *Service) Type(_ context.Context, req *boxwoodv1.TypeRequest) (*boxwoodv1.TypeResponse, error) {
	if len(req.GetKeys()) > maxKeys {
		return nil, fault.New(fault.Invalid, "keys_too_many", "%d bytes of keys at once; a terminal takes %d", len(req.GetKeys()), maxKeys)
	}
	rows, cols := req.GetRows(), req.GetCols()
	if rows < 0 || rows > math.MaxUint16 || cols < 0 || cols > math.MaxUint16 || (rows == 0) != (cols == 0) {
		return nil, fault.New(fault.Invalid, "bad_size", "a terminal has 1 to %d rows and columns", math.MaxUint16)
	}
	was, err := s.e.Type(ids.Sandbox(req.GetSandboxId()), req.GetSession(), req.GetKeys(), uint16(rows), uint16(cols))
	return &boxwoodv1.TypeResponse{WasRunning: was}, err
}

// maxKeys is what a terminal holds that nobody reads.
const maxKeys = 4096
