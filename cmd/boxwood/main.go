// Command boxwood is the daemon and its command line.
//
// Everything but serve, doctor, check and image build-base is a client of a daemon and
// speaks the same service as a trainer does. Failures are one line and a hint
// on standard error. The exit status is 0, or the command's own for run and
// exec, 1 if what was asked for came out negative (doctor, check, replay), and 125 for
// a failure of boxwood.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	go func() {
		<-ctx.Done()
		stop() // a second signal ends the program at once
	}()
	os.Exit(execute(ctx, os.Args[1:], terminal()))
}
