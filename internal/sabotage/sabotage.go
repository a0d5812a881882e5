// Package sabotage breaks guarantees on purpose, each to show that the check of it can fail (law 13):
//
//	if after > 0 && !sabotage.On("watch") { // a watcher that comes back is told what was removed meanwhile
//
// That is all that a saboteur needs, beside a line of scripts/saboteurs.txt with the check that must then fail. All of them
// lie in one build, with the tag sabotage, and the variable BOXWOOD_SABOTAGE names the one that breaks what it is for:
//
//	BOXWOOD_SABOTAGE=watch go test -tags sabotage ./tree -run Watch
//
// Promise: in a build without the tag nothing reads that variable, and neither the names nor the faults are in the program.
package sabotage

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// What follows are faults of more than a line. They tell no error: a fault that does nothing isn't caught.

// FlipByte changes the first byte of the first file in a folder that has any.
func FlipByte(dir string) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && flip(path, 0) {
			return filepath.SkipAll
		}
		return err
	})
}

// FlipHeap changes a byte of a process's heap, if it has one.
func FlipHeap(pid int) {
	maps, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	for line := range strings.Lines(string(maps)) {
		var at int64
		if _, err := fmt.Sscanf(line, "%x-", &at); err == nil && strings.Contains(line, "[heap]") {
			flip(fmt.Sprintf("/proc/%d/mem", pid), at+64)
		}
	}
}

func flip(path string, at int64) bool {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	var one [1]byte
	if _, err := f.ReadAt(one[:], at); err != nil {
		return false
	}
	one[0] ^= 1
	_, err = f.WriteAt(one[:], at)
	return err == nil
}

var before struct {
	sync.Mutex
	content []byte
}

// Earlier gives what it was called with the time before; its own at first.
func Earlier(content []byte) []byte {
	before.Lock()
	defer before.Unlock()
	earlier := before.content
	before.content = content
	if earlier == nil {
		return content
	}
	return earlier
}
