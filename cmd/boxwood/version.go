package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// version of the source; revision is the commit, set by the build:
// -ldflags "-X main.revision=...".
var version, revision = "0.1.0", ""

func fullVersion() string {
	if revision == "" {
		return version
	}
	return version + "+" + revision
}

func (a *app) versionCommand() *cobra.Command {
	return a.jsonFlag(&cobra.Command{
		Use: "version", Short: "Show the versions of this program and of the daemon", Args: cobra.NoArgs,
		Example: "  boxwood version",
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(c.Context(), 2*time.Second)
			defer cancel()
			info, err := client.GetInfo(ctx, &pb.GetInfoRequest{})
			if a.json {
				if err != nil {
					return err
				}
				return a.printMessage(info)
			}
			fmt.Fprintf(a.out, "boxwood %s (%s)\n", fullVersion(), runtime.Version())
			if err != nil {
				message, _ := explain(err, a.target())
				fmt.Fprintf(a.out, "daemon: %s\n", printable.Line(message))
				return nil
			}
			fmt.Fprintf(a.out, "daemon %s on Linux %s: %d sandboxes, %d nodes, pool %s of %s\n", printable.Line(info.Version), printable.Line(info.Kernel),
				info.Sandboxes, info.Nodes, size(info.PoolBytesUsed), size(info.PoolBytesTotal))
			return nil
		},
	})
}
