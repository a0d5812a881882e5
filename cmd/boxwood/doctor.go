package main

import (
	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/internal/doctor"
)

func (a *app) doctorCommand() *cobra.Command {
	var o doctor.Options
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Find out what this host can do, by doing it",
		Long: `Tries each capability that Boxwood uses: loads BPF programs, mounts overlays,
makes namespaces, dumps and restores a process. Each is yes, no (and what is then
unavailable) or unknown. The exit status is 0 only if the main job can run.`,
		Example: `  boxwood doctor
  boxwood doctor --json | jq -r '.items[] | select(.state != "yes") | .name'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			a.note("trying, this takes some seconds ...")
			report := doctor.Run(c.Context(), o)
			var err error
			if a.json {
				err = a.printJSON(report)
			} else {
				err = report.Text(a.out)
			}
			if err != nil {
				return err
			}
			if !report.OK() {
				return exitStatus(1)
			}
			return nil
		},
	}
	c.Flags().StringVar(&o.StateDir, "state", "", "the folder whose file system to try (default: the one for temporary files)")
	c.Flags().StringVar(&o.CRIU, "criu", "", "the CRIU to try")
	c.Flags().BoolVar(&a.json, "json", false, "print JSON")
	return c
}
