package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/report"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) reportCommand() *cobra.Command {
	var page, pictures string
	var trees []string
	c := &cobra.Command{
		Use:   "report [FILE...]",
		Short: "Draw what trees and replays did: a page, pictures and figures",
		Long: `Draws verdicts by trajectory and tool, what was captured and saved, timelines,
exposed delays, fork latencies and the tree: as one HTML page that needs nothing
beside it (-o), as pictures for papers (--png), and in numbers (--json).

FILE is a table that "stats" wrote (.parquet, .arrow, .arrows), or what
"replay --json" printed (.json, .jsonl): then the report is of its trajectories, and
what is no evidence is left out. Without a table, the daemon's are read. Of the
tables nodes, turns, captures and forks each gives what it has.`,
		Example: `  boxwood report -o report.html
  boxwood replay --json runs/ >replay.jsonl; boxwood report replay.jsonl -o report.html
  boxwood report nodes.parquet turns.parquet captures.parquet forks.parquet --png pictures`,
		RunE: func(c *cobra.Command, files []string) error {
			if page == "" && pictures == "" && !a.json {
				return usage(c, errors.New("one of -o, --png and --json says what to make"))
			}
			return a.makeReport(c.Context(), files, trees, page, pictures)
		},
	}
	c.Flags().StringVarP(&page, "output", "o", "", `page to write, "-": standard output`)
	c.Flags().StringVar(&pictures, "png", "", "folder to write a picture of each figure to")
	c.Flags().StringArrayVar(&trees, "tree", nil, "only this tree (may be given more than once)")
	c.Flags().BoolVar(&a.json, "json", false, "print the figures as JSON")
	return c
}

func (a *app) makeReport(ctx context.Context, files, trees []string, to, pictures string) error {
	var data report.Data
	var sources []string
	tables := false
	for _, path := range files {
		table, err := data.AddFile(path)
		if err != nil {
			return err
		}
		tables = tables || table
		sources = append(sources, printable.Line(filepath.Base(path)))
	}
	if !tables {
		of := trees
		if len(of) == 0 {
			of = data.Trees()
		}
		if len(of) == 0 && len(files) == 0 {
			of = []string{""} // all
		}
		for _, table := range report.Tables {
			for _, tree := range of {
				stream, err := a.openTable(ctx, &pb.ExportStatsRequest{Table: table, TreeId: tree})
				if err == nil {
					err = data.AddStream(stream)
				}
				if err != nil {
					return err
				}
			}
		}
		sources = append(sources, "the tables of the daemon at "+a.target())
	}
	figures := data.Figures(trees)
	if pictures != "" {
		if err := a.writePictures(pictures, figures); err != nil {
			return err
		}
	}
	write := func(w io.Writer) error { return report.WriteHTML(w, "Boxwood report", sources, figures) }
	switch to {
	case "":
	case "-":
		if err := write(a.out); err != nil {
			return err
		}
	default:
		if err := writeFile(to, func(f *os.File) error { return write(f) }); err != nil {
			return err
		}
		if !a.json {
			fmt.Fprintln(a.out, to)
		}
	}
	if a.json {
		return report.WriteJSON(a.out, figures)
	}
	return nil
}

func (a *app) writePictures(folder string, figures []*report.Figure) error {
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return fault.New(fault.Invalid, "bad_file", "making a folder for pictures: %w", err)
	}
	for _, f := range figures {
		path := filepath.Join(folder, f.Name+".png")
		if !f.Draws() {
			continue
		}
		if err := writeFile(path, func(out *os.File) error { return f.WritePNG(out) }); err != nil {
			return err
		}
		if !a.json {
			fmt.Fprintln(a.out, path)
		}
	}
	return nil
}
