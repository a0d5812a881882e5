package box

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// What a box sees around it.
func TestInside(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, c := range []struct{ name, script, want string }{
		{"hostname", "hostname; cat /proc/sys/kernel/hostname", "oak\noak"},
		{"machine id", "cat /etc/machine-id", testIdentity.MachineID},
		{"machine id is fixed", "echo x 2>/dev/null >/etc/machine-id || echo no", "no"},
		{"pid 1 and itself", "echo /proc/[0-9]*; echo $$", ""},
		{"no new rights", "grep NoNewPrivs /proc/self/status", "NoNewPrivs:\t1"},
		{"only lo, and up", "cd /sys/class/net; echo *; cat lo/flags", "lo\n0x9"},
		{"loopback", "exec 3<>/dev/udp/127.0.0.1/9 && echo yes", "yes"},
		{"no network", "(exec 3<>/dev/tcp/192.0.2.1/80) 2>/dev/null || echo no", "no"},
		{"devices", "ls /dev | tr '\n' ' '", "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero "},
		{"null", "echo x >/dev/null && wc -c </dev/null", "0"},
		{"zero", "head -c 3 /dev/zero | od -An -tx1", " 00 00 00"},
		{"random", "head -c 8 /dev/urandom | wc -c", "8"},
		{"full", "echo x 2>/dev/null >/dev/full || echo full", "full"},
		{"dev is read-only", "(echo >/dev/x) 2>/dev/null || echo no", "no"},
		{"no devices can be made", "mknod /tmp/sda b 8 0 2>/dev/null || echo no", "no"},
		{"ptmx", "[ -c /dev/ptmx ] && exec 3<>/dev/ptmx && ls /dev/pts", "0\nptmx"},
		{"shm", "echo x >/dev/shm/x && cat /dev/shm/x", "x"},
		{"stdout by name", "echo x >/dev/stdout", "x"},
		{"proc/sys is read-only", "(echo 1 >/proc/sys/net/ipv4/ip_forward) 2>/dev/null || echo no", "no"},
		{"sys is read-only", "(echo 1 >/sys/class/net/lo/mtu) 2>/dev/null || echo no", "no"},
		{"run/box is read-only", "touch /run/box/x 2>/dev/null || echo no", "no"},
		{"no cgroup file system", "grep -c cgroup /proc/self/mountinfo", "0"},
		{"no mounting", "mount -t tmpfs x /tmp 2>/dev/null || echo no", "no"},
		{"no hostname change", "hostname elm 2>/dev/null || echo no", "no"},
		{"capabilities", "grep -E 'Cap(Bnd|Eff)' /proc/self/status | cut -f2 | sort -u", "00000000a80425fb"},
		{"other users have none", "grep CapEff /proc/self/status | cut -f2", "00000000a80425fb"},
		{"root of the mount table is the overlay", "stat -f -c %T /", "overlayfs"},
		{"id map", "read -r a b c </proc/self/uid_map; echo $a $c", "0 65536"},
		{"kmsg and kernel memory are out of reach", "ls /dev/kmsg /dev/mem 2>/dev/null; cat /proc/kcore 2>/dev/null | head -c1 | wc -c", "0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := bash(t, b, c.script)
			if got := strings.TrimSuffix(r.out, "\n"); c.want != "" && got != c.want {
				t.Errorf("got %q, want %q; %s", got, c.want, r.err)
			}
			if c.name == "pid 1 and itself" && !regexp.MustCompile(`^/proc/1 /proc/(\d+)\n(\d+)\n$`).MatchString(r.out) {
				t.Errorf("got %q", r.out)
			}
		})
	}
	nested := startBox(t, h, nesting)
	if got := must(t, nested, "unshare -Urm true && (unshare -Urm mount -o remount,rw,bind /run/box 2>/dev/null || echo no)"); got != "no" {
		t.Errorf("a mount that is read-only, in a user namespace inside: %q", got)
	}
	mounts := must(t, b, `while read -r _ _ _ _ at rest; do echo "$at ${rest%% *}"; done </proc/self/mountinfo | sort`)
	want := `/ rw,noatime
/dev ro,nosuid,noexec,relatime
/dev/pts rw,nosuid,noexec,relatime
/dev/shm rw,nosuid,nodev,noatime
/etc/machine-id ro,nosuid,nodev,noexec,relatime
/proc rw,nosuid,nodev,noexec,relatime
/proc/sys ro,nosuid,nodev,noexec,relatime
/run/box ro,nosuid,nodev,relatime
/sys ro,nosuid,nodev,noexec,relatime`
	if mounts != want {
		t.Errorf("mounts are\n%s\nnot\n%s", mounts, want)
	}
}

// Root of a box is nobody on the host, and two boxes are different nobodies.
func TestHostIDs(t *testing.T) {
	h := openHost(t)
	seen := map[string]bool{}
	for range 2 {
		b := startBox(t, h)
		must(t, b, "touch /root/made; setsid sleep 1000 &")
		procs, err := b.Survivors()
		if err != nil || len(procs) != 1 {
			t.Fatal(procs, err)
		}
		for _, pid := range []int{procs[0].HostPID, b.rec.PID} {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			if err != nil {
				t.Fatal(err)
			}
			ids := strings.Fields(regexp.MustCompile(`Uid:(.*)`).FindStringSubmatch(string(status))[1])
			if ids[0] != fmt.Sprint(idBase(b.rec.Slot)) || ids[1] != ids[0] || idBase(b.rec.Slot) < firstID {
				t.Errorf("ids on the host: %v", ids)
			}
			seen[ids[0]] = true
		}
	}
	if len(seen) != 2 {
		t.Errorf("two boxes have the ids %v", seen)
	}
}

// All that a box writes lies in its upper folder, with 0-based ids.
func TestWritesLieInTheUpper(t *testing.T) {
	h := openHost(t)
	root := newRoot(t)
	b, err := h.Start(context.Background(), root, testIdentity)
	if err != nil {
		t.Fatal(err)
	}
	defer mustKill(t, b)
	must(t, b, "echo 1 >/tmp/a; echo 2 >/dev/shm/b; echo 3 >/run/c; chown 1000 /tmp/a")
	for path, uid := range map[string]uint32{"tmp/a": 1000, "dev/shm/b": 0, "run/c": 0} {
		if got := ownerOf(t, filepath.Join(root.Upper, path)); got != uid {
			t.Errorf("%s belongs to %d on disk, not %d", path, got, uid)
		}
	}
}

func TestMissingMountPoint(t *testing.T) {
	h := openHost(t)
	for _, point := range []string{"proc", "sys", "dev", "dev/shm", "run/box", "etc/machine-id"} {
		root := newRoot(t)
		// An opaque upper hides what the image has.
		hide := filepath.Join(root.Upper, point)
		if err := os.MkdirAll(filepath.Dir(hide), 0o755); err != nil {
			t.Fatal(err)
		}
		makeWhiteout(t, hide)
		_, err := h.Start(context.Background(), root, testIdentity)
		if f := fault.As(err); err == nil || f.Kind != fault.Precondition || !strings.Contains(f.Message, "no mount point /"+point) || f.Hint == "" {
			t.Errorf("without %s: %v", point, err)
		}
	}
	startBox(t, h) // the host goes on
}

// A root that an earlier turn has prepared leads no mount out of it.
func TestSymlinksAsMountPoints(t *testing.T) {
	h := openHost(t)
	root := newRoot(t)
	if err := os.MkdirAll(filepath.Join(root.Upper, "run"), 0o755); err != nil {
		t.Fatal(err)
	}
	makeWhiteout(t, filepath.Join(root.Upper, "etc"))
	os.Remove(filepath.Join(root.Upper, "etc"))
	if err := os.Symlink("/control", filepath.Join(root.Upper, "etc")); err != nil {
		t.Fatal(err)
	}
	_, err := h.Start(context.Background(), root, testIdentity)
	if !fault.Is(err, fault.Precondition) {
		t.Errorf("got %v", err)
	}
}

func TestBadIdentity(t *testing.T) {
	h := openHost(t)
	for name, id := range map[string]Identity{
		"no hostname":    {MachineID: testIdentity.MachineID},
		"long hostname":  {Hostname: strings.Repeat("h", 65), MachineID: testIdentity.MachineID},
		"NUL":            {Hostname: "a\x00b", MachineID: testIdentity.MachineID},
		"bad machine id": {Hostname: "oak", MachineID: "XYZ"},
	} {
		if _, err := h.Start(context.Background(), Root{}, id); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
