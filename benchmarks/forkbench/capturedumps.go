package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// capturedDumps measures captures of a process that has to be dumped, beside CRIU's own window over the
// same processes, restored from their dump.
func (b *bench) capturedDumps(ctx context.Context) {
	h := b.hold(ctx, 1)
	beside := b.beside(h)
	defer beside.close()
	pid, _ := beside.restore()
	n := b.scale(30, 300)
	var bares []float64
	taken := b.freezes(ctx, n, func(int) string {
		bares = append(bares, ms(beside.window(pid)))
		return b.touch(ctx, h)
	})
	var more []float64
	for i := range taken {
		more = append(more, taken[i]-bares[i])
	}
	beside.end(pid)
	b.release(ctx, h.sandbox)
	b.emit("dump.bare_freeze_ms.p50", quantile(bares, .5), "ms", n, "CRIU by itself: freeze, dump through a swrk that runs already, thaw; interleaved with dump.freeze_ms")
	b.emit("dump.freeze_ms.p50", quantile(taken, .5), "ms", n, "a process that holds 1 MiB, from the freeze to the thaw, the snapshot included")
	b.emit("dump.freeze_minus_bare_ms.p50", quantile(more, .5), "ms", n, "median of the differences of neighbours")

	b.total(ctx, "dump.total_ms.mib1", 1)
	b.total(ctx, "dump.total_ms.mib10", 10)
	b.total(ctx, "dump.total_ms.mib100", 100)
	if b.long {
		b.total(ctx, "dump.total_ms.mib1000", 1000)
	}
	b.stored(ctx)
}

// total measures how long a process of that size keeps a node from being captured.
func (b *bench) total(ctx context.Context, metric string, mib int) {
	h := b.hold(ctx, mib)
	var took []float64
	for range b.scale(3, 10) {
		node := b.touch(ctx, h)
		start := time.Now()
		b.waitCaptured(ctx, node)
		took = append(took, ms(time.Since(start)))
	}
	b.release(ctx, h.sandbox)
	b.emit(metric, quantile(took, .5), "ms", len(took), fmt.Sprintf("from the turn's answer to the capture's end, a process that holds %d MiB of noise and altered one page in a hundred", mib))
}

// stored measures what a chain of dumps takes: a process of 10 MiB that alters a hundredth of it each turn.
func (b *bench) stored(ctx context.Context) {
	h := b.hold(ctx, 10)
	dumped, stored := b.contents()
	const turns = 10
	for range turns {
		b.waitCaptured(ctx, b.touch(ctx, h))
	}
	dumpedAfter, storedAfter := b.contents()
	b.release(ctx, h.sandbox)
	how := "a dump, mean of a chain of them: a process that holds 10 MiB of noise and alters one page in a hundred each turn"
	b.emit("dump.bytes_dumped", float64(dumpedAfter-dumped)/turns, "bytes", turns, how)
	b.emit("dump.bytes_stored", float64(storedAfter-stored)/turns, "bytes", turns, how+"; blocks on the disk")
}

// contents says how large all dumps are and what they take on the disk, once all are there.
func (b *bench) contents() (dumped, stored int64) {
	dir := filepath.Join(b.state, "processes")
	var done []string
	for deadline := time.Now().Add(time.Minute); len(done) < b.held; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			must(fmt.Errorf("of %d dumps %d are on the disk", b.held, len(done)))
		}
		sums, err := filepath.Glob(filepath.Join(dir, "*", "sums")) // shells have none
		must(err)
		done = done[:0]
		for _, path := range sums {
			if dump := filepath.Dir(path); filepath.Ext(dump) == "" { // of one on its way there: .new
				done = append(done, dump)
			}
		}
	}
	blocks := map[uint64]int64{} // by inode: a content that several dumps share counts once
	for _, dump := range done {
		sums, err := os.ReadFile(filepath.Join(dump, "sums"))
		must(err)
		for line := range strings.Lines(string(sums)) {
			size, err := strconv.ParseInt(strings.Fields(line)[1], 10, 64)
			must(err)
			dumped += size
		}
		must(filepath.WalkDir(dump, func(_ string, d fs.DirEntry, err error) error {
			must(err)
			info, err := d.Info()
			must(err)
			st := info.Sys().(*syscall.Stat_t)
			blocks[st.Ino] = st.Blocks * 512
			return nil
		}))
	}
	for _, n := range blocks {
		stored += n
	}
	return dumped, stored
}
