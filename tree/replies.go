package tree

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// The bounds of one recorded reply. The body stays on disk.
const (
	MaxReplyKey  = 128
	MaxReplyBody = 16 << 20
)

// expiredPerPut is how many old replies each new one removes: more than
// one, so that a backlog shrinks, and few, so that no call pays for it.
const expiredPerPut = 4

// PutReply records the answer to a request; Exists "key_reused" if the key was
// used for another request. A zero At is the store's clock.
func (tx *Tx) PutReply(r Reply) error {
	if r.Key == "" || len(r.Key) > MaxReplyKey {
		return invalid("an idempotency key has 1 to %d bytes, this one %d", MaxReplyKey, len(r.Key))
	}
	if len(r.Body) > MaxReplyBody {
		return invalid("the reply to %q has %d bytes, and at most %d are kept", r.Key, len(r.Body), MaxReplyBody)
	}
	if r.At.IsZero() {
		r.At = tx.now
	}
	old, ok := find[Reply](tx.reader, replies, byID, key(r.Key))
	switch {
	case ok && !tx.s.expired(old) && (old.Request != r.Request || old.Method != r.Method):
		return fault.New(fault.Exists, "key_reused", "the idempotency key %q was used for another request", r.Key).
			WithHint("a new request needs a new key")
	case !ok:
		tx.add(replies, "", 1)
	}
	tx.step()
	kept, err := decode(encode(&r, layoutReply), layoutReply)
	if err != nil {
		panic(err)
	}
	tx.insert(replies, kept)
	tx.set(rowKey(replyRows, r.Key), encode(&r, layoutFullReply))
	tx.expire(expiredPerPut)
	return nil
}

func (s *Store) expired(r *Reply) bool { return s.o.Clock().Sub(r.At) > s.o.ReplyTTL }

// expire removes up to max replies that are too old or too many.
func (tx *Tx) expire(max int) (removed int) {
	var old []*Reply
	excess := tx.count(replies, "") - tx.s.o.MaxReplies
	for r := range scan[Reply](tx.reader, replies, byAge, nil) {
		if len(old) == max || !tx.s.expired(r) && len(old) >= excess {
			break
		}
		old = append(old, r)
	}
	for _, r := range old {
		tx.step()
		remove(tx, replies, replyRows, r.Key, r)
	}
	if len(old) > 0 {
		tx.add(replies, "", -len(old))
	}
	return len(old)
}

// ExpireReplies removes the replies that are older than ReplyTTL, some at a
// time. New replies do that on their own; this is for a store without any.
func (s *Store) ExpireReplies(ctx context.Context) (removed int, err error) {
	const atOnce = 1000
	for {
		n := 0
		if _, err := s.Update(ctx, func(tx *Tx) error { n = tx.expire(atOnce); return nil }); err != nil {
			return removed, err
		}
		removed += n
		if n < atOnce {
			return removed, nil
		}
	}
}

// Payload reads the trainer's bytes by digest, from disk, and checks them.
func (s *Store) Payload(digest string) ([]byte, error) {
	b, err := s.log.get(rowKey(payloadRows, digest))
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, fault.New(fault.NotFound, "payload_not_found", "there is no payload %q", digest)
	}
	if err != nil {
		return nil, reading(err, "the payload %s", digest)
	}
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != digest {
		return nil, fault.New(fault.DataLoss, "log_damaged", "the payload %s has other bytes than were put", digest)
	}
	return b, nil
}
