package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/shell"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// Kind shells: sessions alone survive, each idle. What they are is text, taken at the end of
// each turn; what is kept of them in a checkpoint is that text.

// shellLimit bounds each exchange in which a shell describes itself or is restored. What it
// has to read adds to it: a bash reads some MiB a second, and the host may be busy.
const (
	shellLimit   = 20 * time.Second
	shellSeconds = 500 << 10 // bytes that give a second more
)

// savedShell is one session as it is kept: what it is started with, what it is told,
// and what it has to say of itself then.
type savedShell struct {
	Name        string
	PID, PTS    int
	TTY         bool
	User, Cwd   string
	Umask       uint32
	Terminal    box.Terminal
	Description []byte // shell.Description.Bytes
}

// shells is what a body knows of its sessions. One goroutine at a time uses it: that of
// the turn, or of the capture.
type shells struct {
	// last are the descriptions at the end of the last turn, by name; what a turn did to a
	// session is what differs.
	last map[string]*shell.Description
	// now is the content of a process state that would be saved now; nil: there is none, and why
	// says why not.
	now []byte
	why string
	// kept is the content of the process state keptID, which a checkpoint may name.
	kept   []byte
	keptID ids.Process
	// unkept is a content that couldn't be reproduced. Such sessions are for another keeper.
	unkept []byte
	// beyond: something other than processes changed since the last capture.
	beyond bool
	// shadowed: the sessions with a function that stands in builtin's place.
	shadowed map[string]bool
}

// own are the values of variables that belong to a body and not to what runs in it.
func (b *body) own() shell.Own {
	own := shell.Own{"BOXWOOD_GENERATION": string(b.gen), "HOSTNAME": b.hostname}
	if b.seed != "" {
		own["BOXWOOD_SEED"] = b.seed
	}
	return own
}

// veil hides the secrets that may show in a body.
func (b *body) veil() *veil {
	if b.hides == nil {
		return nil
	}
	return b.hides()
}

// stdinOf is what commands of a session read from.
func stdinOf(s box.Session) string {
	if s.TTY {
		return fmt.Sprintf("/dev/pts/%d", s.PTS)
	}
	return "/dev/null"
}

// describeShell has one session describe itself.
func describeShell(ctx context.Context, bx box.Box, s box.Session, own shell.Own, hide *veil) (*savedShell, *shell.Description, error) {
	facts, err := bx.Idle(s.Name)
	if err != nil {
		return nil, nil, err
	}
	if facts.Busy != "" {
		return nil, nil, errBusyShell(s.Name, facts.Busy)
	}
	l := &shell.Listener{Token: shell.Token()}
	end, err := bx.Talk(ctx, box.Talk{Session: s.Name, Say: shell.Describe(l.Token), Heard: l.Hear, Deadline: time.Now().Add(shellLimit)})
	return heardShell(ctx, bx, s, own, hide, l, end, err)
}

func errBusyShell(name, why string) error {
	return fault.New(fault.Precondition, "shell_busy", "session %s is more than an idle shell: %s", name, why)
}

// heardShell makes of what was heard what is kept.
func heardShell(ctx context.Context, bx box.Box, s box.Session, own shell.Own, hide *veil, l *shell.Listener, end box.TalkEnd, err error) (*savedShell, *shell.Description, error) {
	switch {
	case err != nil:
		return nil, nil, fmt.Errorf("describing session %s: %w", s.Name, err)
	case end.Ended:
		return nil, nil, fault.New(fault.Precondition, "shell_ended", "session %s ended while it was to describe itself", s.Name)
	case end.TimedOut || end.Interrupted:
		return nil, nil, fault.New(fault.Precondition, "shell_silent", "session %s didn't describe itself in %s", s.Name, shellLimit)
	}
	l.Change(hide.conceal)
	d, err := l.Parse(own)
	if err != nil {
		return nil, nil, fmt.Errorf("describing session %s: %w", s.Name, err)
	}
	facts, err := bx.Idle(s.Name)
	if err != nil {
		return nil, nil, err
	}
	if facts.Busy != "" {
		return nil, nil, errBusyShell(s.Name, facts.Busy)
	}
	d.Kernel, d.Limits = facts.Text, facts.Limits
	term, unread, err := bx.TerminalOf(ctx, s.Name)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the terminal of session %s: %w", s.Name, err)
	}
	if unread > 0 {
		return nil, nil, errBusyShell(s.Name, "keys were typed that nobody has read")
	}
	return &savedShell{
		Name: s.Name, PID: s.PID, PTS: s.PTS, TTY: s.TTY, User: facts.User, Cwd: facts.Cwd, Umask: facts.Umask,
		Terminal: term, Description: d.Bytes(),
	}, d, nil
}

// describe has all sessions of a body describe themselves, and remembers what they say.
func (b *body) describe(ctx context.Context) {
	b.shells.now, b.shells.why = nil, ""
	last := map[string]*shell.Description{}
	var all []*savedShell
	for _, s := range b.box.Sessions() {
		saved, d, err := describeShell(ctx, b.box, s, b.own(), b.veil())
		if err != nil {
			b.shells.why = fault.As(err).Message
			continue
		}
		last[s.Name] = d
		all = append(all, saved)
	}
	b.shells.heard(last)
	if b.shells.why == "" && len(all) > 0 {
		b.shells.now = contentOf(all)
	}
}

// heard takes in what all sessions have just said of themselves.
func (s *shells) heard(last map[string]*shell.Description) {
	s.last = last
	for name, d := range last {
		s.shade(name, shell.Shadowed(d))
	}
}

func (s *shells) shade(name string, shadowed bool) {
	if s.shadowed == nil {
		s.shadowed = map[string]bool{}
	}
	s.shadowed[name] = shadowed
}

func contentOf(all []*savedShell) []byte {
	slices.SortFunc(all, func(x, y *savedShell) int { return strings.Compare(x.Name, y.Name) })
	content, err := json.Marshal(all)
	if err != nil {
		panic(err) // of bytes, strings and numbers
	}
	return content
}

// judgement is what the engine itself says of a turn's process half.
type judgement struct {
	changed bool // since the last capture
	effects []tree.Effect
	reasons []string
}

// judgeShells compares sessions with what they were at the last capture and at the end of the last turn.
func (e *Engine) judgeShells(ctx context.Context, b *body) judgement {
	onDump := b.checkpoint.Process == tree.Dump && b.checkpoint.State == b.dumped.id && b.dumped.shells != nil
	if len(b.box.Sessions()) == 0 && len(b.shells.last) == 0 && b.checkpoint.Process != tree.Shells && !onDump {
		return judgement{}
	}
	was := b.shells.last
	b.describe(ctx)
	var j judgement
	for name, d := range b.shells.last {
		if names := shell.Diff(orBlank(was[name]), d); was[name] != nil && len(names) > 0 {
			j.effects = append(j.effects, tree.Effect{Kind: tree.ProcessChanged, Subject: []byte("session " + name), Detail: strings.Join(names, ", ")})
		}
	}
	slices.SortFunc(j.effects, func(x, y tree.Effect) int { return bytes.Compare(x.Subject, y.Subject) })
	kept, err := b.keptShells(e.vault, e.Store.View())
	if onDump {
		kept = b.dumped.shells // beside others
	}
	switch {
	case err != nil:
		j.reasons = append(j.reasons, "what was saved of sessions can't be read")
	case b.shells.why != "":
		j.reasons = append(j.reasons, b.shells.why)
	case !bytes.Equal(kept, b.shells.now) && !sabotage.On("compare"):
		j.reasons = append(j.reasons, differingShells(kept, b.shells.now)...)
	}
	j.changed = len(j.reasons) > 0
	return j
}

func orBlank(d *shell.Description) *shell.Description {
	if d == nil {
		return &shell.Description{}
	}
	return d
}

// keptShells is the content of the process state that the last checkpoint has; nil: it has no shells.
func (b *body) keptShells(v *vault, view *tree.View) ([]byte, error) {
	id := b.checkpoint.State
	if b.checkpoint.Process != tree.Shells {
		return nil, nil
	}
	if b.shells.keptID == id {
		return b.shells.kept, nil
	}
	state, err := view.Process(id)
	if err != nil {
		return nil, err
	}
	content, err := v.file(state)
	if err == nil {
		b.shells.kept, b.shells.keptID = content, id
	}
	return content, err
}

// differingShells says in which sessions two contents differ, and in what.
func differingShells(a, b []byte) (reasons []string) {
	was, is := readShells(a), readShells(b)
	for name, s := range is {
		old, ok := was[name]
		if !ok {
			reasons = append(reasons, "session "+name+" is new")
			continue
		}
		if names := s.differs(old); len(names) > 0 {
			reasons = append(reasons, fmt.Sprintf("session %s changed: %s", name, brief([]byte(strings.Join(names, ", ")), 200)))
		}
	}
	for name := range was {
		if is[name] == nil {
			reasons = append(reasons, "session "+name+" has ended")
		}
	}
	slices.Sort(reasons)
	if len(reasons) == 0 {
		reasons = []string{"sessions changed"} // in something that has no name
	}
	return reasons
}

func readShells(content []byte) map[string]*savedShell {
	var all []*savedShell
	if len(content) > 0 && json.Unmarshal(content, &all) != nil {
		return nil
	}
	m := map[string]*savedShell{}
	for _, s := range all {
		m[s.Name] = s
	}
	return m
}

// differs names what a session differs in from another.
func (s *savedShell) differs(other *savedShell) []string {
	mine, err := shell.Read(s.Description)
	theirs, err2 := shell.Read(other.Description)
	if err != nil || err2 != nil {
		return []string{"its description"}
	}
	names := shell.Diff(mine, theirs)
	for what, same := range map[string]bool{
		"pid": s.PID == other.PID, "user": s.User == other.User, "folder": s.Cwd == other.Cwd,
		"terminal": s.TTY == other.TTY && s.PTS == other.PTS,
		"terminal settings": s.Terminal.Rows == other.Terminal.Rows && s.Terminal.Cols == other.Terminal.Cols &&
			bytes.Equal(s.Terminal.Termios, other.Terminal.Termios),
	} {
		if !same {
			names = append(names, what)
		}
	}
	slices.Sort(names)
	return names
}

// shellsKeeper keeps sessions as text.
type shellsKeeper struct{ e *Engine }

type shellsSaving struct {
	e       *Engine
	b       *body
	content []byte
	made    ids.Process // in the vault
}

func (k shellsKeeper) prepare(ctx context.Context, b *body) (saving, error) {
	list := b.box.Sessions()
	if len(list) == 0 || b.shells.beyond {
		return nil, errOtherKind
	}
	if b.shells.now == nil { // nobody has looked since the daemon was started
		b.describe(ctx)
	}
	s := &shellsSaving{e: k.e, b: b, content: b.shells.now}
	if s.content == nil {
		return nil, fault.New(fault.Precondition, "shell_undescribed", "%s", b.shells.why)
	}
	if bytes.Equal(s.content, b.shells.unkept) {
		return nil, fault.New(fault.Precondition, reasonDiffers, "a session can't be reproduced")
	}
	for name, saved := range readShells(s.content) {
		d, err := shell.Read(saved.Description)
		if err != nil {
			return nil, err
		}
		f, err := b.box.Idle(name)
		switch {
		case err != nil:
			return nil, err
		case f.Busy != "":
			return nil, errBusyShell(name, f.Busy)
		case !bytes.Equal(f.Text, d.Kernel):
			return nil, fault.New(fault.Precondition, "shell_moved", "session %s changed between its turn and its capture", name)
		}
	}
	return s, k.e.sessionsAlone(b.box)
}

// sessionsAlone: nothing survives but the sessions.
func (e *Engine) sessionsAlone(bx box.Box) error {
	alive, err := e.survivors(bx)
	if err != nil {
		return fmt.Errorf("looking for survivors: %w", err)
	}
	own := map[int]bool{}
	for _, session := range bx.Sessions() {
		own[session.HostPID] = true
	}
	for _, p := range alive {
		if !own[p.HostPID] {
			return errOtherKind
		}
	}
	if len(alive) != len(own) {
		return fault.New(fault.Precondition, "shell_ended", "a session has ended since it was described")
	}
	return nil
}

// freeze looks for what could have woken a session since prepare, which saw each wait at its channel
// as it was described: nobody has told it anything since, it had no child and no timer, and nobody
// else is there to send it a signal.
func (s *shellsSaving) freeze(context.Context) error {
	why, err := s.b.box.Resting(s.e.ignores.has)
	if err == nil && why != "" {
		err = fault.New(fault.Precondition, "shell_moved", "sessions changed between the turn and its capture: %s", why)
	}
	return err
}

// finish keeps the text, after a shell in a spare zygote has read it and said the same
// of itself (law 6: what can't be reproduced is found now, while the live one is there).
func (s *shellsSaving) finish(ctx context.Context, ck *tree.Checkpoint) (*tree.ProcessState, error) {
	kept, err := s.b.keptShells(s.e.vault, s.e.Store.View())
	if err == nil && bytes.Equal(kept, s.content) {
		return s.e.Store.View().Process(s.b.checkpoint.State)
	}
	state := &tree.ProcessState{ID: ids.NewProcess(), Kind: tree.Shells, Bytes: int64(len(s.content)), Program: "bash", CreatedAt: time.Now()}
	if state.Digest, err = s.e.vault.putFile(state.ID, s.content); err != nil {
		return nil, err
	}
	s.made = state.ID
	if err := failpoint.Hit("shells kept"); err != nil {
		return nil, err
	}
	trial, err := s.e.embody(ctx, s.e.work(sched.Fork, ck.Tree), ck, state, ids.NewGeneration(), "", s.b.limits, stats.ForTrial, nil)
	if err != nil {
		if fault.As(err).Reason == reasonDiffers {
			s.b.shells.unkept = s.content
		}
		return nil, fmt.Errorf("trying to restore the sessions: %w", err)
	}
	s.e.spares.offer(ck, state, s.b.limits, trial)
	s.b.shells.kept, s.b.shells.keptID = s.content, state.ID
	return state, nil
}

func (s *shellsSaving) abort() {
	if s.made != "" {
		s.e.removeState(s.e.life, s.made)
		s.made = ""
	}
}

func (k shellsKeeper) verify(state *tree.ProcessState) error {
	_, err := k.e.vault.file(state)
	return err
}

// start makes a box in which the saved sessions are.
func (k shellsKeeper) start(ctx context.Context, b *body, root box.Root, id box.Identity, state *tree.ProcessState) (err error) {
	content, err := k.e.vault.file(state)
	if err != nil {
		return err
	}
	if sabotage.On("sibling") {
		content = sabotage.Earlier(content)
	}
	all := readShells(content)
	if len(all) == 0 {
		return errVault(state, fmt.Errorf("it has no sessions"))
	}
	hide, err := k.e.secrets.held(content, b.trees...)
	if err != nil {
		return err
	}
	bx, err := k.e.Boxes.Start(ctx, root, id)
	if err != nil {
		return err
	}
	defer func() {
		if err == nil {
			return
		}
		kill, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		if kerr := bx.Kill(kill); kerr != nil {
			k.e.log.ErrorContext(ctx, "ending a box whose sessions couldn't be restored", "error", kerr)
		}
	}()
	made, last, err := restoreShells(ctx, bx, all, b.own(), hide)
	if err != nil {
		return err
	}
	if err := compareShells(content, made); err != nil {
		return err
	}
	b.box = bx
	b.hides, b.secret = func() *veil { return hide }, hide != nil
	b.shells.now, b.shells.kept, b.shells.keptID = content, content, state.ID
	b.shells.heard(last)
	return nil
}

// restoreShells opens all sessions first, so that none gets a pid that is another's. It returns
// what would be saved of them now, and what each says of itself.
func restoreShells(ctx context.Context, bx box.Box, all map[string]*savedShell, own shell.Own, hide *veil) ([]byte, map[string]*shell.Description, error) {
	type restoring struct {
		session box.Session
		d       *shell.Description
	}
	var opened []restoring
	for _, name := range slices.Sorted(maps.Keys(all)) {
		s := all[name]
		d, err := shell.Read(s.Description)
		if err != nil {
			return nil, nil, err
		}
		session, err := bx.OpenSession(ctx, box.SessionSpec{
			Name: name, Argv: shell.Argv, Env: shell.Environment(d), Cwd: s.Cwd, User: s.User, TTY: s.TTY,
			Terminal: s.Terminal, Umask: s.Umask, PID: s.PID, PTS: s.PTS,
		})
		if err != nil {
			return nil, nil, fmt.Errorf("restoring session %s: %w", name, err)
		}
		opened = append(opened, restoring{session, d})
	}
	var made []*savedShell
	last := map[string]*shell.Description{}
	for _, r := range opened {
		l := &shell.Listener{Token: shell.Token()}
		say := shell.Hello(shell.Greeting{TTY: r.session.TTY, Stdin: stdinOf(r.session)})
		say = append(append(say, hide.reveal(shell.Restore(r.d))...), shell.Describe(l.Token)...)
		end, err := bx.Talk(ctx, box.Talk{Session: r.session.Name, Say: say, Heard: l.Hear, Deadline: time.Now().Add(shellLimit + time.Duration(len(say))*time.Second/shellSeconds)})
		s, d, err := heardShell(ctx, bx, r.session, own, hide, l, end, err)
		if err != nil {
			return nil, nil, fmt.Errorf("restoring session %s: %w", r.session.Name, err)
		}
		made, last[s.Name] = append(made, s), d
	}
	return contentOf(made), last, nil
}

// reasonDiffers is the code of a session that came out otherwise than it was saved.
const reasonDiffers = "shell_differs"

// compareShells: what was restored is what was saved, to the byte (law 5).
func compareShells(saved, made []byte) error {
	if bytes.Equal(saved, made) || sabotage.On("compare") {
		return nil
	}
	return fault.New(fault.Precondition, reasonDiffers, "a session can't be reproduced: %s", strings.Join(differingShells(saved, made), "; "))
}

// into adds what the engine found to what the inspector did.
func (j judgement) into(n *tree.Node) {
	room := max(0, tree.MaxEffects-len(n.Effects))
	n.Effects = append(n.Effects, j.effects[:min(room, len(j.effects))]...)
	n.EffectCount += int64(len(j.effects))
	if !j.changed {
		return
	}
	if n.Verdict == tree.None {
		n.Reasons = nil // "nothing changed"
	}
	n.Reasons = append(n.Reasons, j.reasons...)
	switch n.Verdict {
	case tree.None:
		n.Verdict = tree.Process
	case tree.Files:
		n.Verdict = tree.Both
	}
}

// keepable says whether a process half that has changed is worth a capture: it may be
// one that something here can keep.
func (e *Engine) keepable(b *body) bool {
	if e.keepers[tree.Dump] != nil {
		return true
	}
	if b.shells.beyond || b.shells.why != "" {
		return false
	}
	return e.sessionsAlone(b.box) == nil
}
