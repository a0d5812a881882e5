package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/boxwood-rl/boxwood/internal/fault"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) treeExportCommand() *cobra.Command {
	var to string
	var without, secrets bool
	c := &cobra.Command{
		Use:   "export TREE|NODE",
		Short: "Write a tree, with its states, as one archive",
		Long: `Writes a tree, or a node and what lies below it, with checkpoints, values and
payloads, as one archive. Another host that has the same image makes the same
nodes of it, which fork to the same states. Pending captures are waited for. The
image isn't in it.

What was saved of processes, shells and dumps, has all that they had in memory, keys
and passwords included: --without-processes leaves it out. Dumps of processes that were
given secrets (--secret-env) are left out unless --with-secrets asks for them.`,
		Example: `  boxwood tree export tr_01j... -o rollout.tree
  boxwood tree export nd_01j... -o - | ssh other boxwood tree import -`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			r := &pb.ExportTreeRequest{TreeId: args[0]}
			if strings.HasPrefix(args[0], "nd_") {
				r = &pb.ExportTreeRequest{NodeId: args[0]}
			}
			r.WithoutProcesses, r.WithSecrets = without, secrets
			client, err := a.client()
			if err != nil {
				return err
			}
			stream, err := client.ExportTree(c.Context(), r)
			if err != nil {
				return err
			}
			if to == "-" {
				return writeArchive(a.out, to, stream)
			}
			if to == "" {
				to = args[0] + ".tree"
			}
			if err := writeFile(to, func(f *os.File) error { return writeArchive(f, to, stream) }); err != nil {
				return err
			}
			fmt.Fprintln(a.out, to)
			return nil
		},
	}
	c.Flags().StringVarP(&to, "output", "o", "", `file to write, "-": standard output (default: the id and ".tree")`)
	c.Flags().BoolVar(&secrets, "with-secrets", false, "carry dumps of processes that were given secrets, too")
	c.Flags().BoolVar(&without, "without-processes", false, "leave out what was saved of processes; nodes that have any arrive withheld")
	return c
}

// writeArchive writes an export as it comes; to names w in an error.
func writeArchive(w io.Writer, to string, stream grpc.ServerStreamingClient[pb.ExportTreeChunk]) error {
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := w.Write(m.GetData()); err != nil {
			return fault.New(fault.Invalid, "bad_file", "writing %s: %w", to, err)
		}
	}
}

func (a *app) treeImportCommand() *cobra.Command {
	start := &pb.ImportTreeStart{}
	var dumps string
	c := a.jsonFlag(&cobra.Command{
		Use:   "import FILE",
		Short: "Make a tree of an archive",
		Long: `Makes a tree of an archive that "tree export" wrote ("-": standard input): all of it or
nothing. Its image must be here, under the same digest. Nodes keep their ids.

An archive that has dumps of processes is refused unless --dumps says what becomes of
them: "trust", which root may say, restores them, and whoever wrote the archive can then do with this host
what they like; "leave" withholds their nodes. Dumps made under another kernel or CRIU
are restored once and compared before the import is done; those that come out
differently are withheld.`,
		Example: `  boxwood tree import rollout.tree
  boxwood tree import rollout.tree --dumps trust`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			how, ok := map[string]pb.ImportTreeStart_Dumps{"": pb.ImportTreeStart_DUMPS_UNSPECIFIED, "trust": pb.ImportTreeStart_DUMPS_TRUST,
				"leave": pb.ImportTreeStart_DUMPS_LEAVE}[dumps]
			if !ok {
				return fault.New(fault.Invalid, "bad_dumps", `--dumps is "trust" or "leave", not %q`, dumps)
			}
			start.Dumps = how
			in := a.in
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return fault.New(fault.Invalid, "bad_file", "reading the archive: %w", err)
				}
				defer f.Close()
				in = f
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			reply, err := sendArchive(c, client, bufio.NewReader(in), start)
			if err != nil {
				return err
			}
			if a.json {
				return a.printMessage(reply)
			}
			fmt.Fprintf(a.out, "tree     %s\nroot     %s\nnodes    %d\n", reply.Tree.GetId(), reply.Tree.GetRootId(), reply.Nodes)
			if reply.Withheld > 0 {
				fmt.Fprintf(a.out, "withheld %d that could be forked where the archive comes from\n", reply.Withheld)
			}
			return nil
		},
	})
	c.Flags().StringSliceVar(&start.AllowCalls, "allow-calls", nil, "groups of system calls that the archive's tree may go on allowing its sandboxes (see tree new)")
	c.Flags().BoolVar(&start.NewIds, "new-ids", false, "give tree, nodes and checkpoints new ids, so that a tree can be had twice")
	c.Flags().StringVar(&dumps, "dumps", "", `what becomes of dumps of processes: "trust" or "leave" (default: refuse)`)
	return c
}

func sendArchive(c *cobra.Command, client pb.BoxwoodClient, in io.Reader, start *pb.ImportTreeStart) (*pb.ImportTreeResponse, error) {
	stream, err := client.ImportTree(c.Context())
	if err != nil {
		return nil, err
	}
	err = stream.Send(&pb.ImportTreeRequest{Part: &pb.ImportTreeRequest_Start{Start: start}})
	buf := make([]byte, 256<<10)
	for err == nil {
		var n int
		if n, err = io.ReadFull(in, buf); n > 0 {
			if serr := stream.Send(&pb.ImportTreeRequest{Part: &pb.ImportTreeRequest_Chunk{Chunk: buf[:n]}}); serr != nil {
				err = serr
			}
		}
	}
	if err != io.EOF && err != io.ErrUnexpectedEOF {
		return nil, fault.New(fault.Invalid, "bad_file", "reading the archive: %w", err)
	}
	return stream.CloseAndRecv() // also says why the daemon took no more
}
