package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// confinement says what a container around us forbids. Signs of a container
// alone forbid nothing: many are started with every right.
func confinement(context.Context) []finding {
	var signs, forbids []string
	for file, sign := range map[string]string{"/.dockerenv": "docker", "/run/.containerenv": "podman"} {
		if _, err := os.Stat(file); err == nil {
			signs = append(signs, sign)
		}
	}
	if kind := os.Getenv("container"); kind != "" {
		signs = append(signs, kind)
	}
	status := statusFields(readString("/proc/self/status"))
	effective, err := strconv.ParseUint(status["CapEff"], 16, 64)
	if err != nil {
		return []finding{unknown("reading capabilities: %v", err)}
	}
	for _, need := range needs {
		if effective&(1<<need.capability) == 0 {
			forbids = append(forbids, need.name+" ("+need.what+")")
		}
	}
	if status["Seccomp"] == "2" {
		forbids = append(forbids, "some system calls (a seccomp filter)")
	}
	if fields := strings.Fields(readString("/proc/self/uid_map")); len(fields) == 3 && (fields[1] != "0" || fields[2] != "4294967295") {
		forbids = append(forbids, "ids of the host (we are in a user namespace ourselves)")
	}
	for _, path := range []string{"/sys", "/proc/sys"} {
		var fs unix.Statfs_t
		if err := unix.Statfs(path, &fs); err == nil && fs.Flags&unix.ST_RDONLY != 0 {
			forbids = append(forbids, "writing "+path)
		}
	}
	where := "no sign of a container"
	if len(signs) > 0 {
		where = "signs of a container (" + strings.Join(signs, ", ") + ")"
	}
	if len(forbids) > 0 {
		return []finding{no("%s; forbidden: %s", where, strings.Join(forbids, ", "))}
	}
	return []finding{yes("%s; nothing that Boxwood needs is forbidden", where)}
}

var needs = []struct {
	capability int
	name, what string
}{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "mounts and namespaces"},
	{unix.CAP_BPF, "CAP_BPF", "the inspector"},
	{unix.CAP_PERFMON, "CAP_PERFMON", "the inspector"},
	{unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE", "dumps"},
	{unix.CAP_CHECKPOINT_RESTORE, "CAP_CHECKPOINT_RESTORE", "restores with the same pids"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "networks of sandboxes"},
	{unix.CAP_MKNOD, "CAP_MKNOD", "/dev of sandboxes"},
	{unix.CAP_SETUID, "CAP_SETUID", "id maps"},
	{unix.CAP_SYS_RESOURCE, "CAP_SYS_RESOURCE", "raising resource limits"},
}

// statusFields reads "Key:\tvalue" lines.
func statusFields(text string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok {
			fields[key] = strings.TrimSpace(value)
		}
	}
	return fields
}

// What a small pool and the daemon need; below it nothing useful fits.
const (
	minDisk   = 2 << 30
	minMemory = 512 << 20
)

func disk(stateDir string) []finding {
	path := existingParent(stateDir)
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return []finding{unknown("%s: %v", path, err)}
	}
	free := int64(fs.Bavail) * fs.Bsize
	if free < minDisk {
		return []finding{no("%s free under %s, at least %s needed", gib(free), path, gib(minDisk))}
	}
	return []finding{yes("%s free under %s", gib(free), path)}
}

func memory(context.Context) []finding {
	fields := strings.Fields(statusFields(readString("/proc/meminfo"))["MemAvailable"])
	if len(fields) == 0 {
		return []finding{unknown("no MemAvailable in /proc/meminfo")}
	}
	kib, err := strconv.ParseInt(fields[0], 10, 64)
	if err != nil {
		return []finding{unknown("reading /proc/meminfo: %v", err)}
	}
	if available := kib << 10; available < minMemory {
		return []finding{no("%s available, at least %s needed", gib(available), gib(minMemory))}
	}
	return []finding{yes("%s available", gib(kib<<10))}
}

// existingParent is path itself or the nearest folder above it that exists.
func existingParent(path string) string {
	for {
		if _, err := os.Stat(path); err == nil || path == filepath.Dir(path) {
			return path
		}
		path = filepath.Dir(path)
	}
}

func gib(n int64) string { return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30)) }
