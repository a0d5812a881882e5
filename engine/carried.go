package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/engine/archive"
	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/processor"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// Process states in archives. What a state needs of the host that restores it is in the
// header, so that it is looked at before anything is written; a dump besides is tried before
// its node is on record, if anything about the host is new to it.

// content finds what a process state is made of: a folder that stays as it is until done is
// called, and the names of the files in it.
func (e *Engine) content(p *tree.ProcessState) (dir string, names []string, done func(), err error) {
	if p.Kind != tree.Dump {
		return e.vault.folder(p.ID), []string{contentName}, func() {}, nil
	}
	if dir, done, err = e.dumps.use(p.ID); err != nil {
		return "", nil, nil, err
	}
	if names, err = dumpNames(dir); err != nil {
		done()
		return "", nil, nil, err
	}
	return dir, append(names, sumsName), done, nil
}

// describe is a process state in the header of an archive.
func (x *exporter) describe(p *tree.ProcessState) (*pb.ArchiveProcess, error) {
	a := &pb.ArchiveProcess{Id: string(p.ID), Kind: pb.ProcessKind(p.Kind), Digest: p.Digest, Bytes: p.Bytes,
		Kernel: p.Kernel, Program: p.Program, CreatedAt: archive.Nanos(p.CreatedAt)}
	if p.Kind != tree.Dump {
		return a, nil
	}
	dir, done, err := x.e.dumps.use(p.ID)
	if err != nil {
		return nil, errVault(p, err)
	}
	defer done()
	_, file, err := readDump(dir)
	if err != nil {
		return nil, errVault(p, err)
	}
	a.Init = file.Program
	return a, nil
}

// process writes the files of a process state, which is held against its record first.
func (x *exporter) process(ctx context.Context, p *tree.ProcessState) error {
	k := x.e.keepers[p.Kind]
	if k == nil {
		return errVault(p, errors.New("nothing here can read it"))
	}
	dir, names, done, err := x.e.content(p)
	if err != nil {
		return errVault(p, err)
	}
	defer done()
	if err := k.verify(p); err != nil {
		return err
	}
	if err := failpoint.Hit("export state"); err != nil {
		return err
	}
	for _, name := range names {
		if err := x.file(ctx, p, dir, name); err != nil {
			return err
		}
	}
	return nil
}

func (x *exporter) file(ctx context.Context, p *tree.ProcessState, dir, name string) error {
	size, err := dumpFileSize(dir, name)
	if err != nil {
		return err
	}
	f, err := openDumpFile(dir, name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := x.w.Put(archive.File, &pb.ArchiveFile{ProcessId: string(p.ID), Name: name, Size: size}); err != nil {
		return err
	}
	return x.w.Content(ctx, f, size)
}

// DumpsFrom says what becomes of dumps that an archive has.
type DumpsFrom int

const (
	// DumpsRefused: an archive that has any is.
	DumpsRefused DumpsFrom = iota
	// DumpsTrusted are restored as they are: CRIU makes of one whatever it says, as root of the
	// host. Sums show damage, not who wrote it.
	DumpsTrusted
	// DumpsLeft: their nodes are withheld.
	DumpsLeft
)

// incoming is a process state of an archive.
type incoming struct {
	record *tree.ProcessState
	// left: it isn't taken, and is only read over.
	left bool
	// unproven: made under another kernel or CRIU, so that its first restore decides.
	unproven bool
	made     bool // its folder is there
	bytes    int64
}

// admitStates refuses what this host can't restore.
func (m *importer) admitStates() error {
	var total float64
	for _, p := range m.r.Head.Processes {
		s := &incoming{record: &tree.ProcessState{ID: ids.NewProcess(), Kind: tree.ProcessKind(p.Kind), Digest: p.Digest, Bytes: p.Bytes,
			Kernel: p.Kernel, Program: p.Program, CreatedAt: time.Unix(0, p.CreatedAt)}}
		if m.states[p.Id] != nil || p.Bytes < 0 || s.record.Kind != tree.Shells && s.record.Kind != tree.Dump {
			return archive.Damaged("there is a process state %.100q", p.Id)
		}
		m.states[p.Id] = s
		if s.record.Kind == tree.Dump {
			if err := m.admitDump(s, p); err != nil {
				return err
			}
		}
		if !s.left {
			total += float64(p.Bytes) // may say anything
		}
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(m.e.vault.dir, &disk); err != nil {
		return err
	}
	if free := float64(disk.Bavail) * float64(disk.Bsize); total > free {
		return fault.New(fault.Exhausted, "disk_full", "the archive has process states of %.0f bytes, and %.0f are free below %s", total, free, m.e.cfg.StateDir).
			WithHint("free some space, or leave the dumps out")
	}
	return nil
}

func (m *importer) admitDump(s *incoming, p *pb.ArchiveProcess) error {
	const leave = "leave the dumps out: their nodes are withheld then, all others come"
	switch m.how.Dumps {
	case DumpsLeft:
		s.left = true
		return nil
	case DumpsRefused:
		return fault.New(fault.Precondition, "archive_dumps", "the archive has dumps of processes, and who wrote them can do with this host what they like").
			WithHint("say that you trust where it comes from, or " + leave)
	}
	k, _ := m.e.keepers[tree.Dump].(*dumpKeeper)
	if k == nil {
		return fault.New(fault.Unsupported, "no_keeper", "the archive has dumps of processes, and there is no CRIU to restore them").WithHint(leave)
	}
	if p.Init != box.ProgramDigest() {
		return fault.New(fault.Unsupported, "other_program", "the archive has dumps in which pid 1 is that of another Boxwood, %q, and not this one's", m.r.Head.Boxwood).
			WithHint("import it with the Boxwood that wrote it, or " + leave)
	}
	lacks, err := processor.Lacks(m.r.Head.Processor)
	if err != nil {
		return archive.Damaged("%w", err)
	}
	if lacks != "" {
		return fault.New(fault.Unsupported, "other_processor", "the archive has dumps from a processor with instructions that this one lacks: %s", lacks).
			WithHint("import it on a host with such a processor, or " + leave)
	}
	if err := k.works(); err != nil {
		return fault.New(fault.Unsupported, "criu_unfit", "the archive has dumps of processes, and CRIU doesn't work on this host: %w", err).WithHint(leave)
	}
	s.unproven = p.Kernel != k.kernel || p.Program != k.version()
	return nil
}

// file takes a file of a process state, and gives the frame after it.
func (m *importer) file(body []byte) (archive.Kind, []byte, error) {
	var head pb.ArchiveFile
	if err := proto.Unmarshal(body, &head); err != nil {
		return 0, nil, archive.Damaged("%w", err)
	}
	s := m.states[head.ProcessId]
	switch {
	case s == nil:
		return 0, nil, archive.Damaged("process state %.100q isn't in the header", head.ProcessId)
	case !archive.StateFile(head.Name) || head.Name == pagesName: // that comes whole
		return 0, nil, archive.Damaged("a process state has a file %.100q", head.Name)
	case s.left:
		return m.skip()
	}
	room := s.record.Bytes - s.bytes
	if head.Name == sumsName { // isn't counted in what a dump has
		room = maxSums
	} else {
		s.bytes += min(head.Size, room)
	}
	if head.Size < 0 || head.Size > room {
		return 0, nil, archive.Damaged("process state %.100q is larger than the header says", head.ProcessId)
	}
	dir := m.e.vault.folder(s.record.ID)
	if !s.made {
		if _, err := m.e.vault.make(s.record.ID); err != nil {
			return 0, nil, err
		}
		s.made = true
	}
	at := filepath.Join(dir, head.Name)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return 0, nil, err
	}
	f, err := os.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o444) // root of a box reads some of a dump; the vault is closed
	if err != nil {
		return 0, nil, archive.Damaged("a file of a process state: %w", err)
	}
	defer f.Close()
	k, next, err := m.data(f, head.Size)
	if err == nil {
		err = f.Truncate(head.Size)
	}
	return k, next, err
}

// maxSums bounds the list of a dump's files.
const maxSums = 16 << 20

// skip reads over the content of a file.
func (m *importer) skip() (archive.Kind, []byte, error) {
	for {
		k, body, err := m.r.Next()
		if err != nil || k != archive.Data {
			return k, body, err
		}
	}
}

// settleStates: what was taken is what was saved, and on the disk.
func (m *importer) settleStates(ctx context.Context) error {
	for id, s := range m.states {
		if s.left {
			continue
		}
		if !s.made {
			return archive.Damaged("process state %s has no content", id)
		}
		if err := m.e.keepers[s.record.Kind].verify(s.record); err != nil {
			return archive.Damaged("process state %s: %w", id, err)
		}
		if err := flushTree(m.e.vault.folder(s.record.ID)); err != nil {
			return err
		}
		if err := failpoint.Hit("import state"); err != nil {
			return err
		}
	}
	for _, c := range m.done {
		s := m.states[c.head.ProcessId]
		if s == nil || !s.unproven || s.left {
			continue
		}
		if err := m.try(ctx, c, s); err != nil {
			return err
		}
	}
	return nil
}

// try restores a dump once, compares it with what was saved, as for any child, and ends it before
// anything of it has run. An error is no answer; a dump that comes out differently withholds its nodes.
func (m *importer) try(ctx context.Context, c *received, s *incoming) error {
	if err := m.e.reserve(1); err != nil {
		return err
	}
	defer m.e.unreserve(1)
	if err := failpoint.Hit("import trying"); err != nil {
		return err
	}
	made, err := m.e.embody(ctx, m.e.workOf(sched.Fork, &m.tree), &c.ck, s.record, ids.NewGeneration(), "", m.e.LimitsFor(&m.tree, tree.Limits{}), stats.ForTrial, nil)
	switch {
	case err == nil:
		c.proven = true
		err := failpoint.Hit("import tried")
		return errors.Join(err, m.e.tearDown(context.WithoutCancel(ctx), made))
	case ctx.Err() != nil || fault.As(err).Retryable() || fault.Is(err, fault.Deadline):
		return fmt.Errorf("trying a dump: %w", err)
	}
	m.e.log.WarnContext(ctx, "an imported dump can't be restored alike here", "checkpoint", c.head.Id, "error", err)
	c.withheld = fmt.Sprintf("not alike here: saved under Linux %s by %s, and restored here otherwise: %s", s.record.Kernel, s.record.Program, fault.As(err).Message)
	return nil
}
