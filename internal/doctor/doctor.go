// Package doctor finds out what this host can do for Boxwood by doing it: it
// loads a BPF program, mounts an overlay on idmapped layers of a real btrfs,
// clones into fresh namespaces, dumps and restores live processes. Versions
// and configuration files are not believed.
//
// Promise: every probe ends within its limit and leaves no process, mount, loop
// device, cgroup or file behind, also when what it probes hangs. A probe that
// couldn't find out says unknown, never no.
//
// `boxwood doctor` and the daemon's start call it.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"
)

// State is the answer of a probe.
type State int

const (
	// Unknown: the probe failed or gave no answer in time. Ask again.
	Unknown State = iota
	// No: this host can't, until somebody changes it.
	No
	// Yes: it was done a moment ago.
	Yes
)

func (s State) String() string {
	switch s {
	case Yes:
		return "yes"
	case No:
		return "no"
	}
	return "unknown"
}

// MarshalText writes the state as a word.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a word back.
func (s *State) UnmarshalText(text []byte) error {
	for _, known := range []State{Unknown, No, Yes} {
		if known.String() == string(text) {
			*s = known
			return nil
		}
	}
	return fmt.Errorf("no such state: %q", text)
}

// Item is one capability.
type Item struct {
	Name  string `json:"name"`
	State State  `json:"state"`
	// Detail is one line: what was found, or why not.
	Detail string `json:"detail,omitempty"`
	// Without says what is unavailable where State isn't Yes.
	Without string `json:"without,omitempty"`
	// Required for the main job: sandboxes, turns, captures and forks of files.
	Required bool `json:"required"`
}

// Report is all of them, in a fixed order.
type Report struct {
	Items []Item
}

// Options of Run. The zero value probes what the daemon would use by default.
type Options struct {
	// StateDir is where the pool will lie; empty: the folder for temporary files.
	StateDir string
	// CRIU is the program to test; empty: FindCRIU.
	CRIU string
	// Limit for each probe, CRIU's excepted; 0: 20 s, far above the tens of
	// milliseconds that each takes, so that only a hang reaches it.
	Limit time.Duration
	// CRIULimit for the dump and the restore together; 0: 30 s.
	CRIULimit time.Duration
}

// finding is what a probe says of one of its capabilities.
type finding struct {
	state  State
	detail string
}

func yes(format string, args ...any) finding { return finding{Yes, fmt.Sprintf(format, args...)} }
func no(format string, args ...any) finding  { return finding{No, fmt.Sprintf(format, args...)} }
func unknown(format string, args ...any) finding {
	return finding{Unknown, fmt.Sprintf(format, args...)}
}

// capability names what a probe finds out.
type capability struct {
	name     string
	required bool
	without  string
}

// probe finds out about its capabilities, in their order.
type probe struct {
	capabilities []capability
	limit        time.Duration
	run          func(ctx context.Context) []finding
}

// Run asks all probes at once. It returns when each has answered or run out of time.
func Run(ctx context.Context, o Options) Report {
	if o.StateDir == "" {
		o.StateDir = os.TempDir()
	}
	if o.CRIU == "" {
		o.CRIU = FindCRIU()
	}
	if o.Limit == 0 {
		o.Limit = 20 * time.Second
	}
	if o.CRIULimit == 0 {
		o.CRIULimit = 30 * time.Second
	}
	probes := probes(o)
	answers := make([]chan []finding, len(probes))
	for i, p := range probes {
		answers[i] = make(chan []finding, 1)
		go func() { answers[i] <- p.within(ctx) }()
	}
	var report Report
	for i, p := range probes {
		for k, f := range <-answers[i] {
			c := p.capabilities[k]
			item := Item{Name: c.name, State: f.state, Detail: f.detail, Required: c.required}
			if f.state != Yes {
				item.Without = c.without
			}
			report.Items = append(report.Items, item)
		}
	}
	return report
}

// within runs the probe under its limit. A probe stuck in the kernel is left
// behind: it holds nothing that outlives the process.
func (p probe) within(ctx context.Context) []finding {
	ctx, cancel := context.WithTimeout(ctx, p.limit)
	defer cancel()
	done := make(chan []finding, 1)
	go func() { done <- p.run(ctx) }()
	select {
	case found := <-done:
		return found
	case <-ctx.Done():
	}
	// A probe that obeys its context answers now, and better than we could.
	select {
	case found := <-done:
		return found
	case <-time.After(2 * time.Second):
	}
	var found []finding
	for range p.capabilities {
		found = append(found, unknown("no answer within %s", p.limit))
	}
	return found
}

// OK reports whether the main job can run here: every required capability was
// shown to be there. CRIU is not required; without it a node with surviving
// processes is withheld.
func (r Report) OK() bool {
	for _, item := range r.Items {
		if item.Required && item.State != Yes {
			return false
		}
	}
	return len(r.Items) > 0
}

// Text writes one line per capability.
func (r Report) Text(w io.Writer) error {
	width := 0
	for _, item := range r.Items {
		width = max(width, len(item.Name))
	}
	for _, item := range r.Items {
		line := fmt.Sprintf("%-*s  %-7s  %s", width, item.Name, item.State, item.Detail)
		if item.Without != "" {
			line += "; without it: " + item.Without
		}
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	verdict := "The main job can run here."
	if !r.OK() {
		verdict = "The main job can't run here: see the lines above that don't say yes."
	}
	_, err := fmt.Fprintln(w, verdict)
	return err
}

// reportJSON is the form of `boxwood doctor --json`.
type reportJSON struct {
	OK    bool   `json:"ok"`
	Items []Item `json:"items"`
}

// MarshalJSON writes {"ok":...,"items":[...]}.
func (r Report) MarshalJSON() ([]byte, error) { return json.Marshal(reportJSON{r.OK(), r.Items}) }

// UnmarshalJSON reads what MarshalJSON wrote.
func (r *Report) UnmarshalJSON(data []byte) error {
	var in reportJSON
	if err := json.Unmarshal(data, &in); err != nil {
		return err
	}
	r.Items = in.Items
	return nil
}

func probes(o Options) []probe {
	mainJob := "the main job"
	return []probe{
		{[]capability{{"root", true, mainJob}}, o.Limit, root},
		{[]capability{{"btf", true, "the inspector, so no turn can be judged"}}, o.Limit, kernelTypes},
		{[]capability{
			{"raw tracepoints", true, "the inspector, so no turn can be judged"},
			{"ring buffer", true, "the inspector, so no turn can be judged"},
		}, o.Limit, tracepoints},
		{[]capability{
			{"cgroups", true, "limits, freezing and watching of sandboxes"},
			{"io controller", false, "shares of the disk's bandwidth by sandbox, which nothing here asks for yet"},
		}, o.Limit, cgroups},
		{[]capability{
			{"btrfs", true, "the pool: snapshots and forks"},
			{"idmapped overlay", true, "roots of sandboxes"},
		}, o.Limit, func(ctx context.Context) []finding { return storage(ctx, o.StateDir) }},
		{[]capability{{"user namespaces", true, "sandboxes"}}, o.Limit, userNamespaces},
		{[]capability{{"criu", false, "process dumps: a node with surviving processes is withheld"}}, o.CRIULimit,
			func(ctx context.Context) []finding { return []finding{criu(ctx, o.CRIU, "")} }},
		{[]capability{{"unconfined", false, "what the line names"}}, o.Limit, confinement},
		{[]capability{{"disk", true, "room for the pool"}}, o.Limit,
			func(context.Context) []finding { return disk(o.StateDir) }},
		{[]capability{{"memory", false, "more than a few sandboxes"}}, o.Limit, memory},
	}
}
