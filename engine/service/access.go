package service

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// An Account is a client as an administrator lets him in, and what he may do. Zero values: nothing beyond the trees that he makes
// himself, no group of system calls, and no bound.
type Account struct {
	Name string `json:"name"`

	// How he is known: by the kernel on the unix socket, by a token, or by the common name of a certificate.
	UIDs        []int  `json:"uids,omitempty"`
	TokenSHA256 string `json:"token_sha256,omitempty"` // in hex
	Certificate string `json:"certificate,omitempty"`

	Verbs    []string `json:"verbs,omitempty"`     // of the list in verbOf; empty: all
	Images   []string `json:"images,omitempty"`    // names or digests, with * as in a shell; empty: all
	AllTrees bool     `json:"all_trees,omitempty"` // not only his own

	AllowCalls []string `json:"allow_calls,omitempty"` // groups of system calls that his trees may ask for
	TrustDumps bool     `json:"trust_dumps,omitempty"` // his archives may have processes in them: whoever wrote such a one can be root of the host

	// Weight of his work beside that of others, where there is too little for all; 0: 1.
	Weight float64 `json:"weight,omitempty"`

	// Of all his live sandboxes together; 0: no bound. Memory and disk count by their limits.
	MaxSandboxes   int   `json:"max_sandboxes,omitempty"`
	MaxMemoryBytes int64 `json:"max_memory_bytes,omitempty"`
	MaxDiskBytes   int64 `json:"max_disk_bytes,omitempty"`

	// Of the states that are saved for his trees, each counted with what it added; 0: no bound.
	MaxSavedBytes int64 `json:"max_saved_bytes,omitempty"`
}

// Access is who may do what. Nil: whoever can connect may do all. Root, on the unix socket, always may.
type Access struct {
	accounts []*Account
	byUID    map[int]*Account
	byToken  map[[sha256.Size]byte]*Account
	byName   map[string]*Account // of a certificate

	mu     sync.Mutex
	usages map[*Account]*usage

	saved saved
}

// usage is what an account holds. Sandboxes of calls that are under way count by what was asked for.
type usage struct {
	live    map[ids.Sandbox]tree.Limits
	pending want
}

type want struct {
	sandboxes    int
	memory, disk int64
}

func (w *want) add(n int, l tree.Limits) {
	w.sandboxes += n
	w.memory += int64(n) * l.MemoryBytes
	w.disk += int64(n) * l.DiskBytes
}

// ReadAccess reads the accounts from a file, which must be root's and nobody else's to write to.
func ReadAccess(file string) (*Access, error) {
	bad := func(format string, args ...any) (*Access, error) {
		return nil, fault.New(fault.Invalid, "bad_clients", "%s: "+format, append([]any{file}, args...)...)
	}
	f, err := os.Open(file)
	if err != nil {
		return bad("%w", err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Uid != 0 || st.Mode&0o022 != 0 {
		return bad("it must be a file of root's that nobody else can write to")
	}
	var all struct {
		Clients []*Account `json:"clients"`
	}
	d := json.NewDecoder(f)
	d.DisallowUnknownFields()
	if err := d.Decode(&all); err != nil {
		return bad("%w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return bad("something follows what it says")
	}
	a := &Access{accounts: all.Clients, byUID: map[int]*Account{}, byToken: map[[sha256.Size]byte]*Account{}, byName: map[string]*Account{}, usages: map[*Account]*usage{}}
	names := map[string]bool{}
	for i, c := range all.Clients {
		switch {
		case c == nil:
			return bad("client %d is null", i+1)
		case !accountName(c.Name) || names[c.Name]:
			return bad("%q is no name for a client, or is there twice: 1 to 63 letters, digits, - and _", c.Name)
		case len(c.UIDs) == 0 && c.TokenSHA256 == "" && c.Certificate == "":
			return bad("nothing tells client %s: uids, token_sha256 or certificate", c.Name)
		case c.MaxSandboxes < 0 || c.MaxMemoryBytes < 0 || c.MaxDiskBytes < 0 || c.MaxSavedBytes < 0:
			return bad("client %s: a quota can't be negative; 0, or none, is no bound", c.Name)
		}
		if c.Weight != 0 && !(c.Weight >= 0.01 && c.Weight <= 100) {
			return bad("client %s: a weight is from 0.01 to 100, not %g", c.Name, c.Weight)
		}
		names[c.Name] = true
		if _, err := seccomp.Parse(c.AllowCalls); err != nil {
			return bad("client %s: %w", c.Name, err)
		}
		for _, v := range c.Verbs {
			if !slices.Contains(verbs, v) {
				return bad("client %s: there is no verb %q; there are %s", c.Name, v, strings.Join(verbs, ", "))
			}
		}
		for _, p := range c.Images {
			if _, err := path.Match(p, ""); err != nil {
				return bad("client %s: %q is no pattern of an image", c.Name, p)
			}
		}
		for _, uid := range c.UIDs {
			if uid <= 0 {
				return bad("client %s: uid %d can be held to nothing: root may do all, and there are none below", c.Name, uid)
			}
			if a.byUID[uid] != nil {
				return bad("uid %d is of two clients", uid)
			}
			a.byUID[uid] = c
		}
		if c.TokenSHA256 != "" {
			sum, err := hex.DecodeString(c.TokenSHA256)
			if err != nil || len(sum) != sha256.Size {
				return bad("client %s: token_sha256 isn't 64 hex digits", c.Name)
			}
			if [sha256.Size]byte(sum) == sha256.Sum256(nil) {
				return bad("client %s: its token is empty", c.Name)
			}
			if a.byToken[[sha256.Size]byte(sum)] != nil {
				return bad("client %s has another's token", c.Name)
			}
			a.byToken[[sha256.Size]byte(sum)] = c
		}
		if c.Certificate != "" {
			if a.byName[c.Certificate] != nil {
				return bad("certificate %q is of two clients", c.Certificate)
			}
			a.byName[c.Certificate] = c
		}
	}
	return a, nil
}

// Weights of clients, by name.
func (a *Access) Weights() map[string]float64 {
	if a == nil {
		return nil
	}
	out := map[string]float64{}
	for _, c := range a.accounts {
		out[c.Name] = c.Weight
	}
	return out
}

func accountName(s string) bool {
	return len(s) > 0 && len(s) < 64 && !strings.ContainsFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_')
	})
}

// who finds the account of a caller; nil: he may do all.
func (a *Access) who(ctx context.Context) (*Account, error) {
	p, _ := peer.FromContext(ctx)
	var unixClient, tcpClient bool
	var uid int
	var name string
	if p != nil {
		switch info := p.AuthInfo.(type) {
		case client:
			unixClient, uid = true, info.uid
		case overTLS:
			tcpClient = true
			if len(info.State.VerifiedChains) > 0 {
				name = info.State.VerifiedChains[0][0].Subject.CommonName
			}
		}
	}
	switch {
	case unixClient && (a == nil || uid == 0):
		return nil, nil
	case a == nil || !unixClient && !tcpClient:
		return nil, fault.New(fault.Denied, "unknown_client", "the daemon lets nobody in here that it has no account for").WithHint("an administrator makes one: boxwood serve --clients")
	}
	md, _ := metadata.FromIncomingContext(ctx)
	if said := md.Get("authorization"); len(said) > 0 {
		token, ok := strings.CutPrefix(said[0], "Bearer ")
		if c := a.byToken[sha256.Sum256([]byte(token))]; ok && c != nil && len(said) == 1 {
			return c, nil
		}
		return nil, fault.New(fault.Denied, "bad_token", "the token isn't one that the daemon knows")
	}
	if c := a.byName[name]; name != "" && c != nil {
		return c, nil
	}
	if c := a.byUID[uid]; unixClient && c != nil {
		return c, nil
	}
	return nil, fault.New(fault.Denied, "unknown_client", "the daemon has no account for this caller").
		WithHint("give a token (BOXWOOD_TOKEN) or a certificate; an administrator makes accounts: boxwood serve --clients")
}

// The verbs that an account may be held to.
var verbs = []string{"read", "run", "grow", "prune", "images", "archives"}

var verbOf = map[string]string{
	"GetInfo": "read", "ListImages": "read", "ListTrees": "read", "ListSessions": "read", "ReadFile": "read", "Download": "read",
	"ListSandboxes": "read", "WaitCaptured": "read", "GetNode": "read", "Diff": "read", "ListNodes": "read", "WatchTree": "read", "GetPayload": "read",
	"ExportStats": "read", "ListTables": "read",

	"RunTurn": "run", "BeginTurn": "run", "Exec": "run", "EndTurn": "run", "OpenSession": "run", "CloseSession": "run", "Interrupt": "run", "Type": "run",
	"CancelTurn": "run", "WriteFile": "run", "Upload": "run", "Renew": "run", "Release": "run",

	"CreateTree": "grow", "CloseTree": "grow", "OpenTree": "grow", "OpenRun": "grow", "CloseRun": "grow", "Fork": "grow", "Rollback": "grow",
	"Evaluate": "grow", "Annotate": "grow", "Backup": "grow", "Pin": "grow", "Unpin": "grow",

	"Prune": "prune", "ImportImage": "images", "RemoveImage": "images", "ExportTree": "archives", "ImportTree": "archives",
}

// idFields are the fields of requests that name something of a tree, by the fields' names. A test holds that every text
// in a request is either one of these or in plainFields.
var idFields = map[protoreflect.Name]bool{
	"tree_id": true, "node_id": true, "node_ids": true, "sandbox_id": true, "sandbox_ids": true, "turn_id": true, "under": true,
}

// caller is an account in one call.
type caller struct {
	*Account
	s      *Service
	method string
	asked  want // that is pending

	repeated bool // its key was used before: it makes nothing new
}

// admits holds a call against its account. Streams bring their requests later.
func (s *Service) admits(ctx context.Context, fullMethod string) (*caller, error) {
	a, err := s.access.who(ctx)
	if err != nil || a == nil {
		return nil, err
	}
	method := fullMethod[strings.LastIndexByte(fullMethod, '/')+1:]
	verb := verbOf[method]
	if strings.HasPrefix(fullMethod, flightService) {
		verb = flightVerbOf[method]
	}
	switch {
	case verb == "":
		return nil, fault.New(fault.Denied, "verb_denied", "client %s may not call %s, which there is no verb for", a.Name, method)
	case len(a.Verbs) > 0 && !slices.Contains(a.Verbs, verb):
		return nil, fault.New(fault.Denied, "verb_denied", "client %s may not call %s: that takes the verb %q", a.Name, method, verb)
	}
	md, _ := metadata.FromIncomingContext(ctx)
	for _, run := range md.Get(runHeader) {
		if err := a.ownsRun(run); err != nil {
			return nil, err
		}
	}
	return &caller{Account: a, s: s, method: method}, nil
}

func (a *Account) ownsRun(name string) error {
	if a.AllTrees || strings.HasPrefix(name, a.Name+".") {
		return nil
	}
	return fault.New(fault.Denied, "other_client", "the runs of client %s have names that begin with %q", a.Name, a.Name+".")
}

func (a *Account) owns(t *tree.Tree) bool {
	return a.AllTrees || t.Labels[engine.OwnerLabel] == a.Name || sabotage.On("clients")
}

func (a *Account) image(name string, known *tree.Image) bool {
	if len(a.Images) == 0 {
		return true
	}
	names := []string{name}
	if known != nil {
		names = append(append(names, known.Names...), string(known.Digest))
	}
	return slices.ContainsFunc(a.Images, func(p string) bool {
		return slices.ContainsFunc(names, func(n string) bool { ok, _ := path.Match(p, n); return ok })
	})
}

// request holds a request against the account, and counts what it asks for.
func (c *caller) request(req any) error {
	if c == nil {
		return nil
	}
	if asked, err := flightAsks(req); err != nil {
		return err
	} else if asked != nil {
		req = asked
	}
	m, ok := req.(interface{ ProtoReflect() protoreflect.Message })
	if !ok {
		return fault.New(fault.Internal, "no_message", "a request of type %T", req)
	}
	if err := c.walk(m.ProtoReflect()); err != nil {
		return err
	}
	if k, ok := req.(interface{ GetIdempotencyKey() string }); ok && k.GetIdempotencyKey() != "" {
		_, err := c.s.e.Store.View().Reply(c.key(k.GetIdempotencyKey()))
		c.repeated = err == nil
	}
	if err := c.room(); err != nil {
		return err
	}
	switch r := req.(type) {
	case *boxwoodv1.CreateTreeRequest:
		if err := c.calls(r.GetDefaults().GetAllowCalls()); err != nil {
			return err
		}
		if err := c.own(&r.Labels); err != nil || !r.GetWithSandbox() && len(r.GetSetup()) == 0 { // which has a sandbox, too, before the tree has
			return err
		}
		return c.askFor(1, nil, r.GetDefaults().GetLimits())
	case *boxwoodv1.ForkRequest:
		for _, w := range r.GetWants() {
			if err := c.askFor(int(min(max(w.GetCount(), 0), engine.MaxChildren)), c.s.e.TreeOf(w.GetNodeId()+w.GetSandboxId()), r.GetLimits()); err != nil {
				return err
			}
		}
	case *boxwoodv1.EvaluateRequest:
		g := r.GetGrader()
		if err := c.askFor(1, c.s.e.TreeOf(r.GetNodeId()), g.GetLimits()); err != nil || g.GetImage() == "" && g.GetNodeId() == "" {
			return err
		}
		return c.askFor(1, c.s.e.TreeOf(g.GetNodeId()), g.GetLimits())
	case *boxwoodv1.ImportTreeRequest:
		return c.calls(r.GetStart().GetAllowCalls())
	case *boxwoodv1.ImportImageRequest:
		if name := r.GetName(); name != "" && !c.image(name, nil) { // it would be what others mean by that name
			return fault.New(fault.Denied, "image_denied", "client %s may not call an image %.200q", c.Name, name)
		}
	case *boxwoodv1.OpenRunRequest:
		return c.ownsRun(r.GetName())
	case *boxwoodv1.CloseRunRequest:
		return c.ownsRun(r.GetName())
	case *boxwoodv1.RemoveImageRequest:
		return c.mayUse(r.GetImage())
	case *boxwoodv1.ExportStatsRequest:
		if r.GetTreeId() == "" && !c.AllTrees {
			return fault.New(fault.Denied, "other_client", "client %s may have the statistics of a tree of his, and none of all", c.Name)
		}
	}
	return nil
}

// own marks a tree that is about to be made as the caller's.
func (c *caller) own(labels *map[string]string) error {
	if _, said := (*labels)[engine.OwnerLabel]; said {
		return fault.New(fault.Denied, "reserved_label", "the label %s is the daemon's to set", engine.OwnerLabel)
	}
	if *labels == nil {
		*labels = map[string]string{}
	}
	(*labels)[engine.OwnerLabel] = c.Name
	return nil
}

func (c *caller) calls(asked []string) error {
	for _, group := range asked {
		if !slices.Contains(c.AllowCalls, group) {
			return fault.New(fault.Denied, "calls_denied", "client %s may not allow sandboxes the system calls of %q", c.Name, group)
		}
	}
	return nil
}

func (c *caller) mayUse(image string) error {
	known, err := c.s.e.Store.View().Image(image)
	if err != nil {
		known = nil
		for i := range c.s.e.Store.View().Images() {
			if slices.Contains(i.Names, image) {
				known = i
			}
		}
	}
	if !c.image(image, known) {
		return fault.New(fault.Denied, "image_denied", "client %s may not use image %.200q", c.Name, image)
	}
	return nil
}

// walk looks at every field of a request that names something.
func (c *caller) walk(m protoreflect.Message) (err error) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		each := func(v protoreflect.Value) error {
			switch {
			case f.Message() != nil && !f.IsMap():
				return c.walk(v.Message())
			case idFields[f.Name()]:
				if t := c.s.e.TreeOf(v.String()); t != nil && !c.owns(t) { // what isn't there, the call itself says
					return fault.New(fault.Denied, "other_client", "%.64s belongs to another client than %s", v.String(), c.Name)
				}
			case f.Name() == "image" && f.Kind() == protoreflect.StringKind:
				return c.mayUse(v.String())
			}
			return nil
		}
		if f.IsList() {
			for i := 0; i < v.List().Len() && err == nil; i++ {
				err = each(v.List().Get(i))
			}
		} else {
			err = each(v)
		}
		return err == nil
	})
	return err
}

// key is what an idempotency key of a caller is remembered by: another's is another key.
func (c *caller) key(said string) string {
	if c == nil || said == "" {
		return said
	}
	return c.Name + "/" + said
}

// askFor counts sandboxes of a tree (nil: of a new one) that are asked for with limits.
func (c *caller) askFor(n int, t *tree.Tree, said *boxwoodv1.Limits) error {
	asked, err := limits(said)
	if err != nil {
		return err
	}
	return c.ask(n, c.s.e.LimitsFor(t, asked))
}

// ask counts sandboxes that a call is about to make, until done.
func (c *caller) ask(n int, l tree.Limits) error {
	if c.MaxSandboxes == 0 && c.MaxMemoryBytes == 0 && c.MaxDiskBytes == 0 || c.repeated {
		return nil
	}
	a := c.s.access
	a.mu.Lock()
	defer a.mu.Unlock()
	u := a.usage(c)
	have := u.pending
	for id, l := range u.live {
		if _, err := c.s.e.Sandbox(id); err != nil {
			delete(u.live, id)
			continue
		}
		have.add(1, l)
	}
	next := have
	next.add(n, l)
	for _, q := range []struct {
		of        string
		next, max int64
	}{
		{"sandboxes", int64(next.sandboxes), int64(c.MaxSandboxes)}, {"bytes of memory", next.memory, c.MaxMemoryBytes}, {"bytes of disk", next.disk, c.MaxDiskBytes},
	} {
		if q.max > 0 && q.next > q.max {
			return fault.New(fault.Exhausted, "quota", "client %s would have %d %s in all its sandboxes, and may have %d", c.Name, q.next, q.of, q.max).
				WithHint("release some, or ask for fewer or with lower limits")
		}
	}
	u.pending.add(n, l)
	c.asked.add(n, l)
	return nil
}

// usage of the caller's account; the first time, what lives already. Who holds mu calls it.
func (a *Access) usage(c *caller) *usage {
	u := a.usages[c.Account]
	if u == nil {
		u = &usage{live: map[ids.Sandbox]tree.Limits{}}
		a.usages[c.Account] = u
		for _, s := range c.s.e.Sandboxes("") {
			if t := c.s.e.TreeOf(string(s.Tree)); t != nil && t.Labels[engine.OwnerLabel] == c.Name {
				u.live[s.ID] = s.Limits
			}
		}
	}
	return u
}

// answer takes in what a call made, and leaves out of it what isn't the caller's.
func (c *caller) answer(m any) {
	if c == nil {
		return
	}
	switch m := m.(type) {
	case *boxwoodv1.CreateTreeResponse:
		c.made(m.GetSandbox())
	case *boxwoodv1.ForkResult:
		c.made(m.GetSandbox())
	case *boxwoodv1.ListTreesResponse:
		m.Trees = slices.DeleteFunc(m.Trees, func(t *boxwoodv1.Tree) bool { return !c.AllTrees && t.GetLabels()[engine.OwnerLabel] != c.Name })
	case *boxwoodv1.ListSandboxesResponse:
		m.Sandboxes = slices.DeleteFunc(m.Sandboxes, func(s *boxwoodv1.Sandbox) bool {
			t := c.s.e.TreeOf(s.GetTreeId())
			return t == nil || !c.owns(t)
		})
	case *boxwoodv1.GetInfoResponse:
		c.informed(m)
	case *boxwoodv1.ListTablesResponse:
		for _, t := range m.GetTables() {
			if !c.AllTrees && !sabotage.On("counts") {
				t.Rows = -1
			}
		}
	case *boxwoodv1.ListImagesResponse:
		m.Images = slices.DeleteFunc(m.Images, func(i *boxwoodv1.Image) bool {
			return !c.image("", &tree.Image{Digest: ids.Image(i.GetDigest()), Names: i.GetNames()})
		})
	}
}

// informed leaves out of what is said of the daemon what others do. What is said of the host, every sandbox can read.
func (c *caller) informed(m *boxwoodv1.GetInfoResponse) {
	if c.AllTrees || sabotage.On("counts") {
		return
	}
	m.PoolBytesUsed, m.ZygotesReady, m.LostEvents, m.PendingRemovals, m.Queues = 0, 0, 0, 0, nil
	m.Sandboxes, m.Nodes = 0, 0
	v := c.s.e.Store.View()
	for t := range v.Trees() {
		if c.owns(t) {
			m.Sandboxes += int64(v.SandboxCount(t.ID))
			m.Nodes += int64(v.NodeCount(t.ID))
		}
	}
	for _, of := range m.GetCapabilities() {
		of.Detail = "" // some count
	}
}

func (c *caller) made(s *boxwoodv1.Sandbox) {
	if s == nil || c.asked.sandboxes == 0 {
		return
	}
	live, err := c.s.e.Sandbox(ids.Sandbox(s.GetId()))
	if err != nil {
		return
	}
	a := c.s.access
	a.mu.Lock()
	defer a.mu.Unlock()
	u := a.usage(c)
	if _, known := u.live[live.ID]; known {
		return
	}
	u.live[live.ID] = live.Limits
	one := want{}
	one.add(-1, live.Limits)
	c.give(u, one)
}

// give changes what is pending. Who holds mu calls it.
func (c *caller) give(u *usage, w want) {
	for _, of := range []*want{&u.pending, &c.asked} {
		of.sandboxes, of.memory, of.disk = of.sandboxes+w.sandboxes, of.memory+w.memory, of.disk+w.disk
	}
}

// done ends a call: what it asked for and didn't get isn't pending any more.
func (c *caller) done() {
	if c == nil || c.asked == (want{}) {
		return
	}
	c.s.access.mu.Lock()
	defer c.s.access.mu.Unlock()
	c.give(c.s.access.usage(c), want{-c.asked.sandboxes, -c.asked.memory, -c.asked.disk})
}

type callerKey struct{}

// callerOf is the account in a call; nil: one that may do all.
func callerOf(ctx context.Context) *caller {
	c, _ := ctx.Value(callerKey{}).(*caller)
	return c
}

func (c *caller) String() string {
	if c == nil {
		return ""
	}
	return fmt.Sprint(c.Name)
}
