package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/engine/image"
)

// baseName is the image that build-base imports.
const baseName = "boxwood/base:latest"

func (a *app) imageBuildBaseCommand() *cobra.Command {
	var name, cache string
	c := a.jsonFlag(&cobra.Command{
		Use:   "build-base",
		Short: "Build and import a small Debian with bash, coreutils, python3 and git",
		Long: `Builds a root file system from the host's package mirrors, keeps it in a cache
and imports it. It takes a minute or two the first time and seconds afterwards.`,
		Example: "  boxwood image build-base",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			bar := progress{app: a}
			path, err := image.BuildBase(c.Context(), cache, bar.show)
			bar.end()
			if err != nil {
				return err
			}
			return a.importImage(c, path, name)
		},
	})
	c.Flags().StringVar(&name, "name", baseName, "name to give it")
	c.Flags().StringVar(&cache, "cache", defaultCache(), "folder to build in and keep the result")
	return c
}

func defaultCache() string {
	if dir := os.Getenv("BOXWOOD_CACHE"); dir != "" {
		return dir
	}
	return "/var/cache/boxwood"
}
