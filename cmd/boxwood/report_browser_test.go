package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// browser is a Chromium that is spoken to over pipes, in its own protocol.
type browser struct {
	t       *testing.T
	to      *os.File
	replies chan message
	next    int
	session string
	// What went wrong in pages, and what they asked for.
	complaints, requests []string
}

type message struct {
	ID        int                       `json:"id,omitempty"`
	SessionID string                    `json:"sessionId,omitempty"`
	Method    string                    `json:"method,omitempty"`
	Params    any                       `json:"params,omitempty"`
	Result    json.RawMessage           `json:"result,omitempty"`
	Error     *struct{ Message string } `json:"error,omitempty"`
}

func startBrowser(t *testing.T) *browser {
	const program = "chromium-headless-shell"
	testenv.Require(t, testenv.Program(program))
	theirs, to, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	from, theirOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	c := exec.CommandContext(ctx, program, "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--user-data-dir="+t.TempDir())
	c.ExtraFiles = []*os.File{theirs, theirOut}
	c.WaitDelay = 10 * time.Second
	var log bytes.Buffer // all its processes hold it, so that Wait waits for them, too
	c.Stderr = &log
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	theirOut.Close()
	b := &browser{t: t, to: to, replies: make(chan message)}
	done := make(chan struct{})
	go func() {
		defer close(b.replies)
		for in := bufio.NewReader(from); ; {
			text, err := in.ReadBytes(0)
			if err != nil {
				return
			}
			var m message
			if json.Unmarshal(text[:len(text)-1], &m) != nil {
				return
			}
			select {
			case b.replies <- m:
			case <-done:
			}
		}
	}()
	t.Cleanup(func() {
		close(done)
		to.Close() // it ends with its pipe
		_ = c.Wait()
		cancel()
		from.Close()
		if t.Failed() {
			t.Logf("the browser's log:\n%s", log.String())
		}
	})
	var target struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	b.session = attached.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.call(domain+".enable", nil, nil)
	}
	return b
}

// call waits for a method's result, or for the event that until names.
func (b *browser) call(method string, params, result any, until ...string) {
	b.t.Helper()
	b.next++
	text, err := json.Marshal(message{ID: b.next, SessionID: b.session, Method: method, Params: params})
	if err == nil {
		_, err = b.to.Write(append(text, 0))
	}
	if err != nil {
		b.t.Fatal(err)
	}
	answered := false
	for m := range b.replies {
		b.saw(m)
		switch {
		case m.ID == b.next && m.Error != nil:
			b.t.Fatalf("%s: %s", method, m.Error.Message)
		case m.ID == b.next:
			if answered = true; result != nil {
				if err := json.Unmarshal(m.Result, result); err != nil {
					b.t.Fatal(err)
				}
			}
		case len(until) > 0 && m.Method == until[0]:
			until = nil
		}
		if answered && len(until) == 0 {
			return
		}
	}
	b.t.Fatalf("%s: the browser is gone", method)
}

func (b *browser) saw(m message) {
	params := fmt.Sprint(m.Params)
	switch m.Method {
	case "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded":
		b.complaints = append(b.complaints, m.Method+": "+params)
	case "Network.requestWillBeSent":
		p, _ := m.Params.(map[string]any)
		r, _ := p["request"].(map[string]any)
		b.requests = append(b.requests, fmt.Sprint(r["url"]))
	}
}

// look opens a page as a reader with that width and colour scheme would.
func (b *browser) look(path string, width int, scheme string) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 768, "deviceScaleFactor": 1, "mobile": false}, nil)
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []any{map[string]any{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	b.call("Page.navigate", map[string]any{"url": (&url.URL{Scheme: "file", Path: path}).String()}, nil, "Page.loadEventFired")
}

// pageSeen is what the page measures of itself.
type pageSeen struct {
	Width, Room   float64
	Foreign       int      // elements that a report has none of
	Stolen        bool     // whether a text of an agent was run
	Pictures      []string // their headings
	Invisible     []string
	Cut           []string // tables that must be scrolled
	Outside, Over []string // labels beyond their picture's edge, and over others
	Pale          []string // texts and marks that can't be told from the ground
}

const measure = `(() => {
	const box = e => e.getBoundingClientRect();
	const light = css => {
		const c = css.match(/[\d.]+/g).slice(0, 3).map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 });
		return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];
	};
	const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05) };
	const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
	const ground = getComputedStyle(document.body).backgroundColor;
	const out = { Width: document.documentElement.scrollWidth, Room: document.documentElement.clientWidth, Stolen: 'stolen' in window,
		Foreign: document.querySelectorAll('script,img,iframe,object,embed,link,foreignObject,image,[onerror]').length,
		Pictures: [], Invisible: [], Cut: [], Outside: [], Over: [], Pale: [] };
	for (const e of document.querySelectorAll('h1,h2,p,li,dt,dd,th,td'))
		if (e.textContent && contrast(getComputedStyle(e).color, ground) < 4.5) out.Pale.push(e.textContent);
	for (const t of document.querySelectorAll('.table'))
		if (t.scrollWidth > t.clientWidth) out.Cut.push(t.closest('section').querySelector('h2').textContent);
	for (const svg of document.querySelectorAll('svg')) {
		const name = svg.closest('section').querySelector('h2').textContent, edge = box(svg);
		out.Pictures.push(name);
		if (edge.width < 100 || edge.height < 50 || !svg.checkVisibility()) out.Invisible.push(name);
		const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim());
		if (texts.length < 3) out.Invisible.push(name + ' has no labels');
		const marks = [...svg.querySelectorAll('path')].filter(p => getComputedStyle(p).fill != 'none').map(box);
		texts.forEach((t, i) => {
			const a = box(t);
			if (a.width < 1 || a.left < edge.left - 1 || a.right > edge.right + 1 || a.top < edge.top - 1 || a.bottom > edge.bottom + 1) out.Outside.push(name + ': ' + t.textContent);
			if (contrast(getComputedStyle(t).fill, ground) < 4.5) out.Pale.push(name + ': ' + t.textContent);
			for (const u of texts.slice(i + 1)) {
				const b = box(u);
				if (meet(a, b)) out.Over.push(name + ': ' + t.textContent + ' / ' + u.textContent);
			}
			if (marks.some(m => meet(a, m))) out.Over.push(name + ': ' + t.textContent + ' / what is drawn');
		});
		const colours = new Set([...svg.querySelectorAll('path')].flatMap(p => { const s = getComputedStyle(p); return [s.fill, s.stroke] }));
		const known = getComputedStyle(document.documentElement).getPropertyValue('--faint');
		colours.forEach(c => { if (c != 'none' && !known.includes(c) && contrast(c, ground) < 1.3) out.Pale.push(name + ': ' + c) });
	}
	return JSON.stringify(out);
})()`

func (b *browser) measure() (s pageSeen) {
	b.t.Helper()
	var reply struct{ Result struct{ Value string } }
	b.call("Runtime.evaluate", map[string]any{"expression": measure, "returnByValue": true}, &reply)
	if err := json.Unmarshal([]byte(reply.Result.Value), &s); err != nil {
		b.t.Fatalf("%v: %q", err, reply.Result.Value)
	}
	return s
}

// keep leaves what is base64 in a file among the results of the tests.
func (b *browser) keep(name, data string) []byte {
	b.t.Helper()
	dir := filepath.Join("..", "..", ".cache", "test")
	raw, err := base64.StdEncoding.DecodeString(data)
	if err == nil {
		err = os.MkdirAll(dir, 0o777)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name), raw, 0o644)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return raw
}

func (b *browser) screenshot(name string) {
	b.t.Helper()
	var reply struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true}, &reply)
	if shot := b.keep(name, reply.Data); len(shot) < 10_000 {
		b.t.Errorf("%s has %d bytes", name, len(shot))
	}
}

// A report that a browser doesn't show, that runs what an agent wrote, or that asks the network for something is none.
func TestReportInABrowser(t *testing.T) {
	r, c := newRollouts(t)
	b := startBrowser(t)
	dir := t.TempDir()
	replay := r.many(t)
	pages := []struct {
		name string
		want int // pictures
		args []string
	}{{"report-replay", 8, []string{replay}}, {"report-live", 9, nil}}
	for _, p := range pages {
		if p.args == nil {
			r.search(140)
		}
		page := filepath.Join(dir, p.name+".html")
		if _, errOut, status := c.run(append([]string{"report", "-o", page}, p.args...)...); status != 0 {
			t.Fatal(errOut)
		}
		for _, view := range []struct {
			scheme string
			width  int
		}{{"light", 1366}, {"dark", 1366}, {"light", 480}} {
			b.look(page, view.width, view.scheme)
			name := fmt.Sprintf("%s, %s, %d px", p.name, view.scheme, view.width)
			s := b.measure()
			if s.Width > s.Room {
				t.Errorf("%s is %.0f wide", name, s.Width)
			}
			if s.Foreign > 0 || s.Stolen {
				t.Errorf("%s has elements that aren't its own", name)
			}
			if len(s.Pictures) != p.want {
				t.Errorf("%s has %d pictures: %q", name, len(s.Pictures), s.Pictures)
			}
			if view.width > 1000 && len(s.Cut) > 0 {
				t.Errorf("%s: tables don't fit: %q", name, s.Cut)
			}
			for what, found := range map[string][]string{"can't be pageSeen": s.Invisible, "is outside": s.Outside, "is over another": s.Over, "is pale": s.Pale} {
				if len(found) > 0 {
					t.Errorf("%s: what %s: %q", name, what, found)
				}
			}
			b.screenshot(fmt.Sprintf("%s-%s-%d.png", p.name, view.scheme, view.width))
		}
		var reply struct{ Data string }
		b.call("Page.printToPDF", map[string]any{"printBackground": false}, &reply)
		if pdf := b.keep(p.name+".pdf", reply.Data); !strings.HasPrefix(string(pdf), "%PDF-") || len(pdf) < 20_000 {
			t.Errorf("%s prints as %d bytes", p.name, len(pdf))
		}
	}
	if len(b.complaints) > 0 {
		t.Errorf("the browser complains: %q", b.complaints)
	}
	for _, r := range b.requests {
		if !strings.HasPrefix(r, "file://"+dir) {
			t.Errorf("the page asks for %s", r)
		}
	}
	if len(b.requests) != 3*len(pages) {
		t.Errorf("%d pages were asked for: %q", len(b.requests), b.requests)
	}
}
