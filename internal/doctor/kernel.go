package doctor

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/cilium/ebpf/rlimit"
)

func root(context.Context) []finding {
	if os.Geteuid() != 0 {
		return []finding{no("user id %d", os.Geteuid())}
	}
	return []finding{yes("user id 0")}
}

func kernelTypes(context.Context) []finding {
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); errors.Is(err, os.ErrNotExist) {
		return []finding{no("no /sys/kernel/btf/vmlinux: a kernel built with CONFIG_DEBUG_INFO_BTF is needed")}
	}
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return []finding{unknown("reading the kernel's types: %v", err)}
	}
	var task *btf.Struct
	if err := spec.TypeByName("task_struct", &task); err != nil {
		return []finding{no("the kernel's types lack task_struct: %v", err)}
	}
	return []finding{yes("the kernel describes its types")}
}

// tracepoints attaches a program to the exit of every system call for a moment
// and reads what it reports from a ring buffer.
func tracepoints(ctx context.Context) []finding {
	// Needed below kernel 5.11 only; what matters shows when the map is made.
	_ = rlimit.RemoveMemlock()
	ring, err := ebpf.NewMap(&ebpf.MapSpec{Name: "doctor_ring", Type: ebpf.RingBuf, MaxEntries: uint32(os.Getpagesize())})
	if err != nil {
		why := bpfFailure("making a ring buffer", err)
		return []finding{unknown("not tried: it reports through the ring buffer"), why}
	}
	defer ring.Close()

	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "doctor_exit", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: "sys_exit",
		License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreMem(asm.RFP, -8, asm.R1, asm.DWord),
			asm.LoadMapPtr(asm.R1, ring.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -8),
			asm.Mov.Imm(asm.R3, 8),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnRingbufOutput.Call(),
			asm.Mov.Imm(asm.R0, 0),
			asm.Return(),
		},
	})
	if err != nil {
		return []finding{bpfFailure("loading a program", err), unknown("not tried: nothing fills it")}
	}
	defer program.Close()
	reader, err := ringbuf.NewReader(ring)
	if err != nil {
		return []finding{unknown("not tried"), unknown("opening the ring buffer: %v", err)}
	}
	defer reader.Close()
	attached, err := link.AttachTracing(link.TracingOptions{Program: program, AttachType: ebpf.AttachTraceRawTp})
	if err != nil {
		return []finding{bpfFailure("attaching a program", err), unknown("not tried: nothing fills it")}
	}
	os.Getppid() // a system call that ends while the program is attached
	attached.Close()

	deadline := time.Now().Add(5 * time.Second)
	if limit, ok := ctx.Deadline(); ok && limit.Before(deadline) {
		deadline = limit
	}
	reader.SetDeadline(deadline)
	if _, err := reader.Read(); err != nil {
		return []finding{no("tp_btf/sys_exit attached but never fired"), unknown("nothing came: %v", err)}
	}
	return []finding{yes("tp_btf/sys_exit loads, attaches and fires"), yes("a record came through")}
}

// bpfFailure tells "this kernel or user can't" from "something went wrong".
func bpfFailure(doing string, err error) finding {
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EINVAL) {
		return no("%s: %v", doing, err)
	}
	return unknown("%s: %v", doing, err)
}

// userNamespaces starts a process in the six namespaces of a sandbox, its root
// mapped to an unprivileged id of the host.
func userNamespaces(ctx context.Context) []finding {
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}}
	cmd := exec.CommandContext(ctx, "/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID |
			syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET,
		UidMappings: ids, GidMappings: ids,
		Pdeathsig: syscall.SIGKILL,
	}
	err := runBound(cmd)
	switch {
	case err == nil:
		return []finding{yes("user, mount, pid, ipc, uts and net, root mapped to 100000")}
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.EACCES):
		return []finding{no("cloning into fresh namespaces: %v (see user.max_user_namespaces and seccomp rules)", err)}
	}
	return []finding{unknown("cloning into fresh namespaces: %v", err)}
}
