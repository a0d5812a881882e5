// Package about carries in a context what its work is about, and puts that on every line which is logged with the context: whoever looks for
// a request, a run, a tree, a node or a sandbox finds all lines about it, whoever wrote them.
package about

import (
	"context"
	"log/slog"
	"sync"
)

// What a line may be about, by its name there.
const (
	Request = "request"
	Run     = "run"
	Tree    = "tree"
	Node    = "node"
	Sandbox = "sandbox"
)

var order = [...]string{Request, Run, Tree, Node, Sandbox}

type key struct{}

// subject may learn more while its work goes on: a call finds out which node it has made.
type subject struct {
	mu   sync.Mutex
	what [len(order)]string
}

func of(ctx context.Context) *subject {
	s, _ := ctx.Value(key{}).(*subject)
	return s
}

func (s *subject) set(name, value string) {
	for i, known := range order {
		if known == name && value != "" {
			s.what[i] = value
		}
	}
}

// With is a context whose work is about what ctx is about, and these: names and values in turn. What is empty says nothing. It learns on
// its own from then on.
func With(ctx context.Context, pairs ...string) context.Context {
	s := &subject{}
	if was := of(ctx); was != nil {
		was.mu.Lock()
		s.what = was.what
		was.mu.Unlock()
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		s.set(pairs[i], pairs[i+1])
	}
	return context.WithValue(ctx, key{}, s)
}

// Inherit is With for work that another context was the cause of.
func Inherit(ctx, cause context.Context, pairs ...string) context.Context {
	if s := of(cause); s != nil {
		ctx = context.WithValue(ctx, key{}, s)
	}
	return With(ctx, pairs...)
}

// Note adds to what the work of ctx is about, if With made it.
func Note(ctx context.Context, name, value string) {
	if s := of(ctx); s != nil {
		s.mu.Lock()
		s.set(name, value)
		s.mu.Unlock()
	}
}

// Logger puts on each line what its context is about, but for what the line says itself.
func Logger(log *slog.Logger) *slog.Logger { return slog.New(handler{log.Handler()}) }

type handler struct{ slog.Handler }

func (h handler) Handle(ctx context.Context, r slog.Record) error {
	s := of(ctx)
	if s == nil {
		return h.Handler.Handle(ctx, r)
	}
	said := map[string]bool{}
	r.Attrs(func(a slog.Attr) bool { said[a.Key] = true; return true })
	s.mu.Lock()
	what := s.what
	s.mu.Unlock()
	r = r.Clone()
	for i, value := range what {
		if value != "" && !said[order[i]] {
			r.AddAttrs(slog.String(order[i], value))
		}
	}
	return h.Handler.Handle(ctx, r)
}

func (h handler) WithAttrs(list []slog.Attr) slog.Handler { return handler{h.Handler.WithAttrs(list)} }
func (h handler) WithGroup(name string) slog.Handler      { return handler{h.Handler.WithGroup(name)} }
