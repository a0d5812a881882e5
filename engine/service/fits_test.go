package service

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// A list of a request has a bound, or one call holds all others up; what a failure says has one, or the client never hears it.
func TestRequestsAreBounded(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	conn, err := grpc.NewClient("unix:"+filepath.Join(d.dir, "sock"), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithMaxHeaderListSize(8<<10)) // as grpc's clients in C have it
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := boxwoodv1.NewBoxwoodClient(conn)
	annotate := func(n int) error {
		req := &boxwoodv1.AnnotateRequest{Annotations: slices.Repeat([]*boxwoodv1.NodeAnnotation{{NodeId: root.GetId()}}, n)}
		_, err := client.Annotate(ctx(t), req)
		return err
	}
	wait := func(n int) error {
		_, err := client.WaitCaptured(ctx(t), &boxwoodv1.WaitCapturedRequest{NodeIds: slices.Repeat([]string{root.GetId()}, n)})
		return err
	}
	release := func(id string) func(n int) error {
		return func(n int) error {
			_, err := client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: slices.Repeat([]string{id}, n)})
			return err
		}
	}
	for name, call := range map[string]struct {
		do   func(n int) error
		most string // the reason of maxListed
	}{
		"annotate": {annotate, ""}, "wait": {wait, ""}, "release": {release("sb_01j9z3k4m5n6p7q8r9s0t1v2w3"), ""},
		"failures": {release("\x1b\n" + strings.Repeat("\x01", 300)), "bad_id"},
		"fork": {func(n int) error {
			want := &boxwoodv1.ForkRequest_Want{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: root.GetId()}, Count: 1}
			stream, err := client.Fork(ctx(t), &boxwoodv1.ForkRequest{Wants: slices.Repeat([]*boxwoodv1.ForkRequest_Want{want}, n)})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}, "bad_count"},
		"in a message of it": {func(n int) error {
			_, err := client.Evaluate(ctx(t), &boxwoodv1.EvaluateRequest{NodeId: "nd_x", Grader: &boxwoodv1.Grader{Paths: slices.Repeat([]string{"/x"}, n)}})
			return err
		}, "bad_grader"},
	} {
		if err := call.do(maxListed); reason(err) != call.most {
			t.Errorf("%s of %d: %v", name, maxListed, err)
		} else if len(status.Convert(err).Message()) > maxMessage+10 {
			t.Errorf("%s: the failure has %d bytes", name, len(status.Convert(err).Message()))
		}
		if err := call.do(maxListed + 1); reason(err) != "too_many" {
			t.Errorf("%s of %d: %v", name, maxListed+1, err)
		}
	}
	d.ok(t, sb.GetId(), "true")
}
