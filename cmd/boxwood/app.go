package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// defaultSocket is where serve listens and clients look.
const defaultSocket = "/run/boxwood/boxwood.sock"

// maxMessage is the largest message that the daemon sends.
const maxMessage = 16 << 20

// app is what commands share: where they read and write, and how they reach the
// daemon.
type app struct {
	in       io.Reader
	out, err io.Writer
	// width of the terminal that out is; 0: it is none, and gets no colours and
	// no progress that overwrites itself.
	width int
	// errIsTerminal is for progress, which goes to err.
	errIsTerminal bool
	getenv        func(string) string

	address string
	json    bool
	conn    *grpc.ClientConn
}

// terminal is the app of a real process.
func terminal() *app {
	a := &app{in: os.Stdin, out: os.Stdout, err: os.Stderr, getenv: os.Getenv}
	a.width = columns(os.Stdout)
	a.errIsTerminal = columns(os.Stderr) > 0
	return a
}

func columns(f *os.File) int {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	if size.Col == 0 {
		return 80
	}
	return int(size.Col)
}

func (a *app) color() bool { return a.width > 0 && a.getenv("NO_COLOR") == "" }

// execute runs one command line and gives the exit status.
func execute(ctx context.Context, args []string, a *app) int {
	root := newRoot(a)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if a.conn != nil {
		a.conn.Close()
	}
	var status exitStatus
	if err == nil || errors.As(err, &status) {
		return int(status)
	}
	a.report(err)
	return failureStatus
}

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "boxwood",
		Short: "Run agents' turns in sandboxes and fork any of them, many times, in milliseconds",
		Long: `Boxwood runs the turns of an agent in sandboxes, keeps every rollout as a tree
of nodes, saves state only where a turn changed something, and forks any node
into live sandboxes in milliseconds.`,
		Example: `  boxwood doctor
  boxwood serve --state /var/lib/boxwood &
  boxwood image build-base
  boxwood run --image boxwood/base:latest -- uname -a
  boxwood tree show TREE`,
		SilenceUsage: true, SilenceErrors: true,
	}
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.PersistentFlags().StringVar(&a.address, "address", "",
		"the daemon's socket (default $BOXWOOD_ADDRESS, else "+defaultSocket+")")
	root.AddGroup(&cobra.Group{ID: "host", Title: "On the host:"}, &cobra.Group{ID: "grow", Title: "Growing trees:"},
		&cobra.Group{ID: "look", Title: "Looking at them:"})
	for group, commands := range map[string][]*cobra.Command{
		"host": {a.serveCommand(), a.doctorCommand(), a.checkCommand(), a.imageCommand(), a.versionCommand()},
		"grow": {a.runCommand(), a.execCommand(), a.forkCommand(), a.rollbackCommand(), a.releaseCommand(), a.sandboxCommand(),
			a.gradeCommand(), a.annotateCommand(), a.pruneCommand(), a.pinCommand(), a.unpinCommand(), a.replayCommand()},
		"look": {a.treeCommand(), a.nodeCommand(), a.diffCommand(), a.explainCommand(), a.shellCommand(), a.bundleCommand(), a.statsCommand(), a.reportCommand(), a.topCommand()},
	} {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return usage(c, err) })
	wrapArgs(root)
	return root
}

// wrapArgs makes wrong arguments failures with a hint, like all others.
func wrapArgs(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			if err := check(c, args); err != nil {
				return usage(c, err)
			}
			return nil
		}
	} else if c.HasSubCommands() {
		c.Args = func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage(c, fmt.Errorf("there is no command %q", c.CommandPath()+" "+args[0]))
			}
			return nil
		}
		if !c.Runnable() {
			c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
		}
	}
	for _, sub := range c.Commands() {
		wrapArgs(sub)
	}
}

func usage(c *cobra.Command, err error) error {
	return fault.New(fault.Invalid, "usage", "%w", err).WithHint("%s --help shows how", c.CommandPath())
}

// target is the daemon's address as gRPC names it: a path, unix:PATH or host:port.
func (a *app) target() string {
	address := a.address
	if address == "" {
		address = a.getenv("BOXWOOD_ADDRESS")
	}
	if address == "" {
		address = defaultSocket
	}
	if strings.HasPrefix(address, "unix:") || !strings.Contains(address, "/") && strings.Contains(address, ":") {
		return address
	}
	if !strings.HasPrefix(address, "/") {
		if dir, err := os.Getwd(); err == nil {
			address = dir + "/" + address
		}
	}
	return "unix:" + address
}

// client connects at the first call of an RPC, not here.
func (a *app) client() (pb.BoxwoodClient, error) {
	if a.conn == nil {
		creds, token, err := a.credentials()
		if err != nil {
			return nil, err
		}
		conn, err := grpc.NewClient(a.target(), grpc.WithTransportCredentials(creds), token,
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)))
		if err != nil {
			return nil, fault.New(fault.Invalid, "bad_address", "connecting to %s: %w", a.target(), err)
		}
		a.conn = conn
	}
	return pb.NewBoxwoodClient(a.conn), nil
}

// credentials are those of the environment: a token, and over TCP the authority that signed the daemon's certificate and a
// certificate of one's own. A token is never sent in the clear.
func (a *app) credentials() (credentials.TransportCredentials, grpc.DialOption, error) {
	overTLS := !strings.HasPrefix(a.target(), "unix:")
	creds, option := insecure.NewCredentials(), grpc.DialOption(grpc.EmptyDialOption{})
	if token := a.getenv("BOXWOOD_TOKEN"); token != "" {
		option = grpc.WithPerRPCCredentials(bearer{token, overTLS})
	}
	if !overTLS {
		return creds, option, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS13}
	bad := func(err error) (credentials.TransportCredentials, grpc.DialOption, error) {
		return nil, nil, fault.New(fault.Invalid, "bad_certificate", "BOXWOOD_CA, BOXWOOD_CERT and BOXWOOD_KEY name files of certificates and a key: %w", err)
	}
	if file := a.getenv("BOXWOOD_CA"); file != "" {
		text, err := os.ReadFile(file)
		if c.RootCAs = x509.NewCertPool(); err == nil && !c.RootCAs.AppendCertsFromPEM(text) {
			err = fmt.Errorf("%s has no certificate in it", file)
		}
		if err != nil {
			return bad(err)
		}
	}
	if file := a.getenv("BOXWOOD_CERT"); file != "" {
		own, err := tls.LoadX509KeyPair(file, a.getenv("BOXWOOD_KEY"))
		if err != nil {
			return bad(err)
		}
		c.Certificates = []tls.Certificate{own}
	}
	return credentials.NewTLS(c), option, nil
}

// bearer sends a token with every call.
type bearer struct {
	token string
	over  bool // TCP
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token}, nil
}
func (b bearer) RequireTransportSecurity() bool { return b.over }

// jsonFlag adds --json to a command that reads.
func (a *app) jsonFlag(c *cobra.Command) *cobra.Command {
	c.Flags().BoolVar(&a.json, "json", false, "print JSON with the names of the service; bytes are base64")
	return c
}

// printMessage prints a message of the service as JSON.
func (a *app) printMessage(m proto.Message) error {
	data, err := toJSON(m)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.out, "%s\n", data)
	return err
}

// printJSON prints what is no message of the service as JSON.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// toJSON is protojson without its random blanks.
func toJSON(m proto.Message) ([]byte, error) {
	data, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = json.Indent(&b, data, "", "  ")
	return b.Bytes(), err
}

// table prints aligned columns; all cells are made printable.
func (a *app) table(header []string, rows [][]string) {
	widths := make([]int, len(header))
	all := append([][]string{header}, rows...)
	for _, row := range all {
		for i := range row {
			row[i] = printable.Line(row[i])
			widths[i] = max(widths[i], printable.Width(row[i]))
		}
	}
	for _, row := range all {
		var line strings.Builder
		for i, cell := range row {
			line.WriteString(printable.Pad(cell, widths[i]+2))
		}
		fmt.Fprintln(a.out, strings.TrimRight(line.String(), " "))
	}
}

// note is a line for people on standard error, left out where nobody looks.
func (a *app) note(format string, args ...any) {
	if a.errIsTerminal {
		fmt.Fprintf(a.err, format+"\n", args...)
	}
}
