package about

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
)

func TestLinesSayWhatTheyAreAbout(t *testing.T) {
	var out bytes.Buffer
	log := Logger(slog.New(slog.NewTextHandler(&out, nil)))
	said := func(ctx context.Context, args ...any) string {
		out.Reset()
		log.InfoContext(ctx, "m", args...)
		_, line, _ := strings.Cut(strings.TrimSpace(out.String()), "msg=m")
		return strings.TrimSpace(line)
	}
	plain := context.Background()
	Note(plain, Node, "nd_lost") // nobody asked
	call := With(plain, Request, "rq", Run, "")
	Note(call, Node, "nd_1")
	Note(call, "other", "x")
	job := Inherit(plain, call, Sandbox, "sb_1")
	Note(call, Node, "nd_2")
	for _, c := range []struct {
		name, got, want string
	}{
		{"nothing is known", said(plain), ""},
		{"a call", said(call), "request=rq node=nd_2"},
		{"a job of the call, which has learnt more since", said(job), "request=rq node=nd_1 sandbox=sb_1"},
		{"a call that outlives its client", said(context.WithoutCancel(call)), "request=rq node=nd_2"},
		{"a line that says so itself", said(call, "node", "nd_3"), "node=nd_3 request=rq"},
		{"a cause that knows nothing", said(Inherit(call, plain)), "request=rq node=nd_2"},
	} {
		if c.got != c.want {
			t.Errorf("%s: %q instead of %q", c.name, c.got, c.want)
		}
	}
}
