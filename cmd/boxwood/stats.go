package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/fault"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) statsCommand() *cobra.Command {
	var file, tree, since, until string
	var verdicts []string
	c := a.jsonFlag(&cobra.Command{
		Use:   "stats [TABLE]",
		Short: "List the tables of statistics, summarise one, or write it to a file",
		Long: `Without TABLE, lists the tables. With TABLE, summarises its columns, or writes it
with -o: .parquet (zstd), .arrow (Arrow IPC file) or .arrows (Arrow IPC stream).
"-o -" writes the stream to standard output.`,
		Example: `  boxwood stats
  boxwood stats forks
  boxwood stats turns -o turns.parquet
  boxwood stats turns --since 24h --verdict files,both -o changed.parquet
  boxwood stats nodes --tree tr_01j... -o - | python3 -c 'import sys, pyarrow as pa; print(pa.ipc.open_stream(sys.stdin.buffer).read_pandas())'`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				if file != "" {
					return usage(c, errors.New("-o needs a TABLE"))
				}
				return a.listTables(c.Context())
			}
			asked := &pb.ExportStatsRequest{Table: args[0], TreeId: tree, Verdicts: verdicts}
			for flag, bound := range map[string]*int64{"since": &asked.Since, "until": &asked.Until} {
				if said := c.Flag(flag).Value.String(); said != "" {
					at, err := moment(said, time.Now())
					if err != nil {
						return usage(c, fmt.Errorf("--%s: %w", flag, err))
					}
					*bound = at.UnixNano()
				}
			}
			var write func(io.Reader) error
			switch ext := filepath.Ext(file); {
			case file == "":
				write = a.summarise
			case file == "-":
				write = func(r io.Reader) error { _, err := io.Copy(a.out, r); return err }
			case ext == ".arrow", ext == ".arrows", ext == ".parquet":
				write = func(r io.Reader) error { return a.writeTable(r, file, ext) }
			default:
				return usage(c, fmt.Errorf("the file %q must end in .parquet, .arrow or .arrows", file))
			}
			stream, err := a.openTable(c.Context(), asked)
			if err != nil {
				return err
			}
			return write(stream)
		},
	})
	c.Flags().StringVarP(&file, "output", "o", "", "file to write")
	c.Flags().StringVar(&tree, "tree", "", "only rows of this tree")
	c.Flags().StringVar(&since, "since", "", "only rows from this time on: 2026-01-31T12:00:00Z, or how long ago: 90m")
	c.Flags().StringVar(&until, "until", "", "only rows before this time")
	c.Flags().StringSliceVar(&verdicts, "verdict", nil, "only rows with one of these verdicts: none, files, process, both")
	return c
}

// moment reads a time, or how long before now it was.
func moment(said string, now time.Time) (time.Time, error) {
	if ago, err := time.ParseDuration(said); err == nil && ago >= 0 {
		return now.Add(-ago), nil
	}
	at, err := time.Parse(time.RFC3339Nano, said)
	if err != nil || at.UnixNano() <= 0 {
		return at, fmt.Errorf("%.64q is neither a time such as 2026-01-31T12:00:00Z nor how long ago, such as 90m", said)
	}
	return at, nil
}

func (a *app) listTables(ctx context.Context) error {
	client, err := a.client()
	if err != nil {
		return err
	}
	reply, err := client.ListTables(ctx, &pb.ListTablesRequest{})
	if err != nil {
		return err
	}
	if a.json {
		return a.printMessage(reply)
	}
	var rows [][]string
	for _, t := range reply.Tables {
		rows = append(rows, []string{t.Name, fmt.Sprint(t.Rows), fmt.Sprint(len(t.Columns)), t.Description})
	}
	a.table([]string{"TABLE", "ROWS", "COLUMNS", "WHAT"}, rows)
	return nil
}

// openTable is a table as one Arrow IPC stream, read as it comes.
func (a *app) openTable(ctx context.Context, asked *pb.ExportStatsRequest) (io.Reader, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	chunks, err := client.ExportStats(ctx, asked)
	if err != nil {
		return nil, err
	}
	r := bufio.NewReader(&chunkReader{next: chunks.Recv})
	// The first chunk is awaited here, so that a wrong name is an error before a
	// file is begun.
	if _, err := r.Peek(1); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return r, nil
}

type chunkReader struct {
	next func() (*pb.ExportStatsChunk, error)
	rest []byte
}

func (c *chunkReader) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		chunk, err := c.next()
		if err != nil {
			return 0, err
		}
		c.rest = chunk.Data
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func (a *app) writeTable(r io.Reader, path, ext string) error {
	var rows int64 = -1
	err := writeFile(path, func(f *os.File) (err error) {
		switch ext {
		case ".parquet":
			rows, err = stats.WriteParquet(r, f)
		case ".arrow":
			rows, err = stats.WriteArrowFile(r, f)
		default:
			_, err = io.Copy(f, r)
		}
		return err
	})
	if err != nil {
		return err
	}
	if rows >= 0 {
		a.note("%d rows", rows)
	}
	fmt.Fprintln(a.out, path)
	return nil
}

// columnSummary gathers what summarise prints of one column.
type columnSummary struct {
	numbers []int64
	words   map[string]int
	nulls   int
}

// summarise prints the median, 95th percentile and maximum of numbers and the
// shares of words; other columns have no summary.
func (a *app) summarise(r io.Reader) error {
	in, err := ipc.NewReader(r)
	if err != nil {
		return fault.New(fault.Internal, "bad_stream", "reading the table: %w", err)
	}
	defer in.Release()
	columns := make([]columnSummary, in.Schema().NumFields())
	var total int64
	for in.Next() {
		total += in.Record().NumRows()
		for i, col := range in.Record().Columns() {
			columns[i].add(col)
		}
	}
	if err := in.Err(); err != nil {
		return fault.New(fault.Internal, "bad_stream", "reading the table: %w", err)
	}
	var rows [][]string
	for i, f := range in.Schema().Fields() {
		if cells := columns[i].cells(f); cells != nil {
			rows = append(rows, append([]string{f.Name}, cells...))
		}
	}
	fmt.Fprintf(a.out, "%d rows\n", total)
	if total > 0 {
		a.table([]string{"COLUMN", "MEDIAN", "P95", "MAX", "VALUES"}, rows)
	}
	return nil
}

func (s *columnSummary) add(col arrow.Array) {
	if s.words == nil {
		s.words = map[string]int{}
	}
	for i := range col.Len() {
		if col.IsNull(i) {
			s.nulls++
			continue
		}
		switch col := col.(type) {
		case *array.Int64:
			s.numbers = append(s.numbers, col.Value(i))
		case *array.Boolean:
			s.words[fmt.Sprint(col.Value(i))]++
		case *array.Dictionary:
			s.words[col.Dictionary().ValueStr(col.GetValueIndex(i))]++
		}
	}
}

func (s *columnSummary) cells(f arrow.Field) []string {
	unit, _ := f.Metadata.GetValue("unit")
	show := func(v int64) string {
		switch unit {
		case "ns":
			return millis(v)
		case "bytes":
			return size(v)
		}
		return fmt.Sprint(v)
	}
	cells := make([]string, 4)
	if n := len(s.numbers); n > 0 {
		slices.Sort(s.numbers)
		cells[0], cells[1], cells[2] = show(s.numbers[(n-1)/2]), show(s.numbers[(n-1)*95/100]), show(s.numbers[n-1])
	} else if len(s.words) == 0 {
		return nil
	}
	var words []string
	for word, n := range s.words {
		words = append(words, fmt.Sprintf("%s %d", word, n))
	}
	slices.Sort(words)
	if s.nulls > 0 {
		words = append(words, fmt.Sprintf("(null %d)", s.nulls))
	}
	cells[3] = strings.Join(words, ", ")
	return cells
}
