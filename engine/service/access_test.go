package service

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/flight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/privileges"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// serveTCP has the test's daemon listen on TCP as well, with what certificates wrote.
func serveTCP(s *Service, dir string) error {
	config, err := TLS(filepath.Join(dir, "daemon.pem"), filepath.Join(dir, "daemon.pem"), filepath.Join(dir, "ca.pem"))
	if err != nil {
		return err
	}
	l, err := ListenTCP("127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() { _ = s.Server(config).Serve(l) }()
	return os.WriteFile(filepath.Join(dir, "tcp"), []byte(l.Addr().String()), 0o600)
}

// authority signs certificates.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	a := &authority{t: t}
	a.cert, a.key = a.make("authority", true)
	return a
}

func (a *authority) make(name string, ca bool) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: ca, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	parent, signer := c, key
	if !ca {
		parent, signer = a.cert, a.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	if c, err = x509.ParseCertificate(der); err != nil {
		a.t.Fatal(err)
	}
	return c, key
}

func (a *authority) pair(name string) tls.Certificate {
	c, key := a.make(name, false)
	return tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: key}
}

func (a *authority) write(path, name string) {
	a.t.Helper()
	c, key := a.make(name, false)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	text := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})...)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		a.t.Fatal(err)
	}
}

type tokenOf string

func (t tokenOf) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(t)}, nil
}
func (tokenOf) RequireTransportSecurity() bool { return true }

func sumOf(token string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(token))) }

// held is a daemon that holds its clients to accounts, on TCP.
type held struct {
	*daemon
	t       testing.TB
	ca      *authority
	pool    *x509.CertPool
	address string
}

func heldDaemon(t testing.TB, accounts ...Account) *held {
	t.Helper()
	dir := stateDir(t)
	h := &held{t: t, ca: newAuthority(t), pool: x509.NewCertPool()}
	h.pool.AddCert(h.ca.cert)
	h.ca.write(filepath.Join(dir, "daemon.pem"), "daemon")
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.ca.cert.Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string][]Account{"clients": accounts})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "clients.json"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	h.found(t, startDaemon(t, dir))
	h.importRoot(t)
	return h
}

// found notes where a daemon listens.
func (h *held) found(t testing.TB, d *daemon) {
	t.Helper()
	address, err := os.ReadFile(filepath.Join(d.dir, "tcp"))
	if err != nil {
		t.Fatal(err)
	}
	h.daemon, h.address = d, string(address)
}

// as is a client with a token or a certificate.
func (h *held) as(token string, certs ...tls.Certificate) *daemon {
	h.t.Helper()
	options := []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: h.pool, Certificates: certs}))}
	if token != "" {
		options = append(options, grpc.WithPerRPCCredentials(tokenOf(token)))
	}
	conn, err := grpc.NewClient(h.address, options...)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { conn.Close() })
	other := *h.daemon
	other.client = boxwoodv1.NewBoxwoodClient(conn)
	return &other
}

// tellsHisOwn: what an account is told of the daemon counts nothing of others, unless it may read all.
func (h *held) tellsHisOwn(t *testing.T, c *daemon, all bool) {
	t.Helper()
	i, err := c.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	tables, err := c.client.ListTables(ctx(t), &boxwoodv1.ListTablesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if counts := i.GetNodes()+i.GetSandboxes()+i.GetPoolBytesUsed()+int64(len(i.GetQueues())) > 0; counts != all {
		t.Errorf("who may read all: %t, is told %v", all, i)
	}
	for _, of := range i.GetCapabilities() {
		if of.GetDetail() != "" && !all {
			t.Errorf("the capability %s says %q", of.GetName(), of.GetDetail())
		}
	}
	for _, of := range tables.GetTables() {
		if (of.GetRows() >= 0) != all {
			t.Errorf("who may read all: %t, is told that the table %s has %d rows", all, of.GetName(), of.GetRows())
		}
	}
}

// A client on TCP is who its token or certificate says, has its own trees, its images and its verbs, and no more sandboxes than its quota.
func TestClientsHaveWhatTheyWereGiven(t *testing.T) {
	stranger := newAuthority(t)
	h := heldDaemon(t,
		Account{Name: "alice", TokenSHA256: sumOf("token of alice"), MaxSandboxes: 3, AllowCalls: []string{"keyring"}},
		Account{Name: "bob", Certificate: "bob's machine", Verbs: []string{"read", "run", "grow", "archives"}, Images: []string{"other*"}, MaxMemoryBytes: 1 << 20},
		Account{Name: "carol", TokenSHA256: sumOf("token of carol"), Verbs: []string{"read"}, AllTrees: true},
	)
	d, as, ca, dir, address := h.daemon, h.as, h.ca, h.dir, h.address
	info := func(c *daemon) error {
		_, err := c.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
		return err
	}
	alice, bob, carol := as("token of alice"), as("", ca.pair("bob's machine")), as("token of carol")
	for name, c := range map[string]*daemon{"alice": alice, "bob": bob, "carol": carol} {
		if err := info(c); err != nil {
			t.Errorf("%s isn't let in: %v", name, err)
		}
	}
	for want, c := range map[string]*daemon{"unknown_client": as(""), "bad_token": as("token of eve")} {
		if err := info(c); reason(err) != want {
			t.Errorf("%v instead of %s", err, want)
		}
	}
	if err := info(as("", ca.pair("somebody"))); reason(err) != "unknown_client" {
		t.Errorf("a certificate of nobody's came to %v", err)
	}
	if err := info(as("", stranger.pair("bob's machine"))); err == nil || reason(err) != "" {
		t.Errorf("a certificate of another authority came to %v", err)
	}
	if conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials())); err == nil {
		defer conn.Close()
		if _, err := boxwoodv1.NewBoxwoodClient(conn).GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{}); err == nil {
			t.Error("the daemon answers in the clear")
		}
	}

	create := func(c *daemon, image string, change func(*boxwoodv1.CreateTreeRequest)) (*boxwoodv1.CreateTreeResponse, error) {
		req := &boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_Image{Image: image}}
		if change != nil {
			change(req)
		}
		return c.client.CreateTree(ctx(t), req)
	}
	made, err := create(alice, "mini", func(r *boxwoodv1.CreateTreeRequest) { r.WithSandbox = true })
	if err != nil {
		t.Fatal(err)
	}
	tree, sb, root := made.GetTree(), made.GetSandbox().GetId(), made.GetRoot().GetId()
	if tree.GetLabels()[engine.OwnerLabel] != "alice" {
		t.Errorf("the tree's labels are %v", tree.GetLabels())
	}
	node := alice.run(t, sb, "echo hello > /tmp/x").GetNode().GetId()
	theirs, _ := d.newTree(t) // of root, on the unix socket

	fork := func(c *daemon, node string, n int32) error {
		stream, err := c.client.Fork(ctx(t), &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node}, Count: n}}})
		for err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	exported := func(c *daemon, tree string) error {
		stream, err := c.client.ExportTree(ctx(t), &boxwoodv1.ExportTreeRequest{TreeId: tree})
		for err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	of := func(c *daemon, node string) error {
		_, err := c.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: node})
		return err
	}
	labels := func(labels map[string]string) func(*boxwoodv1.CreateTreeRequest) {
		return func(r *boxwoodv1.CreateTreeRequest) { r.Labels = labels }
	}
	calls := func(groups ...string) func(*boxwoodv1.CreateTreeRequest) {
		return func(r *boxwoodv1.CreateTreeRequest) { r.Defaults = &boxwoodv1.Defaults{AllowCalls: groups} }
	}
	for _, c := range []struct {
		what string
		do   func() error
		want string
	}{
		{"alice's node, to her", func() error { return of(alice, node) }, ""},
		{"alice's node, to bob", func() error { return of(bob, node) }, "other_client"},
		{"alice's node, to carol, who may read all", func() error { return of(carol, node) }, ""},
		{"root's node, to alice", func() error { return of(alice, theirs.GetId()) }, "other_client"},
		{"alice's node, annotated by bob among others", func() error {
			_, err := bob.client.Annotate(ctx(t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{{NodeId: node}}})
			return err
		}, "other_client"},
		{"alice's sandbox, used by bob", func() error {
			_, err := bob.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb, Command: &boxwoodv1.Command{Shell: []byte("true")}})
			return err
		}, "other_client"},
		{"alice's sandbox, released by bob", func() error {
			_, err := bob.client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{sb}})
			return err
		}, "other_client"},
		{"alice's node, forked by bob", func() error { return fork(bob, node, 1) }, "other_client"},
		{"alice's tree, exported by bob", func() error { return exported(bob, tree.GetId()) }, "other_client"},
		{"all statistics, to bob", func() error {
			stream, err := bob.client.ExportStats(ctx(t), &boxwoodv1.ExportStatsRequest{Table: "turns"})
			for err == nil {
				_, err = stream.Recv()
			}
			return err
		}, "other_client"},
		{"a run of another name, opened by bob", func() error {
			_, err := bob.client.OpenRun(ctx(t), &boxwoodv1.OpenRunRequest{Name: "training"})
			return err
		}, "other_client"},
		{"a run of his, opened by bob", func() error {
			_, err := bob.client.OpenRun(ctx(t), &boxwoodv1.OpenRunRequest{Name: "bob.training"})
			return err
		}, ""},
		{"a call of another's run", func() error {
			_, err := bob.client.ListTrees(metadata.AppendToOutgoingContext(ctx(t), runHeader, "training/1"), &boxwoodv1.ListTreesRequest{})
			return err
		}, "other_client"},
		{"an image that bob may not use", func() error { _, err := create(bob, "mini", nil); return err }, "image_denied"},
		{"a verb that bob doesn't have", func() error {
			_, err := bob.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: root})
			return err
		}, "verb_denied"},
		{"a turn of carol's, who may only read", func() error {
			_, err := carol.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb, Command: &boxwoodv1.Command{Shell: []byte("true")}})
			return err
		}, "verb_denied"},
		{"system calls that alice may not allow", func() error { _, err := create(alice, "mini", calls("io_uring")); return err }, "calls_denied"},
		{"system calls that alice may allow", func() error { _, err := create(alice, "mini", calls("keyring")); return err }, ""},
		{"a tree that alice makes for bob", func() error {
			_, err := create(alice, "mini", labels(map[string]string{engine.OwnerLabel: "bob"}))
			return err
		}, "reserved_label"},
		{"more sandboxes than alice may have", func() error { return fork(alice, node, 3) }, "quota"},
		{"as many as she may have", func() error { return fork(alice, node, 2) }, "EOF"},
		{"one more", func() error { return fork(alice, node, 1) }, "quota"},
		{"one more after she let go of one", func() error {
			if _, err := alice.client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{sb}}); err != nil {
				return err
			}
			return fork(alice, node, 1)
		}, "EOF"},
	} {
		err := c.do()
		if got := reason(err); got != c.want && !(c.want == "EOF" && err != nil && err.Error() == "EOF") && !(c.want == "" && err == nil) {
			t.Errorf("%s came to %v instead of %q", c.what, err, c.want)
		}
	}
	list, err := bob.client.ListTrees(ctx(t), &boxwoodv1.ListTreesRequest{})
	if err != nil || len(list.GetTrees()) != 0 {
		t.Errorf("bob is told of %v, %v", list.GetTrees(), err)
	}
	h.tellsHisOwn(t, bob, false)
	h.tellsHisOwn(t, carol, true)
	if list, err = alice.client.ListTrees(ctx(t), &boxwoodv1.ListTreesRequest{}); err != nil || len(list.GetTrees()) != 2 {
		t.Errorf("alice is told of %v, %v", list.GetTrees(), err)
	}
	boxes, err := bob.client.ListSandboxes(ctx(t), &boxwoodv1.ListSandboxesRequest{})
	if err != nil || len(boxes.GetSandboxes()) != 0 {
		t.Errorf("bob is told of %v, %v", boxes.GetSandboxes(), err)
	}
	images, err := bob.client.ListImages(ctx(t), &boxwoodv1.ListImagesRequest{})
	if err != nil || len(images.GetImages()) != 0 {
		t.Errorf("bob is told of %v, %v", images.GetImages(), err)
	}

	// What a quota counts is found again by the next daemon.
	d.kill()
	d = startDaemon(t, dir)
	h.found(t, d)
	if err := fork(as("token of alice"), node, 1); reason(err) != "quota" {
		t.Errorf("after a restart, one more came to %v", err)
	}
	until(t, "the log says who called", func() bool { return strings.Contains(d.log.String(), "client=alice") })
}

// plainFields are the texts of requests that name nothing of a tree. Paths are below the sandbox's root, but for images.
var plainFields = strings.Fields(`idempotency_key name path user cwd shell argv stdin session text table labels env secret_env policy_version payload
	content chunk keys command paths rewards_file image allow_calls rewards key value verdicts`)

// A call or a field that nobody has ruled on would pass an account by.
func TestEveryRequestIsHeldToItsAccount(t *testing.T) {
	plain := map[protoreflect.Name]bool{}
	for _, name := range plainFields {
		plain[protoreflect.Name(name)] = true
	}
	seen := map[protoreflect.FullName]bool{}
	var walk func(m protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		if seen[m.FullName()] {
			return
		}
		seen[m.FullName()] = true
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			switch {
			case f.Message() != nil:
				walk(f.Message())
			case f.Kind() != protoreflect.StringKind && f.Kind() != protoreflect.BytesKind:
			case idFields[f.Name()] == plain[f.Name()]:
				t.Errorf("%s must be in idFields or in plainFields", f.FullName())
			}
		}
	}
	service := boxwoodv1.File_boxwood_v1_boxwood_proto.Services().Get(0)
	for i := range service.Methods().Len() {
		m := service.Methods().Get(i)
		if verbOf[string(m.Name())] == "" {
			t.Errorf("%s takes no verb", m.Name())
		}
		walk(m.Input())
	}
	if len(verbOf) != service.Methods().Len() {
		t.Errorf("verbs for %d calls of %d", len(verbOf), service.Methods().Len())
	}
	// Arrow Flight's calls have a verb, and a request that is turned into one of ours, or an account may not make them.
	for name := range (&Service{}).Server(nil).GetServiceInfo() {
		if name != string(service.FullName()) && "/"+name+"/" != flightService {
			t.Errorf("nobody has ruled on the calls of %s", name)
		}
	}
	flights := (&flight.Ticket{}).ProtoReflect().Descriptor().ParentFile().Services().Get(0)
	if "/"+string(flights.FullName())+"/" != flightService {
		t.Errorf("Arrow Flight is called %s", flights.FullName())
	}
	requests := map[string]any{"Ticket": &flight.Ticket{Ticket: []byte("{}")}, "Criteria": &flight.Criteria{}, "FlightDescriptor": &flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{"turns"}}}
	for i := range flights.Methods().Len() {
		m := flights.Methods().Get(i)
		if flightVerbOf[string(m.Name())] == "" {
			continue
		}
		asks, err := flightAsks(requests[string(m.Input().Name())])
		ours, ok := asks.(interface{ ProtoReflect() protoreflect.Message })
		if err != nil || !ok || !seen[ours.ProtoReflect().Descriptor().FullName()] {
			t.Errorf("%s asks for %v, %v", m.FullName(), asks, err)
		}
	}
}

// A file of accounts with a mistake in it is refused as a whole.
func TestAccountsAreRead(t *testing.T) {
	dir := t.TempDir()
	sum := strings.Repeat("ab", 32)
	for name, c := range map[string]struct {
		text string
		mode os.FileMode
		want string // in the error
	}{
		"good":         {`{"clients": [{"name": "a", "uids": [1000]}, {"name": "b", "token_sha256": "` + sum + `"}]}`, 0o600, ""},
		"writable":     {`{"clients": []}`, 0o666, "nobody else can write to"},
		"no name":      {`{"clients": [{"uids": [1]}]}`, 0o600, "no name"},
		"twice":        {`{"clients": [{"name": "a", "uids": [1]}, {"name": "a", "uids": [2]}]}`, 0o600, "twice"},
		"nobody":       {`{"clients": [{"name": "a"}]}`, 0o600, "nothing tells"},
		"a field":      {`{"clients": [{"name": "a", "uid": 5}]}`, 0o600, "unknown field"},
		"a verb":       {`{"clients": [{"name": "a", "uids": [1], "verbs": ["fly"]}]}`, 0o600, "no verb"},
		"a token":      {`{"clients": [{"name": "a", "token_sha256": "abc"}]}`, 0o600, "64 hex digits"},
		"shared uid":   {`{"clients": [{"name": "a", "uids": [1]}, {"name": "b", "uids": [1]}]}`, 0o600, "two clients"},
		"shared token": {`{"clients": [{"name": "a", "token_sha256": "` + sum + `"}, {"name": "b", "token_sha256": "` + sum + `"}]}`, 0o600, "another's token"},
		"null":         {`{"clients": [null]}`, 0o600, "client 1 is null"},
		"more":         {`{"clients": []} {"clients": [{"name": "a", "uids": [1]}]}`, 0o600, "something follows"},
		"no JSON":      {`clients:`, 0o600, "invalid character"},
		"nothing":      {``, 0o600, "EOF"},
		"root":         {`{"clients": [{"name": "a", "uids": [0]}]}`, 0o600, "uid 0"},
		"no uid":       {`{"clients": [{"name": "a", "uids": [-1]}]}`, 0o600, "uid -1"},
		"empty token":  {`{"clients": [{"name": "a", "token_sha256": "` + sumOf("") + `"}]}`, 0o600, "token is empty"},
		"no bound":     {`{"clients": [{"name": "a", "uids": [1], "max_sandboxes": -1}]}`, 0o600, "can't be negative"},
		"no such call": {`{"clients": [{"name": "a", "uids": [1], "allow_calls": ["bpf"]}]}`, 0o600, "no group of system calls"},
		"a path":       {`{"clients": [{"name": "a/b", "uids": [1]}]}`, 0o600, "no name"},
		"a pattern":    {`{"clients": [{"name": "a", "uids": [1], "images": ["["]}]}`, 0o600, "no pattern"},
		"a weight":     {`{"clients": [{"name": "a", "uids": [1], "weight": -1}]}`, 0o600, "a weight is from 0.01 to 100"},
	} {
		path := filepath.Join(dir, "clients.json")
		os.Remove(path)
		if err := os.WriteFile(path, []byte(c.text), c.mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		a, err := ReadAccess(path)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v", name, a, err)
		}
	}
}

// An archive brings its tree's policy along: whoever imports it says what of that may hold here.
func TestImportWidensNoPolicy(t *testing.T) {
	d := running(t)
	root, _ := d.newTree(t, "keyring")
	archive := d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: root.GetTreeId()})
	for _, c := range []struct {
		allow []string
		want  string
	}{{nil, "calls_not_allowed"}, {[]string{"perf"}, "calls_not_allowed"}, {[]string{"nonsense"}, "bad_calls"}, {[]string{"perf", "keyring"}, ""}} {
		m, err := d.imports(t, archive, &boxwoodv1.ImportTreeStart{NewIds: true, AllowCalls: c.allow})
		if got := reason(err); got != c.want && !(c.want == "bad_calls" && err != nil) {
			t.Errorf("an import that allows %q came to %v instead of %q", c.allow, err, c.want)
		}
		if err == nil {
			if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: m.GetTree().GetId()}); err != nil {
				t.Error(err)
			}
		}
	}
}

// Every thread of the daemon holds what it needs and nothing else.
func TestDaemonHoldsWhatItNeeds(t *testing.T) {
	d := running(t)
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", d.cmd.Process.Pid))
	if err != nil || len(threads) == 0 {
		t.Fatalf("%d threads, %v", len(threads), err)
	}
	for _, file := range threads {
		text, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue // it has ended
		}
		held, err := privileges.Held(string(text))
		if err != nil {
			t.Fatal(err)
		}
		if more := held &^ privileges.Mask(); more != 0 {
			t.Errorf("a thread holds capabilities %#x that the daemon doesn't need", more)
		}
	}
}

// What an account may have counts whichever way it is asked for, and what another did before is no answer to it.
func TestAccountsHoldWhicheverWay(t *testing.T) {
	const gib = 1 << 30
	h := heldDaemon(t,
		Account{Name: "alice", TokenSHA256: sumOf("alice"), MaxSandboxes: 1, MaxMemoryBytes: 3 * gib},
		Account{Name: "Alice", TokenSHA256: sumOf("Alice"), Images: []string{"other*"}},
		Account{Name: "saver", TokenSHA256: sumOf("saver"), MaxSavedBytes: 4 << 20},
		Account{Name: "setter", TokenSHA256: sumOf("setter"), MaxSavedBytes: 4 << 20},
	)
	alice, twin, saver, setter := h.as("alice"), h.as("Alice"), h.as("saver"), h.as("setter")
	made := func(c *daemon, req *boxwoodv1.CreateTreeRequest) (*boxwoodv1.CreateTreeResponse, error) {
		req.Start = &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}
		return c.client.CreateTree(ctx(t), req)
	}
	large, err := made(alice, &boxwoodv1.CreateTreeRequest{Defaults: &boxwoodv1.Defaults{Limits: &boxwoodv1.Limits{MemoryBytes: 8 * gib}}})
	if err != nil {
		t.Fatal(err)
	}
	root := large.GetRoot().GetId()
	fork := func(c *daemon, n int32, l *boxwoodv1.Limits) error {
		stream, err := c.client.Fork(ctx(t), &boxwoodv1.ForkRequest{Limits: l, Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: root}, Count: n}}})
		for err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	evaluated := func(g *boxwoodv1.Grader) error {
		g.Command = &boxwoodv1.Command{Shell: []byte("true")}
		_, err := alice.client.Evaluate(ctx(t), &boxwoodv1.EvaluateRequest{NodeId: root, Grader: g})
		return err
	}
	archive := h.export(t, &boxwoodv1.ExportTreeRequest{TreeId: large.GetTree().GetId()})
	imported := func(c *daemon, start *boxwoodv1.ImportTreeStart) error {
		start.NewIds = true
		_, err := c.imports(t, archive, start)
		return err
	}
	named := func(c *daemon, name string) error {
		stream, err := c.client.ImportImage(ctx(t), &boxwoodv1.ImportImageRequest{Path: "/nowhere", Name: name})
		for err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	run := func(c *daemon, name, key string) error {
		_, err := c.client.OpenRun(ctx(t), &boxwoodv1.OpenRunRequest{Name: name, IdempotencyKey: key})
		return err
	}
	small := &boxwoodv1.Limits{MemoryBytes: gib}
	for _, c := range []struct {
		what string
		do   func() error
		want string
	}{
		{"a sandbox with what its tree says", func() error { return fork(alice, 1, nil) }, "quota"},
		{"a grade in such a one", func() error { return evaluated(&boxwoodv1.Grader{}) }, "quota"},
		{"a grade in two of the sandboxes", func() error {
			return evaluated(&boxwoodv1.Grader{Limits: small, Start: &boxwoodv1.Grader_Image{Image: "mini"}})
		}, "quota"},
		{"a grade in one", func() error { return evaluated(&boxwoodv1.Grader{Limits: small}) }, ""},
		{"less than nothing", func() error { return fork(alice, 1, &boxwoodv1.Limits{MemoryBytes: -1}) }, "bad_limits"},
		{"less than nothing of the disk, by root", func() error { return fork(h.daemon, 1, &boxwoodv1.Limits{DiskBytes: -1}) }, "bad_limits"},
		{"so much that it overflows", func() error { return fork(alice, 16, &boxwoodv1.Limits{MemoryBytes: 1 << 60}) }, "bad_limits"},
		{"a sandbox", func() error { return fork(alice, 1, small) }, "EOF"},
		{"a set-up beside it, which needs one", func() error {
			_, err := made(alice, &boxwoodv1.CreateTreeRequest{Setup: []*boxwoodv1.SetupStep{{Step: &boxwoodv1.SetupStep_Command{Command: "true"}}}})
			return err
		}, "quota"},
		{"a tree without, which needs none", func() error { _, err := made(alice, &boxwoodv1.CreateTreeRequest{}); return err }, ""},

		{"an archive on an image that isn't hers", func() error { return imported(twin, &boxwoodv1.ImportTreeStart{}) }, "image_denied"},
		{"an archive whose dumps she trusts", func() error { return imported(alice, &boxwoodv1.ImportTreeStart{Dumps: trust}) }, "dumps_denied"},
		{"an archive", func() error { return imported(alice, &boxwoodv1.ImportTreeStart{}) }, ""},
		{"an image by a name that she may not use", func() error { return named(twin, "mini") }, "image_denied"},
		{"an image by a name of hers", func() error { return named(twin, "other:1") }, "import_denied"},

		{"a run", func() error { return run(alice, "alice.a", "step-1") }, ""},
		{"another's by the same key", func() error { return run(twin, "Alice.a", "step-1") }, ""},
		{"another by the same key", func() error { return run(alice, "alice.b", "step-1") }, "key_reused"},
		{"a run of whose name differs in the case", func() error { return run(twin, "alice.a", "") }, "other_client"},
		{"a token that differs in the case", func() error { _, err := h.as("ALICE").client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{}); return err }, "bad_token"},
		{"two tokens", func() error {
			_, err := alice.client.GetInfo(metadata.AppendToOutgoingContext(ctx(t), "authorization", "Bearer Alice"), &boxwoodv1.GetInfoRequest{})
			return err
		}, "bad_token"},
	} {
		err := c.do()
		if got := reason(err); got != c.want && !(c.want == "EOF" && err == io.EOF) && !(c.want == "" && err == nil) {
			t.Errorf("%s came to %v instead of %q", c.what, err, c.want)
		}
	}

	// What is saved counts until it is pruned.
	mine, err := made(saver, &boxwoodv1.CreateTreeRequest{WithSandbox: true})
	if err != nil {
		t.Fatal(err)
	}
	n := saver.run(t, mine.GetSandbox().GetId(), "head -c 8000000 /dev/urandom >/root/much").GetNode()
	saver.captured(t, n.GetId())
	until(t, "the account has saved too much", func() bool {
		_, err := saver.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: mine.GetSandbox().GetId(), Command: &boxwoodv1.Command{Shell: []byte("true")}})
		return reason(err) == "quota"
	})
	if _, err := saver.imports(t, archive, &boxwoodv1.ImportTreeStart{NewIds: true}); reason(err) != "quota" {
		t.Errorf("an import beyond what may be saved came to %v", err)
	}
	if _, err := saver.client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{mine.GetSandbox().GetId()}}); err != nil {
		t.Fatal(err)
	}
	if _, err := saver.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: n.GetId()}); err != nil {
		t.Fatal(err)
	}
	until(t, "there is room again", func() bool {
		_, err := made(saver, &boxwoodv1.CreateTreeRequest{})
		return err == nil
	})
	// So does what a set-up saved, which is in no tree that the account has asked for.
	setup := []*boxwoodv1.SetupStep{{Step: &boxwoodv1.SetupStep_Command{Command: "head -c 8000000 /dev/urandom >/root/much"}}}
	until(t, "the set-up counts", func() bool {
		_, err := made(setter, &boxwoodv1.CreateTreeRequest{Setup: setup})
		if err != nil && reason(err) != "quota" {
			t.Fatal(err)
		}
		return err != nil
	})
}

// Who has no account is turned away when his call begins, and after so many of them his connection ends.
func TestStrangersAreTurnedAway(t *testing.T) {
	h := heldDaemon(t, Account{Name: "alice", TokenSHA256: sumOf("alice")})
	stranger := h.as("no token of anybody's")
	for i := range 3 * maxRefusals {
		_, err := stranger.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
		if err == nil || reason(err) != "bad_token" && status.Code(err) != codes.Unavailable { // that his connection ended may be all that he is told
			t.Fatalf("call %d: %v", i, err)
		}
	}
	// The answer comes before the request is there.
	stream, err := stranger.client.ImportTree(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.RecvMsg(&boxwoodv1.ImportTreeResponse{}); reason(err) != "bad_token" && status.Code(err) != codes.Unavailable {
		t.Errorf("a stranger's import came to %v", err)
	}
	huge := metadata.AppendToOutgoingContext(ctx(t), "x-request-id", strings.Repeat("x", 2*maxHeader))
	if _, err := h.as("alice").client.GetInfo(huge, &boxwoodv1.GetInfoRequest{}); err == nil {
		t.Error("metadata of any size are taken")
	}
	if _, err := h.as("alice").client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{}); err != nil {
		t.Errorf("alice is turned away, too: %v", err)
	}
}

// More connections than there are slots wait until another ends, and a listener that is closed waits for none.
func TestConnectionsAreBounded(t *testing.T) {
	l, err := ListenTCP("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := l.(*bounded)
	b.slots = make(chan struct{}, 1)
	accepted := make(chan net.Conn)
	go func() {
		defer close(accepted)
		for {
			conn, err := b.Accept()
			if err != nil {
				return
			}
			accepted <- conn
		}
	}()
	for range 2 {
		conn, err := net.Dial("tcp", b.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
	}
	first := <-accepted
	select {
	case <-accepted:
		t.Error("two are there at once")
	case <-time.After(50 * time.Millisecond):
	}
	first.Close()
	first.Close() // gives its slot back once
	second := <-accepted
	b.Close()
	if _, more := <-accepted; more {
		t.Error("a listener that is closed accepts")
	}
	second.Close()
}
