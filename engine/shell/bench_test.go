package shell

import (
	"os/exec"
	"testing"
)

// What a turn in a session pays: a command and the description after it.
func BenchmarkDescribe(b *testing.B) {
	l := start(b, nil, "/", Greeting{})
	l.run("f() { echo 1; }; x=5; cd /tmp")
	b.Run("describe", func(b *testing.B) {
		for b.Loop() {
			l.describe()
		}
	})
	b.Run("command", func(b *testing.B) {
		for b.Loop() {
			l.run("true")
		}
	})
	b.Run("spawn", func(b *testing.B) {
		for b.Loop() {
			if err := exec.Command("/bin/true").Run(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("restore", func(b *testing.B) {
		d := l.describe()
		for b.Loop() {
			again(b, d, "/tmp").describe()
		}
	})
}
