package service

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/engine"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// oneRequest is a stream that brings one message.
type oneRequest struct {
	grpc.ServerStream
	ctx  context.Context
	body []byte
	sent bool
}

func (s *oneRequest) Context() context.Context     { return s.ctx }
func (s *oneRequest) SetTrailer(metadata.MD)       {}
func (s *oneRequest) SetHeader(metadata.MD) error  { return nil }
func (s *oneRequest) SendHeader(metadata.MD) error { return nil }
func (s *oneRequest) SendMsg(any) error            { return nil }
func (s *oneRequest) RecvMsg(m any) error {
	if s.sent {
		return io.EOF
	}
	s.sent = true
	return proto.Unmarshal(s.body, m.(proto.Message))
}

// Any request to any call, of a daemon that has nothing: it is answered or refused, and never a defect. Calls
// that would read the host are left out: what they read has targets of its own.
func FuzzRequests(f *testing.F) {
	desc := &boxwoodv1.Boxwood_ServiceDesc
	calls := len(desc.Methods) + len(desc.Streams)
	for i := range calls {
		f.Add(uint8(i), []byte{})
	}
	node, _ := proto.Marshal(&boxwoodv1.GetNodeRequest{NodeId: "nd_01j9z3k4m5n6p7q8r9s0t1v2w3"})
	turn, _ := proto.Marshal(&boxwoodv1.RunTurnRequest{SandboxId: "sb_01j9z3k4m5n6p7q8r9s0t1v2w3", IdempotencyKey: "k",
		Command: &boxwoodv1.Command{Argv: [][]byte{[]byte("a\x00b")}, DeadlineNs: -1, SecretEnv: map[string]string{"A": "b"}}})
	create, _ := proto.Marshal(&boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_NodeId{NodeId: "nd_"}, Labels: map[string]string{"a": "b"},
		Defaults: &boxwoodv1.Defaults{AllowCalls: []string{"io_uring", "x"}, LeaseNs: -1}})
	for i := range calls {
		for _, body := range [][]byte{node, turn, create} {
			f.Add(uint8(i), body)
		}
	}
	store, err := tree.Open("state", tree.Options{FS: vfs.NewMem()})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { store.Close() })
	e := &engine.Engine{Parts: engine.Parts{Store: store}}
	services := []*Service{
		New(e, slog.New(slog.DiscardHandler), Options{}),
		New(e, slog.New(slog.DiscardHandler), Options{Access: &Access{usages: map[*Account]*usage{}}}),
	}
	account := &Account{Name: "fuzz", Images: []string{"mini*"}, MaxSandboxes: 1}
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		i := int(which) % calls
		for n, s := range services {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			var err error
			name := ""
			held := func(req any) error {
				if n == 0 {
					return nil
				}
				c := &caller{Account: account, s: s, method: name}
				defer c.done()
				return c.request(req)
			}
			if i < len(desc.Methods) {
				m := desc.Methods[i]
				name = m.MethodName
				if reachesTheHost[name] {
					cancel()
					continue
				}
				_, err = m.Handler(s, ctx, func(req any) error { return proto.Unmarshal(body, req.(proto.Message)) },
					func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (resp any, err error) {
						defer func() { err = s.outcome(ctx, "fuzz", name, time.Now(), recover(), err) }()
						if err := held(req); err != nil {
							return nil, err
						}
						return handle(ctx, req)
					})
			} else {
				m := desc.Streams[i-len(desc.Methods)]
				name = m.StreamName
				if reachesTheHost[name] {
					cancel()
					continue
				}
				err = func() (err error) {
					defer func() { err = s.outcome(ctx, "fuzz", name, time.Now(), recover(), err) }()
					return m.Handler(s, &oneRequest{ctx: ctx, body: body})
				}()
			}
			cancel()
			if reason(err) == "panic" {
				t.Fatalf("%s with %x: a defect ended the call", name, body)
			}
		}
	})
}

// reachesTheHost names the calls that need a pool, an inspector or a host to say anything.
var reachesTheHost = map[string]bool{"GetInfo": true, "ImportImage": true, "RemoveImage": true, "ImportTree": true, "ListTables": true, "ExportStats": true, "WatchTree": true}
