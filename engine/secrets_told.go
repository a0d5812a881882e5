package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
)

// Veiled is a log in which no secret shows that the engine knows of: what goes wrong has command lines, environments and names of
// files in it, wherever it goes wrong.
func (e *Engine) Veiled(log *slog.Logger) *slog.Logger {
	if e.secrets == nil {
		return log
	}
	return slog.New(veiledHandler{log.Handler(), e.secrets})
}

type veiledHandler struct {
	slog.Handler
	secrets *secrets
}

func (h veiledHandler) Handle(ctx context.Context, r slog.Record) error {
	v := h.secrets.all()
	if v == nil {
		return h.Handler.Handle(ctx, r)
	}
	out := slog.NewRecord(r.Time, r.Level, v.maskText(r.Message), r.PC)
	r.Attrs(func(a slog.Attr) bool {
		out.AddAttrs(v.maskAttr(a))
		return true
	})
	return h.Handler.Handle(ctx, out)
}

func (h veiledHandler) WithAttrs(list []slog.Attr) slog.Handler {
	masked := make([]slog.Attr, len(list))
	for i, a := range list {
		masked[i] = h.secrets.all().maskAttr(a)
	}
	return veiledHandler{h.Handler.WithAttrs(masked), h.secrets}
}

func (h veiledHandler) WithGroup(name string) slog.Handler {
	return veiledHandler{h.Handler.WithGroup(name), h.secrets}
}

func (v *veil) maskAttr(a slog.Attr) slog.Attr {
	a.Value = a.Value.Resolve()
	switch a.Value.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(v.maskText(a.Value.String()))
	case slog.KindGroup:
		var list []slog.Attr
		for _, one := range a.Value.Group() {
			list = append(list, v.maskAttr(one))
		}
		a.Value = slog.GroupValue(list...)
	case slog.KindAny:
		text := fmt.Sprintf("%+v", a.Value.Any())
		if b, ok := a.Value.Any().([]byte); ok {
			text = string(b)
		}
		if masked := v.maskText(text); masked != text {
			a.Value = slog.StringValue(masked)
		}
	}
	return a
}

// maskedJSON is an indented text of x in which no string shows a secret. They are masked before they are written as JSON, which
// writes some characters otherwise.
func (v *veil) maskedJSON(x any) ([]byte, error) {
	if v == nil {
		return json.MarshalIndent(x, "", "  ")
	}
	plain, err := json.Marshal(x)
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(plain))
	d.UseNumber()
	var all any
	if err := d.Decode(&all); err != nil {
		return nil, err
	}
	return json.MarshalIndent(v.maskAny(all), "", "  ")
}

func (v *veil) maskAny(x any) any {
	switch x := x.(type) {
	case string:
		return v.maskText(x)
	case []any:
		for i := range x {
			x[i] = v.maskAny(x[i])
		}
	case map[string]any:
		out := make(map[string]any, len(x))
		for k, one := range x {
			out[v.maskText(k)] = v.maskAny(one)
		}
		return out
	}
	return x
}
