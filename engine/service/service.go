// Package service is the gRPC face of the engine: it checks requests, turns
// messages into the engine's types and back, translates failures once, and
// answers repeated idempotency keys from the log. It decides nothing.
package service

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"math"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"time"

	"github.com/apache/arrow/go/v17/arrow/flight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/about"
	"github.com/boxwood-rl/boxwood/internal/fault"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// MaxMessage bounds one message in either direction: 4 MiB of content and what
// goes around it.
const MaxMessage = 16 << 20

// What a stranger may take of the daemon: connections on TCP, how long each may take to say who it is and to say nothing, and
// the metadata of a call.
const (
	maxConnections = 2048
	handshakeLimit = 20 * time.Second
	idleConnection = 10 * time.Minute
	maxHeader      = 64 << 10
)

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
	access  *Access
}

// Options of a service.
type Options struct {
	Version string
	Imports Imports
	Access  *Access // nil: who can connect to the unix socket may do all, and nobody may do anything over TCP
}

// New makes the service of an engine.
func New(e *engine.Engine, log *slog.Logger, o Options) *Service {
	return &Service{e: e, log: about.Logger(e.Veiled(log)), version: o.Version, imports: o.Imports, access: o.Access}
}

// Server makes a gRPC server for unix sockets or, with a TLS configuration, for TCP. A service may have several.
func (s *Service) Server(over *tls.Config) *grpc.Server {
	creds, alive := credentials.TransportCredentials(peerCredentials{}), keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}
	if over != nil {
		creds, alive.MaxConnectionIdle = tlsCredentials{credentials.NewTLS(over)}, idleConnection
	}
	server := grpc.NewServer(
		grpc.Creds(creds),
		// Who has no account is told so before anything of what he says is kept.
		grpc.InTapHandle(s.knows), grpc.MaxHeaderListSize(maxHeader), grpc.ConnectionTimeout(handshakeLimit),
		grpc.MaxRecvMsgSize(MaxMessage), grpc.MaxSendMsgSize(MaxMessage),
		grpc.ChainUnaryInterceptor(s.unary), grpc.ChainStreamInterceptor(s.stream),
		// A trainer that vanished without a word is noticed, so that its turn is cancelled.
		grpc.KeepaliveParams(alive),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		// Windows of a fixed size: the estimator that would set them answers each request with a
		// ping, and over a socket of this host there is no distance to estimate.
		grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(8<<20),
		// Reuses goroutines over calls: a turn is short.
		grpc.NumStreamWorkers(8),
	)
	boxwoodv1.RegisterBoxwoodServer(server, s)
	flight.RegisterFlightServiceServer(server, &flights{s: s})
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
	gid, err := GroupID(group)
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

// GroupID finds a group by its name or number.
func GroupID(name string) (int, error) {
	bad := fault.New(fault.Invalid, "bad_group", "there is no group %.200q for the socket", name).WithHint("name one of /etc/group, or a number")
	if id, err := strconv.Atoi(name); err == nil {
		if id < 0 || id >= math.MaxUint32 { // which chown would leave the group as it is for
			return 0, bad
		}
		return id, nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, bad
	}
	return strconv.Atoi(g.Gid)
}

// TLS is what a server on TCP shows of itself, and whose certificates it takes: those that the authority of clientCA
// has signed, if there is one. Who shows none needs a token.
func TLS(cert, key, clientCA string) (*tls.Config, error) {
	own, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fault.New(fault.Invalid, "bad_certificate", "reading the daemon's certificate and key: %w", err)
	}
	c := &tls.Config{Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS13}
	if clientCA == "" {
		return c, nil
	}
	text, err := os.ReadFile(clientCA)
	if err != nil {
		return nil, fault.New(fault.Invalid, "bad_certificate", "reading the authority of clients: %w", err)
	}
	c.ClientCAs, c.ClientAuth = x509.NewCertPool(), tls.VerifyClientCertIfGiven
	if !c.ClientCAs.AppendCertsFromPEM(text) {
		return nil, fault.New(fault.Invalid, "bad_certificate", "%s has no certificate in it", clientCA)
	}
	return c, nil
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
