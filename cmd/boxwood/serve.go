package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/metrics"
	"github.com/boxwood-rl/boxwood/engine/service"
	"github.com/boxwood-rl/boxwood/engine/witness"
	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/doctor"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/privileges"
)

// shutdownLimit is how long running turns and captures get when the daemon is
// told to stop; what isn't done then is found again at the next start.
const shutdownLimit = 20 * time.Second

// serveFlags as given.
type serveFlags struct {
	keepDepth, keepCount                                                                    int
	keepBytes                                                                               string
	keepAge                                                                                 time.Duration
	state, socket, group, pool, poolSize, runDir, cgroup, criu, level, format, cpus, memory string
	zygotes, maxSandboxes                                                                   int
	lease                                                                                   time.Duration
	audit, verify                                                                           float64
	paranoid                                                                                bool
	imports, ignore                                                                         []string
	listen, cert, key, clientCA, clients                                                    string
	rebuild, stopOnEOF                                                                      bool
	metrics                                                                                 string
	forkQueue                                                                               int
}

func (a *app) serveCommand() *cobra.Command {
	var f serveFlags
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon",
		Long: `Runs the daemon in the foreground until SIGTERM or SIGINT. All that it keeps lies
in the state folder: the pool (a sparse file with a btrfs, made at the first
start), the tree's log, the tables of statistics. It logs to standard error and
prints "ready" and the socket once it answers.`,
		Example: `  boxwood serve
  boxwood serve --state /data/boxwood --pool-size 200G --socket-group trainers`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return a.serve(c.Context(), f) },
	}
	c.Flags().StringVar(&f.state, "state", "/var/lib/boxwood", "folder of all state")
	c.Flags().StringVar(&f.socket, "socket", defaultSocket, "unix socket to listen on, for root alone")
	c.Flags().StringVar(&f.group, "socket-group", "", "group that may use the socket, too; its members are as good as root in the sandboxes")
	c.Flags().StringArrayVar(&f.imports, "import-from", nil, "folder of root's that other users may import images from; root may import any (may be repeated)")
	c.Flags().StringVar(&f.clients, "clients", "", "file that says who may do what, and how much; without it whoever may use the socket may do all")
	c.Flags().StringVar(&f.listen, "listen", "", "HOST:PORT to listen on as well, over TLS, for the clients of --clients")
	c.Flags().StringVar(&f.cert, "tls-cert", "", "the daemon's certificate for --listen")
	c.Flags().StringVar(&f.key, "tls-key", "", "its key")
	c.Flags().StringVar(&f.clientCA, "tls-client-ca", "", "certificate of the authority that signs clients' certificates; without it clients need tokens")
	c.Flags().StringVar(&f.metrics, "metrics", "", "HOST:PORT on which Prometheus may read counters at /metrics, in the clear and asking nobody who he is; :PORT is on 127.0.0.1 alone (default off)")
	c.Flags().StringVar(&f.poolSize, "pool-size", "", "size of the pool's file, such as 100G; it is sparse (default: most of the disk)")
	c.Flags().StringVar(&f.pool, "pool", "", "folder on an existing btrfs to use instead of a file")
	c.Flags().BoolVar(&f.rebuild, "rebuild-pool", false, "if the pool is damaged, start over with an empty one: images and captured states are lost")
	c.Flags().IntVar(&f.zygotes, "zygotes", 0, "processes kept waiting in fresh namespaces (default 64, which hold 16 MiB)")
	c.Flags().IntVar(&f.maxSandboxes, "max-sandboxes", 0, "sandboxes that may live at once (default 2000)")
	c.Flags().IntVar(&f.forkQueue, "fork-queue", 0, "children of forks that may be on their way at once, of one tree half as many; more are refused with when to try again (default 4096)")
	c.Flags().DurationVar(&f.lease, "lease", 0, "how long a sandbox lives without a call (default 30m)")
	c.Flags().Float64Var(&f.audit, "audit", 0, "share of turns, 0 to 1, whose verdict is compared with what really changed")
	c.Flags().Float64Var(&f.verify, "verify", 0, "share of captures, 0 to 1, whose children's files are all compared with what the parent saw when it was frozen")
	c.Flags().BoolVar(&f.paranoid, "paranoid", false, "compare the memory of restored processes with what their parents had when they were saved")
	c.Flags().StringSliceVar(&f.ignore, "ignore-processes", nil, "names of commands whose processes count for no verdict, and aren't kept where nothing else has to be; at your own risk (default none)")
	c.Flags().IntVar(&f.keepCount, "keep-states", 0, "saved states that each tree keeps; the oldest go, except on the way to what is pinned or lives (default all)")
	c.Flags().StringVar(&f.keepBytes, "keep-bytes", "", "what saved states may hold in all, such as 100G (default all)")
	c.Flags().DurationVar(&f.keepAge, "keep-age", 0, "how long saved states are kept (default for ever)")
	c.Flags().IntVar(&f.keepDepth, "keep-depth", 0, "how far below the root states are kept (default anywhere)")
	c.Flags().StringVar(&f.runDir, "run-dir", "", "folder of the sandboxes' control sockets (default: on a tmpfs of the host)")
	c.Flags().StringVar(&f.cgroup, "cgroup", "", `name of Boxwood's cgroup (default "boxwood")`)
	c.Flags().StringVar(&f.cpus, "cpus", "", `cores for the daemon and its sandboxes, such as "4-7", to keep them off the trainer's (default all)`)
	c.Flags().StringVar(&f.memory, "memory", "", "memory of all sandboxes together, such as 64G (default no bound)")
	c.Flags().BoolVar(&f.stopOnEOF, "stop-on-eof", false, "stop when standard input ends, as it does with the process that holds its other end")
	c.Flags().StringVar(&f.criu, "criu", "", `CRIU, which saves processes; "none" does without (default: as boxwood doctor finds it)`)
	c.Flags().StringVar(&f.level, "log-level", "info", "debug, info, warn or error")
	c.Flags().StringVar(&f.format, "log-format", "text", "text or json")
	return c
}

// options turns flags into the engine's.
func (f serveFlags) options() (o engine.OpenOptions, err error) {
	bad := func(format string, args ...any) (engine.OpenOptions, error) {
		return o, fault.New(fault.Invalid, "usage", format, args...).WithHint("boxwood serve --help shows how")
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.level)); err != nil {
		return bad("there is no log level %q", f.level)
	}
	handler := &slog.HandlerOptions{Level: level}
	switch f.format {
	case "text":
		o.Log = slog.New(slog.NewTextHandler(os.Stderr, handler))
	case "json":
		o.Log = slog.New(slog.NewJSONHandler(os.Stderr, handler))
	default:
		return bad("there is no log format %q", f.format)
	}
	if !(f.audit >= 0 && f.audit <= 1) {
		return bad("--audit takes a share from 0 to 1, not %g", f.audit)
	}
	if !(f.verify >= 0 && f.verify <= 1) {
		return bad("--verify takes a share from 0 to 1, not %g", f.verify)
	}
	if f.paranoid {
		if err := witness.CanRemember(); err != nil {
			return o, fault.New(fault.Unsupported, "no_page_lists", "--paranoid can't be had here: %w", err)
		}
	}
	o.Audit, o.Verify, o.Paranoid = f.audit, f.verify, f.paranoid
	if err := service.Imports(f.imports).Check(); err != nil {
		return o, err
	}
	o.IgnoreProcesses = f.ignore
	o.Retention = engine.Retention{Depth: f.keepDepth, Count: f.keepCount, Age: f.keepAge}
	if f.keepBytes != "" {
		if o.Retention.Bytes, err = parseSize(f.keepBytes); err != nil {
			return bad("--keep-bytes: %v", err)
		}
	}
	if f.keepDepth < 0 || f.keepCount < 0 || f.keepAge < 0 {
		return bad("--keep-depth, --keep-states and --keep-age can't be negative")
	}
	if f.zygotes < 0 || f.maxSandboxes < 0 || f.lease < 0 {
		return bad("--zygotes, --max-sandboxes and --lease can't be negative")
	}
	if f.poolSize != "" {
		if o.PoolBytes, err = parseSize(f.poolSize); err != nil {
			return bad("--pool-size: %v", err)
		}
	}
	if f.metrics != "" {
		if _, _, err := net.SplitHostPort(f.metrics); err != nil {
			return bad("--metrics takes HOST:PORT: %v", err)
		}
	}
	if f.memory != "" {
		if o.Share.MemoryBytes, err = parseSize(f.memory); err != nil {
			return bad("--memory: %v", err)
		}
	}
	if f.cpus != "" {
		if _, err := cgroup.ParseCores(f.cpus); err != nil {
			return bad("--cpus: %v", err)
		}
		o.Share.Cores = f.cpus
	}
	if o.StateDir, err = filepath.Abs(f.state); err != nil {
		return bad("--state: %v", err)
	}
	switch o.CRIU = f.criu; f.criu {
	case "":
		o.CRIU = doctor.FindCRIU()
	case "none":
		o.CRIU = ""
	}
	o.RunDir, o.PoolDir, o.Cgroup, o.RebuildPool = f.runDir, f.pool, f.cgroup, f.rebuild
	if f.forkQueue < 0 {
		return bad("--fork-queue can't be negative")
	}
	o.Zygotes, o.MaxSandboxes, o.ForkQueue, o.Lease = f.zygotes, f.maxSandboxes, f.forkQueue, f.lease
	return o, nil
}

func (a *app) serve(ctx context.Context, f serveFlags) error {
	o, err := f.options()
	if err != nil {
		return err
	}
	surface, err := f.surface()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return fault.New(fault.Denied, "not_root", "the daemon must run as root: it makes namespaces, mounts and cgroups").
			WithHint("sudo boxwood serve")
	}
	if err := engine.PrivateMounts(); err != nil {
		return err
	}
	if err := privileges.Drop(); errors.Is(err, privileges.ErrCgo) {
		o.Log.Warn("the daemon keeps all of root's privileges", "error", err)
	} else if err != nil {
		return err
	}
	// A second signal must not cut the shutdown short, which is bounded anyway: a
	// terminal's ^C and a script's kill often come both.
	ctx, unregister := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer unregister()
	if f.stopOnEOF {
		var stop context.CancelFunc
		ctx, stop = context.WithCancel(ctx)
		go func() {
			defer stop()
			io.Copy(io.Discard, os.Stdin)
		}()
	}
	slog.SetDefault(o.Log)
	o.ClientWeights = surface.access.Weights()
	e, err := engine.Open(ctx, o)
	if err != nil {
		return err
	}
	stop := func(cause error) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownLimit)
		defer cancel()
		return errors.Join(cause, e.Close(ctx))
	}
	listener, err := service.Listen(f.socket, f.group)
	if err != nil {
		return stop(err)
	}
	s := service.New(e, o.Log, service.Options{Version: fullVersion(), Imports: f.imports, Access: surface.access})
	servers := []*grpc.Server{s.Server(nil)}
	failed := make(chan error, 3)
	go func() { failed <- servers[0].Serve(listener) }()
	if surface.tls != nil {
		servers = append(servers, s.Server(surface.tls))
		go func() { failed <- servers[1].Serve(surface.tcp) }()
		o.Log.Info("listening", "address", surface.tcp.Addr().String())
	}
	if f.metrics != "" {
		counters, err := f.serveMetrics(e, o.Log, failed)
		if err != nil {
			return stop(err)
		}
		defer counters.Close()
	}
	fmt.Fprintln(a.out, "ready", f.socket)
	select {
	case err = <-failed:
		return stop(err)
	case <-ctx.Done():
	}
	o.Log.Info("stopping")
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownLimit)
	defer cancel()
	for _, server := range servers {
		service.Shutdown(grace, server)
	}
	return stop(nil)
}

// serveMetrics answers Prometheus; on 127.0.0.1 unless a host is named.
func (f serveFlags) serveMetrics(e *engine.Engine, log *slog.Logger, failed chan<- error) (*http.Server, error) {
	address := f.metrics
	if strings.HasPrefix(address, ":") {
		address = "127.0.0.1" + address
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fault.New(fault.Invalid, "bad_metrics", "listening on %s for --metrics: %w", address, err)
	}
	s := metrics.Server(e)
	go func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("serving metrics: %w", err)
		}
	}()
	log.Info("metrics", "url", "http://"+l.Addr().String()+"/metrics")
	if !l.Addr().(*net.TCPAddr).IP.IsLoopback() {
		log.Warn("whoever reaches this host may read the daemon's counters", "address", l.Addr().String())
	}
	return s, nil
}

// surface is who may speak to the daemon.
type surface struct {
	access *service.Access
	tls    *tls.Config
	tcp    net.Listener // whose connections wait until the daemon is ready
}

func (f serveFlags) surface() (s surface, err error) {
	if f.group != "" {
		if _, err := service.GroupID(f.group); err != nil {
			return s, err
		}
	}
	if f.clients != "" {
		if s.access, err = service.ReadAccess(f.clients); err != nil {
			return s, err
		}
	}
	switch {
	case f.listen == "" && f.cert+f.key+f.clientCA != "":
		return s, fault.New(fault.Invalid, "usage", "--tls-cert, --tls-key and --tls-client-ca are for --listen, which isn't there")
	case f.listen == "":
		return s, nil
	case f.clients == "" || f.cert == "" || f.key == "":
		return s, fault.New(fault.Invalid, "usage", "--listen needs --tls-cert, --tls-key and --clients: nothing is said in the clear, and nobody is let in unknown")
	}
	if s.tls, err = service.TLS(f.cert, f.key, f.clientCA); err == nil {
		s.tcp, err = service.ListenTCP(f.listen)
	}
	return s, err
}

// parseSize reads "100G", "1.5T", "4096": powers of 1024, as disks' tools have it.
func parseSize(s string) (int64, error) {
	number, unit := strings.TrimSuffix(strings.TrimSuffix(s, "B"), "i"), int64(1)
	if i := strings.IndexByte("KMGT", (number + " ")[max(0, len(number)-1)]); i >= 0 && number != "" {
		unit <<= 10 * (i + 1)
		number = number[:len(number)-1]
	}
	value, err := strconv.ParseFloat(number, 64)
	if err != nil || math.IsNaN(value) || value <= 0 || value*float64(unit) > 1<<60 {
		return 0, fmt.Errorf("%q is not a size such as 100G", s)
	}
	return int64(value * float64(unit)), nil
}
