// Package service is the gRPC face of the engine: it checks requests, turns
// messages into the engine's types and back, translates failures once, and
// answers repeated idempotency keys from the log. It decides nothing.
package service

import (
	"context"
	"log/slog"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/fault"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// MaxMessage bounds one message in either direction: 4 MiB of content and what
// goes around it.
const MaxMessage = 16 << 20

// DefaultDeadline of a call that brings none.
const DefaultDeadline = 15 * time.Minute

// Service implements boxwood.v1.
type Service struct {
	boxwoodv1.UnimplementedBoxwoodServer
	e       *engine.Engine
	log     *slog.Logger
	keys    inFlight
	fence   fence
	version string
	imports Imports
}

// New makes a gRPC server for an engine, for unix sockets.
func New(e *engine.Engine, version string, log *slog.Logger, imports Imports) *grpc.Server {
	s := &Service{e: e, log: log, version: version, imports: imports}
	server := grpc.NewServer(
		grpc.Creds(peerCredentials{}),
		grpc.MaxRecvMsgSize(MaxMessage), grpc.MaxSendMsgSize(MaxMessage),
		grpc.ChainUnaryInterceptor(s.unary), grpc.ChainStreamInterceptor(s.stream),
		// A trainer that vanished without a word is noticed, so that its turn is cancelled.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		// Windows of a fixed size: the estimator that would set them answers each request with a
		// ping, and over a socket of this host there is no distance to estimate.
		grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(8<<20),
		// Reuses goroutines over calls: a turn is short.
		grpc.NumStreamWorkers(8),
	)
	boxwoodv1.RegisterBoxwoodServer(server, s)
	return server
}

// Listen opens the unix socket, for root and (if named) a group only. A socket
// that a daemon still answers on is refused; a dead one is replaced.
func Listen(path, group string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fault.New(fault.Invalid, "bad_socket", "making the socket's folder: %w", err)
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return nil, fault.New(fault.Precondition, "socket_in_use", "a daemon answers on %s already", path).
			WithHint("stop it, or choose another --socket and --state")
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, fault.New(fault.Invalid, "bad_socket", "replacing the socket: %w", err)
	}
	l, err := listenMode(path, 0o600)
	if err != nil {
		return nil, fault.New(fault.Invalid, "bad_socket", "listening on %s: %w", path, err)
	}
	if group == "" {
		return l, nil
	}
	gid, err := groupID(group)
	if err == nil {
		err = os.Chown(path, 0, gid)
	}
	if err == nil {
		err = os.Chmod(path, 0o660)
	}
	if err != nil {
		_ = l.Close()
		return nil, fault.New(fault.Invalid, "bad_group", "giving the socket to group %q: %w", group, err)
	}
	return l, nil
}

func groupID(name string) (int, error) {
	if id, err := strconv.Atoi(name); err == nil {
		return id, nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(g.Gid)
}

// Shutdown lets running calls end until ctx does, then cuts them.
func Shutdown(ctx context.Context, server *grpc.Server) {
	done := make(chan struct{})
	go func() { server.GracefulStop(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		server.Stop()
		<-done
	}
}
