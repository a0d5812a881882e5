package engine

import (
	"crypto/sha256"
	"hash"
)

// headTail keeps the first and the last half of a stream that may be endless.
// Memory is bounded by limit whatever is written.
type headTail struct {
	limit int
	head  []byte
	tail  []byte // a ring once it is full
	at    int    // where the ring's oldest byte lies
	total int64
	all   hash.Hash // of the whole stream, once kept isn't
}

func newHeadTail(limit int) *headTail { return &headTail{limit: limit} }

func (h *headTail) Write(p []byte) {
	if h.total+int64(len(p)) > int64(h.limit) && h.all == nil {
		h.all = sha256.New()
		h.all.Write(h.head)
		h.all.Write(h.tail) // in order: it hasn't come round yet
	}
	if h.all != nil {
		h.all.Write(p)
	}
	h.total += int64(len(p))
	if room := h.limit/2 - len(h.head); room > 0 {
		n := min(room, len(p))
		h.head = append(h.head, p[:n]...)
		p = p[n:]
	}
	size := h.limit - h.limit/2
	if len(p) >= size {
		h.tail = append(h.tail[:0], p[len(p)-size:]...)
		h.at = 0
		return
	}
	if room := size - len(h.tail); room > 0 {
		n := min(room, len(p))
		h.tail = append(h.tail, p[:n]...)
		p = p[n:]
	}
	for len(p) > 0 {
		n := copy(h.tail[h.at:], p)
		h.at = (h.at + n) % size
		p = p[n:]
	}
}

// kept returns what is left of the stream, how many bytes were cut out of it,
// and where in kept the cut lies.
func (h *headTail) kept() (kept []byte, omitted, cutAt int64) {
	kept = make([]byte, 0, len(h.head)+len(h.tail))
	kept = append(kept, h.head...)
	kept = append(kept, h.tail[h.at:]...)
	kept = append(kept, h.tail[:h.at]...)
	return kept, h.total - int64(len(kept)), int64(len(h.head))
}

// digest is the sha256 of a stream that kept has not all of; else nil.
func (h *headTail) digest() []byte {
	if h.all == nil {
		return nil
	}
	return h.all.Sum(nil)
}
