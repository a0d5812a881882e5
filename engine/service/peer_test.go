package service

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/thread"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// dialAs connects as another user, with the capabilities of root: the socket's mode isn't what is tested.
func dialAs(uid int, path string) (conn net.Conn, err error) {
	err = thread.Discard(func() error {
		h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		if err := unix.Capget(&h, &caps[0]); err != nil {
			return err
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); e != 0 {
			return e
		}
		for i := range caps {
			caps[i].Effective = caps[i].Permitted
		}
		if err := unix.Capset(&h, &caps[0]); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), path)
		defer f.Close()
		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
			return err
		}
		conn, err = net.FileConn(f)
		return err
	})
	return conn, err
}

// Clients other than root have images read from the folders that an administrator named, and from nowhere else.
func TestOnlyRootImportsFromAnywhere(t *testing.T) {
	testenv.Require(t, testenv.Root)
	d := running(t)
	imports := filepath.Join(d.dir, "imports")
	root := filepath.Join(imports, "root")
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "etc", "name"), []byte("mine\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(d.dir, "secret")
	if err := os.MkdirAll(secret, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(imports); _ = os.RemoveAll(secret) })
	for name, to := range map[string]string{"out": secret, "up": "../secret", "in": "root", "magic": "/proc/self/root"} {
		if err := os.Symlink(to, filepath.Join(imports, name)); err != nil {
			t.Fatal(err)
		}
	}
	as := func(uid int) boxwoodv1.BoxwoodClient {
		conn, err := grpc.NewClient("passthrough:///boxwood", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return dialAs(uid, filepath.Join(d.dir, "sock")) }))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return boxwoodv1.NewBoxwoodClient(conn)
	}
	t.Cleanup(func() {
		for _, name := range []string{"mine-0:latest", "mine-65534:latest", "mine-0", "mine-65534"} {
			_, _ = d.client.RemoveImage(ctx(t), &boxwoodv1.RemoveImageRequest{Image: name})
		}
	})
	imported := func(uid int, path string) error {
		stream, err := as(uid).ImportImage(ctx(t), &boxwoodv1.ImportImageRequest{Path: path, Name: "mine-" + strconv.Itoa(uid)})
		for err == nil {
			_, err = stream.Recv()
		}
		if err == io.EOF {
			return nil
		}
		return err
	}
	for path, want := range map[string]string{
		root:                                 "",
		root + "/":                           "",
		imports + "/in":                      "",
		imports + "/out":                     "import_denied",
		imports + "/up":                      "import_denied",
		imports + "/magic":                   "import_denied",
		imports + "/../secret":               "import_denied",
		imports + "/root/../../secret":       "import_denied",
		imports + "secret":                   "import_denied",
		secret:                               "import_denied",
		"/etc":                               "import_denied",
		"":                                   "import_denied",
		imports + "/none":                    "no_file",
		imports + "/root/etc/name/something": "import_denied",
	} {
		if err := imported(65534, path); reason(err) != want || (err == nil) != (want == "") {
			t.Errorf("%q: %v, not %q", path, err, want)
		}
	}
	if err := imported(0, secret); reason(err) == "import_denied" {
		t.Errorf("root is refused: %v", err)
	}
	// Everything else he may do, and the log says who it was.
	if _, err := as(65534).GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{}); err != nil {
		t.Error(err)
	}
	until(t, "the log says who called", func() bool { return strings.Contains(d.log.String(), "uid=65534") })
}

// What others could write to is no folder to import from.
func TestImportFolders(t *testing.T) {
	testenv.Require(t, testenv.Root)
	dir := t.TempDir()
	open, foreign, file := filepath.Join(dir, "open"), filepath.Join(dir, "foreign"), filepath.Join(dir, "file")
	for _, err := range []error{
		os.Mkdir(open, 0o755), os.Chmod(open, 0o775), os.Mkdir(foreign, 0o755), os.Chown(foreign, 1000, 0), os.WriteFile(file, nil, 0o600),
		os.Symlink(dir, filepath.Join(dir, "link")), os.Chmod(dir, 0o755),
		os.Mkdir(filepath.Join(open, "below"), 0o755), os.Mkdir(filepath.Join(foreign, "below"), 0o755),
		os.Mkdir(filepath.Join(dir, "sticky"), 0o755), os.Chmod(filepath.Join(dir, "sticky"), 0o777|os.ModeSticky), os.Mkdir(filepath.Join(dir, "sticky", "below"), 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for path, good := range map[string]bool{
		dir: true, open: false, foreign: false, file: false, filepath.Join(dir, "none"): false, filepath.Join(dir, "link"): false, ".": false, "": false,
		// Who can write to a folder above it moves it away and puts a link there.
		filepath.Join(open, "below"): false, filepath.Join(foreign, "below"): false, filepath.Join(dir, "link", "sticky"): false,
		filepath.Join(dir, "sticky"): false, filepath.Join(dir, "sticky", "below"): true,
	} {
		if err := (Imports{path}).Check(); (err == nil) != good {
			t.Errorf("%s: %v", path, err)
		}
	}
}
