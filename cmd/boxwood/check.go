package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/check"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
)

func (a *app) checkCommand() *cobra.Command {
	var o check.Options
	var repair bool
	c := &cobra.Command{
		Use:   "check",
		Short: "Verify a state folder that no daemon uses",
		Long: `Holds the records against themselves, against the pool and against what lives on
the host: references, counts, paths to the root, seals of snapshots, digests of
payloads, snapshots and sandboxes without a record, records without a snapshot or
sandbox, cgroups and folders of daemons that are gone. One line a finding; the exit
status is 0 only if there is none. Sandboxes that the next daemon can adopt are none.

With --repair it does what can be done without guessing, and says each step before
it does it. What it reports then is what is left.`,
		Example: `  boxwood check --state /var/lib/boxwood
  boxwood check --repair
  boxwood check --json | jq -r '.findings[].kind' | sort | uniq -c`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return fault.New(fault.Denied, "not_root", "a check must run as root: it mounts the pool").WithHint("sudo boxwood check")
			}
			if err := o.Refuse(); err != nil {
				return err
			}
			if err := engine.PrivateMounts(); err != nil {
				return err
			}
			run := check.Run
			if repair {
				run = func(ctx context.Context, o check.Options) (*check.Report, error) {
					return check.Repair(ctx, o, func(f check.Finding) {
						fmt.Fprintf(a.err, "%s\n  repair: %s\n", printable.Line(f.String()), printable.Line(f.Fix))
					})
				}
			}
			r, err := run(c.Context(), o)
			if err != nil {
				return err
			}
			return a.showCheck(r)
		},
	}
	c.Flags().StringVar(&o.State, "state", "/var/lib/boxwood", "folder of all state")
	c.Flags().StringVar(&o.PoolDir, "pool", "", "the folder that `boxwood serve --pool` named")
	c.Flags().StringVar(&o.RunDir, "run-dir", "", "the folder that `boxwood serve --run-dir` named")
	c.Flags().StringVar(&o.Cgroup, "cgroup", "", `name of Boxwood's cgroup (default "boxwood")`)
	c.Flags().BoolVar(&repair, "repair", false, "mend what can be mended without guessing")
	c.Flags().BoolVar(&a.json, "json", false, "print JSON")
	return c
}

func (a *app) showCheck(r *check.Report) error {
	if a.json {
		if err := a.printJSON(r); err != nil {
			return err
		}
	} else {
		for _, f := range r.Findings {
			fmt.Fprintln(a.out, printable.Line(f.String()))
			if f.Hint != "" {
				fmt.Fprintln(a.out, "  hint:", printable.Line(f.Hint))
			} else if f.Fix != "" {
				fmt.Fprintln(a.out, "  --repair:", printable.Line(f.Fix))
			}
		}
		fmt.Fprintf(a.out, "%d trees, %d nodes, %d checkpoints, %d images, %d snapshots, %d layers, %d sandboxes to adopt: %s\n",
			r.Trees, r.Nodes, r.Checkpoints, r.Images, r.Snapshots, r.Layers, r.Sandboxes, findings(len(r.Findings)))
	}
	if len(r.Findings) > 0 {
		return exitStatus(1)
	}
	return nil
}

func findings(n int) string {
	switch n {
	case 0:
		return "nothing wrong"
	case 1:
		return "1 finding"
	}
	return fmt.Sprintf("%d findings", n)
}
