package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) topCommand() *cobra.Command {
	var every time.Duration
	var once bool
	c := &cobra.Command{
		Use:   "top",
		Short: "Watch the host: pressure, queues, trees and sandboxes",
		Long: `Shows what the host's scheduler has to do, and the trees and sandboxes that live. Rates and times are those of
the last interval. Pressure is the share of it in which some task waited for a core, a disk or memory. q or ^C ends it.

LINE is what work waits for; CLASS is who waits for it, the most urgent first: forks, captures that a turn waits
for (urgent), captures hidden behind the wait for the model (shadow), dumps on their way to the disk (persist), spares (refill),
removals (prune), trials and audits (audit). RUN is what runs, of what may at once: that follows pressure and what
work takes. WAITED and TOOK are means of a piece. EXPOSED is how long turns and forks waited
for what was to be done in the shadow. WASTED is time of what failed, and of what was made ahead and not used.`,
		Example: `  boxwood top
  boxwood top --once --every 5s`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if every < 50*time.Millisecond {
				return usage(c, errors.New("--every must be 50ms or more"))
			}
			if once || a.width == 0 {
				return a.topOnce(c.Context(), every)
			}
			return a.topLive(c.Context(), every)
		},
	}
	c.Flags().DurationVar(&every, "every", 2*time.Second, "how long an interval is")
	c.Flags().BoolVar(&once, "once", false, "print one interval and end, as is done where there is no terminal")
	return c
}

// sighting is one look at the daemon.
type sighting struct {
	info      *pb.GetInfoResponse
	trees     []*pb.Tree
	sandboxes []*pb.Sandbox
}

func (a *app) look(ctx context.Context) (s sighting, err error) {
	client, err := a.client()
	if err != nil {
		return s, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if s.info, err = client.GetInfo(ctx, &pb.GetInfoRequest{}); err != nil {
		return s, err
	}
	trees, err := client.ListTrees(ctx, &pb.ListTreesRequest{OpenOnly: true})
	if err != nil {
		return s, err
	}
	sandboxes, err := client.ListSandboxes(ctx, &pb.ListSandboxesRequest{})
	s.trees, s.sandboxes = trees.GetTrees(), sandboxes.GetSandboxes()
	return s, err
}

func (a *app) topOnce(ctx context.Context, every time.Duration) error {
	before, err := a.look(ctx)
	if err != nil {
		return err
	}
	select {
	case <-time.After(every):
	case <-ctx.Done():
		return ctx.Err()
	}
	now, err := a.look(ctx)
	if err != nil {
		return err
	}
	for _, line := range picture(before, now, time.Now()) {
		fmt.Fprintln(a.out, line)
	}
	return nil
}

// What a terminal is told: another screen without a cursor, and back.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
)

// topLive draws until q, ^C or the end of the input, and leaves the terminal as it was.
func (a *app) topLive(ctx context.Context, every time.Duration) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	before, err := a.look(ctx) // a daemon that isn't there is told without clearing the screen
	if err != nil {
		return err
	}
	keys, restore := a.keys()
	defer restore()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	fmt.Fprint(a.out, enterScreen)
	defer fmt.Fprint(a.out, leaveScreen)

	draw := func(was, now sighting) { a.draw(picture(was, now, time.Now())) }
	draw(before, before)
	now := before
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case key, ok := <-keys:
			if !ok || key == 'q' || key == 'Q' {
				return nil
			}
		case <-resized:
			draw(before, now)
		case <-tick.C:
			next, err := a.look(ctx)
			if ctx.Err() != nil {
				return nil
			}
			if err != nil {
				return err
			}
			before, now = now, next
			draw(before, now)
		}
	}
}

// keys gives what is typed, key by key; restore gives the terminal back. Without a terminal to type on, there are none.
func (a *app) keys() (keys <-chan byte, restore func()) {
	f, ok := a.in.(*os.File)
	if !ok {
		return nil, func() {}
	}
	was, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return nil, func() {}
	}
	single := *was
	single.Lflag &^= unix.ICANON | unix.ECHO
	single.Cc[unix.VMIN], single.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, &single); err != nil {
		return nil, func() {}
	}
	typed := make(chan byte)
	go func() { // ends with the process: a read of a terminal can't be broken off
		defer close(typed)
		for one := make([]byte, 1); ; {
			if n, err := f.Read(one); n == 0 || err != nil {
				return
			}
			typed <- one[0]
		}
	}()
	return typed, func() { _ = unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, was) }
}

// draw shows as many lines as fit, each cut to the width, over what was there before.
func (a *app) draw(lines []string) {
	width, height := a.width, 24
	if f, ok := a.out.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Row > 0 && size.Col > 0 {
			width, height = int(size.Col), int(size.Row)
		}
	}
	if len(lines) > height {
		lines = append(slices.Clone(lines[:height-1]), fmt.Sprintf("… %d more lines", len(lines)-height+1))
	}
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, line := range lines {
		if i > 0 {
			b.WriteByte('\n') // the terminal still makes "\r\n" of it
		}
		b.WriteString(printable.Cut(line, width) + "\x1b[K")
	}
	b.WriteString("\x1b[J")
	fmt.Fprint(a.out, b.String())
}

// picture is what an interval looked like, in lines.
func picture(was, now sighting, at time.Time) []string {
	i, busy := now.info, 0
	for _, s := range now.sandboxes {
		if s.Busy {
			busy++
		}
	}
	lines := []string{
		fmt.Sprintf("boxwood %s: %d sandboxes (%d in a turn), %d open trees, %d nodes, %d zygotes ready, %d removals pending",
			printable.Line(i.Version), i.Sandboxes, busy, len(now.trees), i.Nodes, i.ZygotesReady, i.PendingRemovals),
		load(was.info, i),
	}
	for _, part := range [][]string{queueLines(was.info, i), treeLines(now), sandboxLines(now, at)} {
		if len(part) > 1 {
			lines = append(append(lines, ""), part...)
		}
	}
	return lines
}

// load is the line about the host.
func load(was, now *pb.GetInfoResponse) string {
	w, h := was.GetHost(), now.GetHost()
	if h == nil {
		return "the daemon is of a version that doesn't tell how the host is"
	}
	interval := h.At - w.GetAt()
	if w == nil || interval <= 0 || h.DaemonCpuNs < w.DaemonCpuNs {
		w, interval = h, 1
	}
	share := func(ns int64) string { return fmt.Sprintf("%.0f %%", 100*float64(max(0, ns))/float64(interval)) }
	pressure := "pressure unknown (the kernel has no PSI)"
	if h.HasStalls {
		pressure = fmt.Sprintf("pressure cpu %s, disk %s (all stand still %s), memory %s (%s)", share(h.CpuSomeNs-w.CpuSomeNs),
			share(h.IoSomeNs-w.IoSomeNs), share(h.IoFullNs-w.IoFullNs), share(h.MemorySomeNs-w.MemorySomeNs), share(h.MemoryFullNs-w.MemoryFullNs))
	}
	return fmt.Sprintf("%s; memory %s of %s free, pool %s of %s used; daemon %s of a core, %s", pressure, size(h.MemoryAvailable), size(h.MemoryTotal),
		size(now.PoolBytesUsed), size(now.PoolBytesTotal), share(h.DaemonCpuNs-w.DaemonCpuNs), size(h.DaemonResident))
}

func queueLines(was, now *pb.GetInfoResponse) []string {
	type name struct{ line, class string }
	before := map[name]*pb.Queue{}
	for _, q := range was.GetQueues() {
		before[name{q.Line, q.Class}] = q
	}
	seconds := float64(now.GetHost().GetAt()-was.GetHost().GetAt()) / 1e9
	var rows [][]string
	for _, q := range now.GetQueues() {
		w := before[name{q.Line, q.Class}]
		if w == nil || w.Started > q.Started { // it is new, or the daemon is
			w = &pb.Queue{}
		}
		mean := func(sum, n int64) string {
			if n <= 0 {
				return "-"
			}
			return millis(sum / n)
		}
		rate := "-"
		if seconds > 0 {
			rate = fmt.Sprintf("%.1f", float64(q.Started-w.Started)/seconds)
		}
		rows = append(rows, []string{
			q.Line, q.Class, fmt.Sprintf("%d of %d", q.Running, cmp.Or(q.Limit, q.Slots)), fmt.Sprint(q.Waiting), fmt.Sprint(q.Tenants), millis(q.OldestNs), rate,
			mean(q.WaitNs-w.WaitNs, q.Started-w.Started), mean(q.TookNs-w.TookNs, q.Done-w.Done), mean(q.ExposedNs-w.ExposedNs, q.Exposed-w.Exposed),
			fmt.Sprint(q.Promoted - w.Promoted), fmt.Sprint(q.Failed - w.Failed), fmt.Sprint(q.Cancelled + q.Dropped - w.Cancelled - w.Dropped),
			fmt.Sprint(q.Refused - w.Refused), millis(q.WastedNs - w.WastedNs),
		})
	}
	return aligned([]string{"LINE", "CLASS", "RUN", "WAIT", "TREES", "OLDEST", "START/S", "WAITED", "TOOK", "EXPOSED", "PROMOTED", "FAILED", "DROPPED", "REFUSED", "WASTED"}, rows)
}

func treeLines(now sighting) []string {
	busy := map[string]int{}
	for _, s := range now.sandboxes {
		if s.Busy {
			busy[s.TreeId]++
		}
	}
	slices.SortFunc(now.trees, func(a, b *pb.Tree) int {
		return cmp.Or(cmp.Compare(b.SandboxCount, a.SandboxCount), cmp.Compare(b.CreatedAt, a.CreatedAt), cmp.Compare(a.Id, b.Id))
	})
	var rows [][]string
	for _, t := range now.trees {
		rows = append(rows, []string{t.Id, fmt.Sprint(t.SandboxCount), fmt.Sprint(busy[t.Id]), fmt.Sprint(t.NodeCount), fmt.Sprint(t.CheckpointCount), t.Run, pairs(t.Labels)})
	}
	return aligned([]string{"TREE", "SANDBOXES", "BUSY", "NODES", "CHECKPOINTS", "RUN", "LABELS"}, most(rows, "trees"))
}

func sandboxLines(now sighting, at time.Time) []string {
	slices.SortFunc(now.sandboxes, func(a, b *pb.Sandbox) int {
		switch {
		case a.Busy != b.Busy && a.Busy:
			return -1
		case a.Busy != b.Busy:
			return 1
		}
		return cmp.Or(cmp.Compare(a.LeaseUntil, b.LeaseUntil), cmp.Compare(a.Id, b.Id))
	})
	var rows [][]string
	for _, s := range now.sandboxes {
		state := "rests"
		if s.Busy {
			state = "runs"
		}
		lease := time.Unix(0, s.LeaseUntil).Sub(at).Round(time.Second)
		rows = append(rows, []string{s.Id, s.TreeId, s.HeadId, state, max(0, lease).String(), pairs(s.Labels)})
	}
	return aligned([]string{"SANDBOX", "TREE", "NODE", "STATE", "LEASE", "LABELS"}, most(rows, "sandboxes"))
}

// shownRows is how many trees and sandboxes are listed: those with most to do.
const shownRows = 20

func most(rows [][]string, of string) [][]string {
	if len(rows) <= shownRows {
		return rows
	}
	return append(rows[:shownRows:shownRows], []string{fmt.Sprintf("… %d more %s", len(rows)-shownRows, of)})
}

// aligned is a table's lines; none if it has no rows.
func aligned(header []string, rows [][]string) []string {
	if len(rows) == 0 {
		return nil
	}
	var b strings.Builder
	(&app{out: &b}).table(header, rows)
	return strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
}
