package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/view"
	"github.com/boxwood-rl/boxwood/internal/fault"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) treeCommand() *cobra.Command {
	c := &cobra.Command{Use: "tree", Short: "Make, list, show, close, export and import trees"}
	c.AddCommand(a.treeListCommand(), a.treeShowCommand(), a.treeNewCommand(), a.treeCloseCommand(),
		a.treeExportCommand(), a.treeImportCommand(), a.treeATIFCommand())
	return c
}

func (a *app) treeListCommand() *cobra.Command {
	var labels map[string]string
	c := a.jsonFlag(&cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List trees", Args: cobra.NoArgs,
		Example: "  boxwood tree list --label run=7",
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			reply, err := client.ListTrees(c.Context(), &pb.ListTreesRequest{Labels: labels})
			if err != nil {
				return err
			}
			if a.json {
				return a.printMessage(reply)
			}
			var rows [][]string
			for _, t := range reply.Trees {
				state := "open"
				if t.Closed {
					state = "closed"
				}
				rows = append(rows, []string{t.Id, shortDigest(t.Image), fmt.Sprint(t.NodeCount), fmt.Sprint(t.CheckpointCount),
					fmt.Sprint(t.SandboxCount), state, when(t.CreatedAt), pairs(t.Labels)})
			}
			a.table([]string{"TREE", "IMAGE", "NODES", "CHECKPOINTS", "SANDBOXES", "STATE", "MADE", "LABELS"}, rows)
			return nil
		},
	})
	c.Flags().StringToStringVar(&labels, "label", nil, "only trees with these labels, NAME=VALUE")
	return c
}

func (a *app) treeShowCommand() *cobra.Command {
	var svg, under string
	var ids bool
	c := a.jsonFlag(&cobra.Command{
		Use:   "show TREE",
		Short: "Show a tree: verdicts, who shares which checkpoint, rewards",
		Long: `Shows a tree, a node a line. A node that has its own checkpoint (●) shows the
checkpoint's letter; one that changed nothing (○) shares its parent's, shown as
"=" and the letter. × is withheld: it can't be restored exactly.`,
		Example: `  boxwood tree show tr_01j...
  boxwood tree show tr_01j... --svg tree.svg
  boxwood tree show tr_01j... --ids | less -S`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			nodes, err := client.ListNodes(c.Context(), &pb.ListNodesRequest{TreeId: args[0], Under: under})
			if err != nil {
				return err
			}
			list, err := all(nodes.Recv)
			if err != nil {
				return err
			}
			switch {
			case svg != "":
				if err := writeFile(svg, func(f *os.File) error { return view.SVG(f, "tree "+args[0], list) }); err != nil {
					return err
				}
				fmt.Fprintln(a.out, svg)
				return nil
			case a.json:
				for _, n := range list {
					if err := a.printMessage(n); err != nil {
						return err
					}
				}
				return nil
			}
			fmt.Fprintf(a.out, "tree %s: %s\n", args[0], view.Summarise(list))
			return view.Text(a.out, list, view.TextOptions{Width: a.width, Color: a.color(), IDs: ids || a.width == 0 || a.width >= 130})
		},
	})
	c.Flags().StringVar(&svg, "svg", "", "draw the tree into this file instead")
	c.Flags().StringVar(&under, "under", "", "only this node and what lies below it")
	c.Flags().BoolVar(&ids, "ids", false, "show nodes' ids (the default where there is room)")
	return c
}

func (a *app) treeNewCommand() *cobra.Command {
	var image, node, user, cwd string
	var setup, calls []string
	var labels, env map[string]string
	var without, quiet bool
	c := a.jsonFlag(&cobra.Command{
		Use:   "new (--image IMAGE | --node NODE)",
		Short: "Make a tree and a live sandbox at its root",
		Example: `  boxwood tree new --image boxwood/base:latest --setup 'git clone /src /work' --cwd /work
  SB=$(boxwood tree new --image boxwood/base:latest -q)`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r := &pb.CreateTreeRequest{
				Start: &pb.CreateTreeRequest_Image{Image: image}, WithSandbox: !without, Labels: labels,
				Defaults: &pb.Defaults{User: user, Cwd: cwd, Env: env, AllowCalls: calls},
			}
			if count(image != "", node != "") != 1 {
				return usage(c, fmt.Errorf("name exactly one of --image and --node"))
			}
			if node != "" {
				r.Start = &pb.CreateTreeRequest_NodeId{NodeId: node}
			}
			for _, command := range setup {
				r.Setup = append(r.Setup, &pb.SetupStep{Step: &pb.SetupStep_Command{Command: command}})
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			reply, err := client.CreateTree(c.Context(), r)
			if err != nil {
				return err
			}
			switch {
			case a.json:
				return a.printMessage(reply)
			case quiet:
				fmt.Fprintln(a.out, reply.Sandbox.GetId())
			default:
				fmt.Fprintf(a.out, "tree     %s\nroot     %s\n", reply.Tree.GetId(), reply.Root.GetId())
				if reply.Sandbox != nil {
					fmt.Fprintf(a.out, "sandbox  %s\n", reply.Sandbox.Id)
				}
			}
			return nil
		},
	})
	c.Flags().StringVar(&image, "image", "", "image: a name or digest")
	c.Flags().StringVar(&node, "node", "", "node of another tree")
	c.Flags().StringArrayVar(&setup, "setup", nil, "a line for bash, run once for all trees that ask for the same; may be repeated")
	c.Flags().StringVar(&user, "user", "", "user of its turns")
	c.Flags().StringVar(&cwd, "cwd", "", "working folder of its turns")
	c.Flags().StringSliceVar(&calls, "allow-calls", nil, "what its sandboxes may do beyond the usual: setuid (sudo of users other than root), and the system calls of io_uring, keyring, userfaultfd, perf, namespaces")
	c.Flags().StringToStringVarP(&env, "env", "e", nil, "environment of its turns, NAME=VALUE")
	c.Flags().StringToStringVar(&labels, "label", nil, "labels, NAME=VALUE")
	c.Flags().BoolVar(&without, "no-sandbox", false, "make no sandbox")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print the sandbox's id alone")
	return c
}

func (a *app) treeCloseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "close TREE...", Short: "Release a tree's sandboxes and refuse new work on it", Args: cobra.MinimumNArgs(1),
		Long:    "The nodes of a closed tree stay readable, and other trees can be made from them.",
		Example: "  boxwood tree close tr_01j...",
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			for _, id := range args {
				reply, err := client.CloseTree(c.Context(), &pb.CloseTreeRequest{TreeId: id})
				if err != nil {
					return err
				}
				fmt.Fprintf(a.out, "closed %s, released %d sandboxes\n", id, reply.Released)
			}
			return nil
		},
	}
}

// writeFile makes a file complete or not at all.
func writeFile(path string, fill func(*os.File) error) (err error) {
	failed := func(err error) error { return fault.New(fault.Invalid, "bad_file", "writing %s: %w", path, err) }
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return failed(err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	if err := fill(f); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return failed(err)
	}
	if err := f.Close(); err != nil {
		return failed(err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return failed(err)
	}
	return nil
}
