package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) imageCommand() *cobra.Command {
	c := &cobra.Command{Use: "image", Short: "Import, list and remove images"}
	c.AddCommand(a.imageImportCommand(), a.imageListCommand(), a.imageRemoveCommand(), a.imageBuildBaseCommand())
	return c
}

func (a *app) imageImportCommand() *cobra.Command {
	var name string
	c := a.jsonFlag(&cobra.Command{
		Use:   "import PATH",
		Short: "Import a folder, a `docker save` archive or an OCI layout",
		Long: `Imports a root file system that lies on the daemon's host. Each layer is stored
once, however many images have it. Device nodes and sockets are left out and
counted.`,
		Example: `  boxwood image import ./rootfs --name task:1
  docker save python:3.12 -o python.tar && boxwood image import python.tar`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			path, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			return a.importImage(c, path, name)
		},
	})
	c.Flags().StringVar(&name, "name", "", `name to give it, "name:tag" (default: the archive's own)`)
	return c
}

func (a *app) importImage(c *cobra.Command, path, name string) error {
	client, err := a.client()
	if err != nil {
		return err
	}
	events, err := client.ImportImage(c.Context(), &pb.ImportImageRequest{Path: path, Name: name})
	if err != nil {
		return err
	}
	bar := progress{app: a}
	defer bar.end()
	for {
		ev, err := events.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return fault.New(fault.Internal, "no_image", "the daemon ended the import without an image")
			}
			return err
		}
		if ev.Image == nil {
			bar.show(ev.Step, ev.DoneBytes, ev.TotalBytes)
			continue
		}
		bar.end()
		if ev.LeftOutCount > 0 {
			fmt.Fprintf(a.err, "left out %d entries that a sandbox can't have: %s\n", ev.LeftOutCount, printable.Cut(printable.Line(strings.Join(ev.LeftOut, ", ")), 200))
		}
		if a.json {
			return a.printMessage(ev.Image)
		}
		fmt.Fprintf(a.out, "%s  %s  %s\n", shortDigest(ev.Image.Digest), printable.Line(strings.Join(ev.Image.Names, ", ")), size(ev.Image.Bytes))
		return nil
	}
}

func (a *app) imageListCommand() *cobra.Command {
	return a.jsonFlag(&cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List images", Args: cobra.NoArgs,
		Example: `  boxwood image list
  boxwood image list --json`,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			reply, err := client.ListImages(c.Context(), &pb.ListImagesRequest{})
			if err != nil {
				return err
			}
			if a.json {
				return a.printMessage(reply)
			}
			var rows [][]string
			for _, i := range reply.Images {
				rows = append(rows, []string{strings.Join(i.Names, ", "), shortDigest(i.Digest), fmt.Sprint(len(i.Layers)), size(i.Bytes), when(i.CreatedAt)})
			}
			a.table([]string{"NAME", "DIGEST", "LAYERS", "SIZE", "IMPORTED"}, rows)
			return nil
		},
	})
}

func (a *app) imageRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm IMAGE...", Short: "Remove images that no tree stands on", Args: cobra.MinimumNArgs(1),
		Example: "  boxwood image rm task:1",
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			for _, name := range args {
				reply, err := client.RemoveImage(c.Context(), &pb.RemoveImageRequest{Image: name})
				if err != nil {
					return err
				}
				fmt.Fprintf(a.out, "removed %s, %s come back\n", printable.Line(name), size(reply.FreedBytes))
			}
			return nil
		},
	}
}

// progress is a line on standard error that overwrites itself on a terminal;
// elsewhere it is a line for each step. Nothing is shown in the first second.
type progress struct {
	app     *app
	started time.Time
	shown   time.Time
	step    string
	drawn   bool
}

func (p *progress) show(step string, done, total int64) {
	now := time.Now()
	if p.started.IsZero() {
		p.started = now
	}
	if now.Sub(p.started) < time.Second || step == p.step && now.Sub(p.shown) < 200*time.Millisecond {
		return
	}
	line := printable.Line(step)
	if done > 0 {
		line += " " + size(done)
	}
	if total > 0 {
		line += fmt.Sprintf(" of %s (%d %%)", size(total), 100*min(done, total)/total)
	}
	switch {
	case p.app.errIsTerminal:
		fmt.Fprintf(p.app.err, "\r\x1b[K%s", line)
		p.drawn = true
	case step != p.step:
		fmt.Fprintln(p.app.err, line)
	}
	p.step, p.shown = step, now
}

// end takes the line away. Idempotent.
func (p *progress) end() {
	if p.drawn {
		fmt.Fprint(p.app.err, "\r\x1b[K")
		p.drawn = false
	}
}

// size of something for a person.
func size(bytes int64) string {
	const units = "kMGTP"
	if bytes < 1000 {
		return fmt.Sprintf("%d B", bytes)
	}
	value := float64(bytes)
	unit := -1
	for value >= 999.5 && unit < len(units)-1 {
		value /= 1000
		unit++
	}
	return fmt.Sprintf("%.3g %cB", value, units[unit])
}

func when(ns int64) string {
	if ns == 0 {
		return ""
	}
	return time.Unix(0, ns).Format("2006-01-02 15:04:05")
}

func shortDigest(digest string) string {
	if hex, ok := strings.CutPrefix(digest, "sha256:"); ok && len(hex) > 12 {
		return hex[:12]
	}
	return printable.Line(digest)
}
