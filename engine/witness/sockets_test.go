package witness

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/thread"
)

// If it fails, sockets that are there are taken for none, since the kernel's count of them was believed.
func TestSocketsAreListedWhereverTheyCount(t *testing.T) {
	testenv.Require(t, testenv.Root)
	err := thread.Discard(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		socketsOf(t, unix.Gettid())
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func socketsOf(t *testing.T, tid int) {
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Error(err)
		}
	}
	open := func(family, kind, protocol int) int {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
		must(err)
		return fd
	}
	look := func(when string) (listed map[string]int) {
		t.Helper()
		used, err := protocols(tid)
		must(err)
		listed = map[string]int{}
		for _, name := range []string{"tcp", "tcp6", "udp", "udp6", "raw", "raw6"} {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", tid, name))
			if os.IsNotExist(err) {
				continue
			}
			must(err)
			listed[name] = strings.Count(string(text), "\n") - 1
			n, known := used[name]
			if !known || (n == 0) != (listed[name] == 0) {
				t.Errorf("%s: of %s %d are listed, and the count is %d (%v)", when, name, listed[name], n, known)
			}
		}
		return listed
	}
	look("at first")
	var fds []int
	for name, fd := range map[string]int{
		"udp": open(unix.AF_INET, unix.SOCK_DGRAM, 0), "udp6": open(unix.AF_INET6, unix.SOCK_DGRAM, 0),
		"tcp": open(unix.AF_INET, unix.SOCK_STREAM, 0), "tcp6": open(unix.AF_INET6, unix.SOCK_STREAM, 0),
		"raw": open(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP), "raw6": open(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6),
	} {
		fds = append(fds, fd)
		var any unix.Sockaddr = &unix.SockaddrInet4{}
		if strings.HasSuffix(name, "6") {
			any = &unix.SockaddrInet6{}
		}
		if !strings.HasPrefix(name, "raw") {
			must(unix.Bind(fd, any))
		}
		if strings.HasPrefix(name, "tcp") {
			must(unix.Listen(fd, 1))
		}
		if look(name)[name] == 0 {
			t.Errorf("%s isn't listed at all", name)
		}
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	look("closed")

	// A connection whose listener is gone, and then half of it.
	req, err := unix.NewIfreq("lo")
	must(err)
	listener, client := open(unix.AF_INET, unix.SOCK_STREAM, 0), open(unix.AF_INET, unix.SOCK_STREAM, 0)
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	must(unix.IoctlIfreq(listener, unix.SIOCSIFFLAGS, req))
	must(unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	must(unix.Listen(listener, 1))
	at, err := unix.Getsockname(listener)
	must(err)
	must(unix.Connect(client, at))
	server, _, err := unix.Accept(listener)
	must(err)
	unix.Close(listener)
	if n := look("connected")["tcp"]; n != 2 {
		t.Errorf("%d ends of a connection are listed", n)
	}
	unix.Close(client)
	if n := look("half closed")["tcp"]; n != 2 {
		t.Errorf("%d ends of a connection that is half closed are listed", n)
	}
	unix.Close(server)
}
