package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// retryAfter is the delay that a refusal mentions.
func retryAfter(err error) time.Duration {
	for _, d := range status.Convert(err).Details() {
		if e, ok := d.(*boxwoodv1.Error); ok {
			return time.Duration(e.GetRetryAfterNs())
		}
	}
	return 0
}

func childrenOf(node string, n int32) *boxwoodv1.ForkRequest {
	return &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node}, Count: n}}}
}

// all children of a call, or what it ended with.
func forkAll(ctx context.Context, client boxwoodv1.BoxwoodClient, req *boxwoodv1.ForkRequest) (list []*boxwoodv1.Sandbox, err error) {
	stream, err := client.Fork(ctx, req)
	if err != nil {
		return nil, err
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		if m.GetSandbox() == nil {
			return list, fmt.Errorf("child %d: %s", m.GetChild(), m.GetMessage())
		}
		list = append(list, m.GetSandbox())
	}
}

// Clients that flood with forks are bounded, told when to come again, served when they do, and cleaned up after
// when they go away: nothing of it stays.
func TestFloodsOfForks(t *testing.T) {
	const queue, most = 16, 48
	t.Setenv(forkBounds, fmt.Sprint(queue, " ", most))
	d := startDaemon(t, "")
	d.importRoot(t)
	root, _ := d.newTree(t)
	alone := func() bool { return len(d.sandboxes(t, root.GetTreeId())) == 1 }
	idle := func() bool {
		q := d.queues(t)
		return q["boxes fork"].GetWaiting()+q["boxes fork"].GetRunning()+q["clones fork"].GetWaiting()+q["clones fork"].GetRunning() == 0
	}

	million := childrenOf(root.GetId(), 1000)
	for len(million.Wants) < 1000 {
		million.Wants = append(million.Wants, million.Wants[0])
	}
	for name, req := range map[string]*boxwoodv1.ForkRequest{"of one node": childrenOf(root.GetId(), 1e6), "in a thousand wants": million} {
		if _, err := forkAll(ctx(t), d.client, req); status.Code(err) != codes.InvalidArgument || reason(err) != "bad_count" || retryAfter(err) != 0 {
			t.Errorf("a million children %s: %v", name, err)
		}
	}

	// More clients than the queue has room for: all are served who come again when they were told to.
	var refused, served atomic.Int64
	var clients sync.WaitGroup
	longest := ctx(t)
	for range 12 {
		clients.Go(func() {
			for rounds := 0; rounds < 2; {
				list, err := forkAll(longest, d.client, childrenOf(root.GetId(), 3))
				after := retryAfter(err)
				switch {
				case err == nil:
					rounds++
					served.Add(int64(len(list)))
					var ids []string
					for _, s := range list {
						ids = append(ids, s.GetId())
					}
					if _, err := d.client.Release(longest, &boxwoodv1.ReleaseRequest{SandboxIds: ids}); err != nil {
						t.Error(err)
						return
					}
				case status.Code(err) != codes.ResourceExhausted || reason(err) != "queue_full" || after <= 0 || after > 10*time.Second:
					t.Errorf("a refusal: %v, to come again after %s", err, after)
					return
				default:
					refused.Add(1)
					select {
					case <-time.After(after):
					case <-longest.Done():
						t.Error("never served")
						return
					}
				}
			}
		})
	}
	clients.Wait()
	t.Logf("%d children were served, %d calls refused", served.Load(), refused.Load())
	if served.Load() != 12*2*3 || refused.Load() == 0 {
		t.Errorf("%d children were served, %d calls refused", served.Load(), refused.Load())
	}
	if got := d.queues(t)["boxes fork"].GetRefused(); got != 3*refused.Load() {
		t.Errorf("the scheduler counts %d children as refused, and %d calls for 3 were", got, refused.Load())
	}

	// Who goes away in the middle, by a word or without one, leaves nothing.
	conn, err := grpc.NewClient("unix://"+filepath.Join(d.dir, "sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	going, cancel := context.WithCancel(ctx(t))
	for _, who := range []struct {
		name   string
		ctx    context.Context
		client boxwoodv1.BoxwoodClient
		leave  func()
	}{{"cancels", going, d.client, cancel}, {"disconnects", ctx(t), boxwoodv1.NewBoxwoodClient(conn), func() { _ = conn.Close() }}} {
		req := childrenOf(root.GetId(), most-8)
		req.LeaseNs = int64(2 * time.Second) // should it have got them all before it went
		until(t, "there is room for all of them", func() bool { return alone() && idle() })
		stream, err := who.client.Fork(who.ctx, req)
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			t.Fatalf("who %s: %v", who.name, err)
		}
		who.leave()
		until(t, "nothing is left of who "+who.name, func() bool { return alone() && idle() })
	}

	// The limit on sandboxes: when some are released, there is room by the time that was told.
	held := d.fork(t, root.GetId(), most-8)
	_, err = forkAll(ctx(t), d.client, childrenOf(root.GetId(), 12))
	if after := retryAfter(err); status.Code(err) != codes.ResourceExhausted || reason(err) != "too_many_sandboxes" || after <= 0 || after > 40*time.Minute {
		t.Errorf("past the limit on sandboxes: %v, to come again after %s", err, after)
	}
	if _, err = forkAll(ctx(t), d.client, childrenOf(root.GetId(), most+1)); status.Code(err) != codes.InvalidArgument || retryAfter(err) != 0 {
		t.Errorf("what can never be: %v, to come again after %s", err, retryAfter(err))
	}
	free(t, d, held...)
	free(t, d, d.fork(t, root.GetId(), most-8)...) // and no place in the queue was lost
	until(t, "nothing is left", func() bool { return alone() && idle() })
}
