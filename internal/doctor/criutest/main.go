// Command criutest PATH exits 0 if the CRIU at PATH dumps and restores live
// processes on this kernel, and else says why not. Set-up uses it.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/boxwood-rl/boxwood/internal/doctor"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: criutest PATH")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	err := doctor.CheckCRIU(ctx, os.Args[1], "")
	cancel()
	if err != nil {
		fmt.Fprintln(os.Stderr, "criu self-test:", err)
		os.Exit(1)
	}
}
