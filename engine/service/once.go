package service

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/internal/fault"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

func errorsIs(err, target error) bool { return errors.Is(err, target) }

// inFlight makes a repeated key wait for the call that has it.
type inFlight struct {
	mu   sync.Mutex
	keys map[string]chan struct{}
}

func (f *inFlight) enter(ctx context.Context, key string) (leave func(), err error) {
	for {
		f.mu.Lock()
		if f.keys == nil {
			f.keys = map[string]chan struct{}{}
		}
		busy := f.keys[key]
		if busy == nil {
			mine := make(chan struct{})
			f.keys[key] = mine
			f.mu.Unlock()
			return func() {
				f.mu.Lock()
				delete(f.keys, key)
				f.mu.Unlock()
				close(mine)
			}, nil
		}
		f.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for the call that has idempotency key %q: %w", key, ctx.Err())
		}
	}
}

// record stores the answer of a keyed call inside the transaction that makes it
// true. Without a key it does nothing.
type record func(tx *tree.Tx, answer proto.Message) error

// withoutSecrets is a request as its key remembers it: a digest of a secret could be guessed at.
func withoutSecrets(req proto.Message) proto.Message {
	type secretive interface{ GetSecretEnv() map[string]string }
	find := func(m proto.Message) secretive {
		switch m := m.(type) {
		case *boxwoodv1.RunTurnRequest:
			return m.GetCommand()
		case *boxwoodv1.EvaluateRequest:
			return m.GetGrader().GetCommand()
		case secretive:
			return m
		}
		return nil
	}
	if s := find(req); s == nil || len(s.GetSecretEnv()) == 0 {
		return req
	}
	req = proto.Clone(req)
	env := find(req).GetSecretEnv()
	for name := range env {
		env[name] = ""
	}
	return req
}

// once runs do, or gives the recorded answer if the request's key was used
// before. do calls record in the transaction of its effect; if it never does
// and succeeds, once records the answer in a transaction of its own.
func once[T proto.Message](ctx context.Context, s *Service, key string, req proto.Message, answer T, do func(record) (T, error)) (T, bool, error) {
	var none T
	if key == "" {
		got, err := do(func(*tree.Tx, proto.Message) error { return nil })
		return got, false, err
	}
	if len(key) > 128 {
		return none, false, fault.New(fault.Invalid, "bad_key", "an idempotency key has at most 128 bytes, not %d", len(key))
	}
	key = callerOf(ctx).key(key)
	leave, err := s.keys.enter(ctx, key)
	if err != nil {
		return none, false, err
	}
	defer leave()
	plain, err := proto.MarshalOptions{Deterministic: true}.Marshal(withoutSecrets(req))
	if err != nil {
		return none, false, err
	}
	sum := sha256.Sum256(plain)
	digest, method := hex.EncodeToString(sum[:]), string(req.ProtoReflect().Descriptor().Name())
	known, err := s.e.Store.View().Reply(key)
	if err == nil {
		if known.Method != method || known.Request != digest {
			return none, false, fault.New(fault.Exists, "key_reused", "idempotency key %q was used for another request", key).
				WithHint("use a fresh key for each new request")
		}
		return answer, true, proto.Unmarshal(known.Body, answer)
	}
	if !fault.Is(err, fault.NotFound) {
		return none, false, err
	}
	recorded := false
	put := func(tx *tree.Tx, m proto.Message) error {
		body, err := proto.Marshal(m)
		if err != nil {
			return err
		}
		recorded = true
		return tx.PutReply(tree.Reply{Key: key, Method: method, Request: digest, Body: body, At: tx.Now()})
	}
	got, err := do(put)
	if err != nil || recorded {
		return got, false, err
	}
	_, err = s.e.Store.Update(context.WithoutCancel(ctx), func(tx *tree.Tx) error { return put(tx, got) })
	return got, false, err
}
