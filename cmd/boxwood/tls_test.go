package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// A token goes over TLS, to a daemon whose certificate the named authority has signed, and to nobody else.
func TestTokenGoesOverTLS(t *testing.T) {
	const folder = "../../python-client/tests/tls/"
	own, err := tls.LoadX509KeyPair(folder+"daemon.crt", folder+"daemon.key")
	if err != nil {
		t.Fatal(err)
	}
	shown := make(chan string, 10)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS13})),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			md, _ := metadata.FromIncomingContext(ctx)
			shown <- strings.Join(md.Get("authorization"), " ")
			return handle(ctx, req)
		}))
	pb.RegisterBoxwoodServer(server, newCLI(t).fake)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(l)
	t.Cleanup(server.Stop)
	run := func(env map[string]string) (string, int) {
		var o, e bytes.Buffer
		a := &app{in: strings.NewReader(""), out: &o, err: &e, getenv: func(name string) string { return env[name] }}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		status := execute(ctx, []string{"image", "list", "--address", l.Addr().String()}, a)
		return e.String() + o.String(), status
	}
	if out, status := run(map[string]string{"BOXWOOD_TOKEN": "secret", "BOXWOOD_CA": folder + "daemon.crt"}); status != 0 {
		t.Fatalf("status %d: %s", status, out)
	}
	if got := <-shown; got != "Bearer secret" {
		t.Errorf("the daemon was shown %q", got)
	}
	if _, status := run(map[string]string{"BOXWOOD_TOKEN": "secret"}); status == 0 {
		t.Error("a certificate that nobody vouches for is taken")
	}
	if _, status := run(map[string]string{"BOXWOOD_TOKEN": "secret", "BOXWOOD_CA": folder + "nowhere"}); status == 0 {
		t.Error("an authority that isn't there is taken")
	}
	if len(shown) > 0 {
		t.Errorf("a stranger was shown %q", <-shown)
	}
}
