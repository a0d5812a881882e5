package box

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
)

// nursery is the process that clones zygotes; see init/main.c for why.
type nursery struct {
	wire *wire
	cmd  *exec.Cmd
	buf  []byte
}

// stepLimit bounds each step of making a zygote and attaching it. They take a
// millisecond or two; the limit is for a host that thrashes.
const stepLimit = 30 * time.Second

func startNursery(control string) (*nursery, error) {
	image, err := unix.MemfdCreate("boxinit", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("starting the nursery: %w", err)
	}
	program := os.NewFile(uintptr(image), "boxinit")
	defer program.Close()
	if _, err := program.Write(boxinit); err != nil {
		return nil, fmt.Errorf("starting the nursery: %w", err)
	}
	// A descriptor that is open for writing can't be executed.
	readable, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", image))
	if err != nil {
		return nil, fmt.Errorf("starting the nursery: %w", err)
	}
	defer readable.Close()
	program.Close()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("starting the nursery: %w", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "nursery")
	defer theirs.Close()
	w, err := newWire(pair[0])
	if err != nil {
		return nil, err
	}
	cmd := &exec.Cmd{
		Path:       fmt.Sprintf("/proc/self/fd/%d", readable.Fd()),
		Args:       []string{"boxwood", "nursery", control},
		Env:        []string{},
		Dir:        "/",
		ExtraFiles: []*os.File{theirs},
		// The nursery dies by the end of its connection.
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		w.Close()
		return nil, fmt.Errorf("starting the nursery: %w", err)
	}
	n := &nursery{wire: w, cmd: cmd, buf: make([]byte, 4096)}
	w.SetReadDeadline(time.Now().Add(stepLimit))
	if _, err := w.expect(n.buf, 0, replyDone, 0); err != nil {
		n.close()
		return nil, fmt.Errorf("starting the nursery: %w", err)
	}
	return n, nil
}

// born is what the nursery hands out: a zygote that is about to stage.
type born struct {
	pid    int
	pidfd  int
	wire   *wire
	userns *os.File
}

func (n *nursery) spawn(slot int, g *cgroup.Group) (*born, error) {
	tasks, err := g.OpenTasks()
	if err != nil {
		return nil, err
	}
	defer closeAll(tasks)
	dir, err := unix.Open(g.Dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the cgroup %s: %w", g.Dir, err)
	}
	defer unix.Close(dir)
	body := binary.LittleEndian.AppendUint32(nil, uint32(slot))
	body = binary.LittleEndian.AppendUint32(body, uint32(idBase(slot)))
	n.wire.SetReadDeadline(time.Now().Add(stepLimit))
	id, err := n.wire.send(opSpawn, body, append([]int{dir}, tasks...)...)
	if err != nil {
		return nil, err
	}
	m, err := n.wire.expect(n.buf, id, replySpawned, 3)
	if err != nil {
		return nil, err
	}
	if len(m.body) != 4 {
		m.closeFDs()
		return nil, errProtocol
	}
	b := &born{pid: int(binary.LittleEndian.Uint32(m.body)), pidfd: m.fds[0], userns: os.NewFile(uintptr(m.fds[2]), "user namespace")}
	if b.wire, err = newWire(m.fds[1]); err != nil {
		b.userns.Close()
		unix.Close(b.pidfd)
		return nil, err
	}
	return b, nil
}

func (n *nursery) close() {
	n.wire.Close()
	n.cmd.Wait()
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
