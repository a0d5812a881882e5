package engine

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/boxwood-rl/boxwood/engine/shell"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/tree"
)

// A secret is the value of an environment variable that a client gives to a command or a session. It reaches that process
// and nothing that is kept: whatever a turn of the same tree makes that would go into a record (output, command lines,
// names of files, reasons) has the secret's name in its place, and the description of a shell a reference, which is made
// good when the shell is restored. What is looked for are the bytes of the value, as they are and as a shell quotes them; what a program
// makes of it, and what it writes to files, is the program's.
//
// Values lie in memory, and in the run folder while that is on a tmpfs, so that they last as long as the processes that
// have them: over a daemon that is killed, not over one that stops, nor over the host. Until it is given again (Fork), a node whose shells
// had a secret isn't restored (law 6).
//
// A dump holds what its processes held. Its checkpoint is marked, and isn't exported unasked.

const (
	// A shorter value would be found in too much that has nothing to do with it.
	minSecret, maxSecret = 8, 32 << 10
	maxSecrets           = 256 // of one tree
)

// secret is one value as it was given for a variable.
type secret struct {
	Ref         string // 32 hex digits, drawn: what is kept in the value's place
	Name, Value string
}

// secrets are all that are known.
type secrets struct {
	path string // empty: memory alone

	// A reference is good in the trees whose processes were given the secret, and in those that were started from their nodes. An
	// archive brings references along, and who has it may have been given none.
	mu    sync.Mutex
	trees map[ids.Tree]*veil
	union *veil // of all trees, as far as known
}

// openSecrets reads what an earlier daemon has left for the sandboxes that live on.
func openSecrets(runDir string) (*secrets, error) {
	s := &secrets{trees: map[ids.Tree]*veil{}}
	if !onTmpfs(runDir) {
		return s, nil
	}
	s.path = filepath.Join(runDir, "secrets")
	text, err := os.ReadFile(s.path)
	if os.IsNotExist(err) {
		return s, nil
	}
	var kept map[ids.Tree][]secret
	if err == nil {
		err = json.Unmarshal(text, &kept)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the secrets of sandboxes that live on: %w", err)
	}
	for t, list := range kept {
		s.trees[t] = newVeil(list)
	}
	return s, nil
}

// keep writes all of them, or removes the file if there are none. The caller holds mu.
func (s *secrets) keep() error {
	if s.path == "" {
		return nil
	}
	kept := map[ids.Tree][]secret{}
	for t, v := range s.trees {
		kept[t] = v.secrets()
	}
	text, err := json.Marshal(kept)
	if err != nil {
		return err
	}
	next := s.path + ".new"
	if err := os.WriteFile(next, text, 0o600); err != nil {
		return fmt.Errorf("keeping a secret for as long as its sandbox lives: %w", err)
	}
	return os.Rename(next, s.path)
}

// forget removes what outlives the daemon: no sandbox does.
func (s *secrets) forget() {
	if s.path != "" {
		_ = os.Remove(s.path)
	}
}

// of is what hides the secrets of a tree; nil: it has none.
func (s *secrets) of(t ids.Tree) *veil {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.trees[t]
}

// all is what hides those of all trees, for what isn't known to be of one; nil: there are none.
func (s *secrets) all() *veil {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.trees) == 0 || s.union != nil {
		return s.union
	}
	var list []secret
	for _, v := range s.trees {
		list = append(list, v.secrets()...)
	}
	s.union = newVeil(list)
	return s.union
}

// give makes secrets of a tree known, before anything has them.
func (s *secrets) give(t ids.Tree, env map[string]string) error {
	if err := checkSecrets(env); err != nil || len(env) == 0 {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.trees[t].secrets()
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if slices.ContainsFunc(list, func(one secret) bool { return one.Name == name && one.Value == env[name] }) {
			continue
		}
		var ref [16]byte
		rand.Read(ref[:]) // never fails
		list = append(list, secret{hex.EncodeToString(ref[:]), name, env[name]})
	}
	return s.put(t, list)
}

// put replaces those of a tree. The caller holds mu.
func (s *secrets) put(t ids.Tree, list []secret) error {
	was := s.trees[t]
	if len(list) == len(was.secrets()) {
		return nil
	}
	if len(list) > maxSecrets {
		return fault.New(fault.Exhausted, "too_many_secrets", "tree %s has had %d secrets, and %d more would pass the limit of %d", t, len(was.secrets()), len(list)-len(was.secrets()), maxSecrets).
			WithHint("give the same value again where you can; it counts once")
	}
	s.trees[t], s.union = newVeil(list), nil
	if err := s.keep(); err != nil {
		s.trees[t] = was
		if was == nil {
			delete(s.trees, t)
		}
		return err
	}
	return nil
}

// inherit gives a tree those of the tree that it starts from.
func (s *secrets) inherit(t, from ids.Tree) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.put(t, s.trees[from].secrets())
}

// retain lets go of those of trees that are gone.
func (s *secrets) retain(there func(ids.Tree) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := len(s.trees)
	maps.DeleteFunc(s.trees, func(t ids.Tree, _ *veil) bool { return !there(t) })
	if len(s.trees) == before {
		return nil
	}
	s.union = nil
	return s.keep()
}

// supply makes good the references of a kept description that its tree doesn't know, with the values that a
// client gives again by their names.
func (s *secrets) supply(t ids.Tree, content []byte, env map[string]string) error {
	if err := checkSecrets(env); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.trees[t].secrets()
	for _, r := range references(content) {
		if value, given := env[r.Name]; given && !slices.ContainsFunc(list, func(one secret) bool { return one.Ref == r.Ref }) {
			list = append(list, secret{r.Ref, r.Name, value})
		}
	}
	return s.put(t, list)
}

// held is what hides exactly the secrets that a description refers to, as far as these trees know them.
func (s *secrets) held(content []byte, by ...ids.Tree) (*veil, error) {
	refs := references(content)
	if len(refs) == 0 {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var known, list []secret
	for _, t := range by {
		known = append(known, s.trees[t].secrets()...)
	}
	for _, r := range refs {
		i := slices.IndexFunc(known, func(one secret) bool { return one.Ref == r.Ref })
		if i < 0 {
			return nil, fault.New(fault.Precondition, "secret_unknown", "a session of this node held the secret %s, which isn't known any more", r.Name).
				WithHint("give it again: fork with secret_env={%q: ...}", r.Name)
		}
		list = append(list, known[i])
	}
	return newVeil(list), nil
}

func checkSecrets(env map[string]string) error {
	for name, value := range env {
		switch {
		case !variableName.MatchString(name):
			return fault.New(fault.Invalid, "bad_secret", "%q is no name of a variable, which a secret needs: letters, digits and _", name)
		case len(value) < minSecret || len(value) > maxSecret:
			return fault.New(fault.Invalid, "bad_secret", "the secret %s has %d bytes; %d to %d can be kept out of what is recorded", name, len(value), minSecret, maxSecret)
		case strings.IndexByte(value, 0) >= 0:
			return fault.New(fault.Invalid, "bad_secret", "the secret %s holds a NUL byte, which no environment can", name)
		}
	}
	return nil
}

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,63}$`)

// veil hides secrets. It doesn't change; nil hides none.
type veil struct {
	list  []secret
	forms []form // longest first
	begin [256]bool
}

// form is one way in which a value may be written.
type form struct {
	text   string
	secret secret
	number int // of the way, see waysOf
}

// waysOf are all texts that show a value: the whole of it in each of shell.Quotings, then, if it has
// several lines, each line that is long enough. Their numbers are part of the format of a reference.
func waysOf(value string) []string {
	ways := shell.Quotings(value)
	lines := strings.Split(value, "\n")
	if len(lines) == 1 {
		return ways
	}
	for _, line := range lines {
		if len(line) >= minSecret {
			ways = append(ways, shell.Quotings(line)...)
		}
	}
	return ways
}

func newVeil(list []secret) *veil {
	v := &veil{list: list}
	for _, one := range list {
		for i, text := range waysOf(one.Value) {
			if !slices.ContainsFunc(v.forms, func(f form) bool { return f.text == text }) {
				v.forms = append(v.forms, form{text, one, i})
				v.begin[text[0]] = true
			}
		}
	}
	slices.SortStableFunc(v.forms, func(a, b form) int { return cmp.Compare(len(b.text), len(a.text)) })
	return v
}

func (v *veil) secrets() []secret {
	if v == nil {
		return nil
	}
	return slices.Clip(v.list)
}

// at finds the longest secret that p begins with.
func (v *veil) at(p []byte) *form {
	if !v.begin[p[0]] {
		return nil
	}
	for i := range v.forms {
		if f := &v.forms[i]; len(p) >= len(f.text) && string(p[:len(f.text)]) == f.text {
			return f
		}
	}
	return nil
}

// replace puts something else in the place of each secret. p itself comes back if there is none.
func (v *veil) replace(p []byte, with func(*form) string) []byte {
	if v == nil {
		return p
	}
	var out []byte
	from := 0
	for i := 0; i < len(p); i++ {
		if f := v.at(p[i:]); f != nil {
			out = append(append(out, p[from:i]...), with(f)...)
			from = i + len(f.text)
			i = from - 1
		}
	}
	if out == nil {
		return p
	}
	return append(out, p[from:]...)
}

func (v *veil) in(text string) bool { return v != nil && v.first([]byte(text)) != nil }

func (v *veil) first(p []byte) (found *form) {
	for i := 0; i < len(p) && found == nil; i++ {
		found = v.at(p[i:])
	}
	return found
}

// mask makes of a text what may be recorded.
func (v *veil) mask(p []byte) []byte {
	if sabotage.On("secrets") {
		return p
	}
	return v.replace(p, (*form).masked)
}

func (f *form) masked() string { return "[secret " + f.secret.Name + "]" }

func (v *veil) maskText(s string) string {
	if v == nil {
		return s
	}
	return string(v.mask([]byte(s)))
}

// maskTexts works in place.
func (v *veil) maskTexts(texts []string) {
	if v == nil {
		return
	}
	for i := range texts {
		texts[i] = v.maskText(texts[i])
	}
}

// A reference stands for a secret in a description: which, in which way it is written, and its name.
var referencePattern = regexp.MustCompile(`boxwood-secret:([0-9a-f]{32}):([0-9]+):([A-Za-z0-9_]+);`)

// conceal puts references in the place of secrets.
func (v *veil) conceal(p []byte) []byte {
	return v.replace(p, func(f *form) string {
		return fmt.Sprintf("boxwood-secret:%s:%d:%s;", f.secret.Ref, f.number, f.secret.Name)
	})
}

// reveal is the inverse of conceal.
func (v *veil) reveal(p []byte) []byte {
	if v == nil {
		return p
	}
	return referencePattern.ReplaceAllFunc(p, func(r []byte) []byte {
		m := referencePattern.FindSubmatch(r)
		for _, one := range v.list {
			if one.Ref == string(m[1]) {
				ways := waysOf(one.Value)
				if n, err := strconv.Atoi(string(m[2])); err == nil && n < len(ways) {
					return []byte(ways[n])
				}
			}
		}
		return r
	})
}

// references lists the secrets that the content of a process state of kind shells refers to.
func references(content []byte) (out []secret) {
	for _, s := range readShells(content) {
		d, err := shell.Read(s.Description)
		if err != nil {
			continue // whoever restores it says so
		}
		for _, section := range d.Sections {
			for _, m := range referencePattern.FindAllSubmatch(section, -1) {
				one := secret{Ref: string(m[1]), Name: string(m[3])}
				if !slices.Contains(out, one) {
					out = append(out, one)
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b secret) int { return strings.Compare(a.Ref, b.Ref) })
	return out
}

// masked passes a stream on with its secrets masked, also those that come in pieces: what may be the beginning of one is held
// until the next piece, or flush.
func (v *veil) masked(to func([]byte)) (write func([]byte), flush func()) {
	if v == nil || sabotage.On("secrets") {
		return to, func() {}
	}
	var held []byte
	write = func(p []byte) {
		p = append(held, p...)
		end := v.unfinished(p)
		held = bytes.Clone(p[end:])
		if end > 0 {
			to(v.mask(p[:end]))
		}
	}
	return write, func() {
		if len(held) > 0 {
			to(v.mask(held))
		}
		held = nil
	}
}

// unfinished is where in p a secret may begin that goes on behind it; len(p): nowhere.
func (v *veil) unfinished(p []byte) int {
	for i := 0; i < len(p); i++ {
		rest := p[i:]
		if !v.begin[rest[0]] {
			continue
		}
		for _, f := range v.forms {
			if len(f.text) > len(rest) && f.text[:len(rest)] == string(rest) {
				return i
			}
		}
		if f := v.at(rest); f != nil {
			i += len(f.text) - 1
		}
	}
	return len(p)
}

// confide makes the secrets of a command known before it has them, and refuses one that names
// a secret of its tree where it would be recorded.
func (t *turn) confide(c Command) error {
	if len(c.Secrets) > 0 {
		if t.e.secrets.path == "" && !t.b.secret {
			t.e.log.WarnContext(t.ctx, "the run folder is on no tmpfs: sandboxes that are given secrets end with the daemon", "run_dir", t.e.cfg.RunDir)
		}
		if err := t.e.secrets.give(t.s.tree, c.Secrets); err != nil {
			return err
		}
		if err := t.e.noteSecret(t.s, t.b); err != nil {
			return err
		}
		t.once("it was given secrets, which aren't kept")
	}
	hide := t.b.veil()
	if hide == nil {
		return nil
	}
	seen := func(where string, f *form) error {
		return fault.New(fault.Invalid, "secret_in_argv", "the secret %s is in the command's %s, which would be recorded", f.secret.Name, where).
			WithHint("let the command read it from its environment: $%s", f.secret.Name)
	}
	for _, part := range []struct {
		where string
		texts []string
	}{
		{"arguments", c.Argv}, {"text", []string{c.Shell}}, {"folder", []string{c.Cwd}}, {"user", []string{c.User}},
		{"environment", slices.Concat(slices.Collect(maps.Keys(c.Env)), slices.Collect(maps.Values(c.Env)))},
	} {
		for _, text := range part.texts {
			if f := hide.first([]byte(text)); f != nil {
				return seen(part.where, f)
			}
		}
	}
	return nil
}

// noteSecret marks a body as one that may hold secrets, for this daemon and the next.
func (e *Engine) noteSecret(s *sandbox, b *body) error {
	if b.secret {
		return nil
	}
	if err := e.changeBirth(b.gen, func(f *birthFile) { f.Secret = true }); err != nil {
		return fmt.Errorf("noting that sandbox %s may hold secrets: %w", s.id, err)
	}
	b.secret = true
	return nil
}

// veilNode takes secrets out of what is about to be recorded of a turn.
func (b *body) veilNode(n *tree.Node) {
	hide := b.veil()
	if hide == nil && !b.secret {
		return
	}
	n.Effects, n.Reasons, n.Action.Argv = slices.Clone(n.Effects), slices.Clone(n.Reasons), slices.Clone(n.Action.Argv)
	hide.maskTexts(n.Reasons)
	n.Action.Text = hide.mask(n.Action.Text)
	for i := range n.Action.Argv {
		n.Action.Argv[i] = hide.mask(n.Action.Argv[i])
	}
	for i := range n.Effects {
		f := &n.Effects[i]
		f.Subject, f.Detail = hide.mask(f.Subject), hide.maskText(f.Detail)
		if hide == nil && (f.Kind == tree.ProcessSurvived || f.Kind == tree.ProcessEnded) { // restored with secrets that aren't known any more
			if end := bytes.IndexAny(f.Subject, " \x00"); end > 0 {
				f.Subject = f.Subject[:end]
			}
		}
	}
}

// secretIn says whether a step has a secret in what it was given.
func (v *veil) secretIn(s *tree.Step) bool {
	return v != nil && (v.in(s.Text) || v.in(s.Path) || v.in(string(s.Content)) || slices.ContainsFunc(s.Argv, v.in))
}

// supplySecrets takes again what the shells of a node held.
func (e *Engine) supplySecrets(p point, env map[string]string) error {
	if p.state == nil || p.state.Kind != tree.Shells {
		return checkSecrets(env)
	}
	content, err := e.vault.file(p.state)
	if err != nil {
		return err
	}
	return e.secrets.supply(p.node.Tree, content, env)
}

// hideIn takes the secrets of a tree out of a failure, which goes to logs, records of calls and reasons: what CRIU and
// the comparisons say has command lines and environments in it.
func (e *Engine) hideIn(t ids.Tree, err error) error {
	if err == nil {
		return nil
	}
	hide := e.secrets.of(t)
	if !hide.in(err.Error()) {
		return err
	}
	f := *fault.As(err)
	f.Message = hide.maskText(f.Message)
	return &f
}
