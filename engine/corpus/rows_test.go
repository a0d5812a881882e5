package corpus

import (
	"fmt"
	"slices"
	"strings"

	"github.com/boxwood-rl/boxwood/tree"
)

// row is one way of doing something. Its name is that of a function in the
// programs of testdata (and of the inspector's ways.c).
type row struct {
	way   string
	calls string       // of the inspector's table, that it is there to try
	half  tree.Verdict // that it is meant to change; what it does change, the oracle says
	langs string       // c, p(ython), s(hell)
	fd    bool         // it acts on a descriptor, so it matters whose that is
}

var rows = []row{
	{"write_", "write", tree.Files, "cps", true},
	{"pwrite_", "pwrite64", tree.Files, "cp", true},
	{"writev_", "writev", tree.Files, "cp", true},
	{"pwritev_", "pwritev", tree.Files, "cp", true},
	{"pwritev2_", "pwritev2", tree.Files, "c", true},
	{"append", "write", tree.Files, "cps", false},
	{"buffered", "write", tree.Files, "p", false},
	{"write_child", "write", tree.Files, "s", true},
	{"write_same", "pwrite64", tree.Files, "c", true},
	{"write_many", "write", tree.Files, "cs", true},
	{"sendfile_", "sendfile", tree.Files, "cp", true},
	{"splice_", "splice", tree.Files, "cp", true},
	{"tee_splice", "tee splice", tree.Files, "c", true},
	{"copy_file_range_", "copy_file_range", tree.Files, "cp", true},
	{"copy", "copy_file_range", tree.Files, "s", false},
	{"ficlone", "ioctl", tree.Files, "cps", true},
	{"ficlonerange", "ioctl", tree.Files, "c", true},
	{"fallocate_", "fallocate", tree.Files, "cp", true},
	{"fallocate_keep", "fallocate", tree.Files, "c", true},
	{"punch", "fallocate", tree.Files, "cp", true},
	{"zero_range", "fallocate", tree.Files, "c", true},
	{"sparse", "pwrite64 fallocate", tree.Files, "cs", true},
	{"truncate_", "truncate", tree.Files, "cps", false},
	{"truncate_grow", "truncate", tree.Files, "cs", false},
	{"ftruncate_", "ftruncate", tree.Files, "cp", true},
	{"ftruncate_restore", "ftruncate utimensat", tree.Files, "c", true},
	{"o_trunc", "open openat", tree.Files, "cps", false},
	{"o_trunc_empty", "open openat", tree.Files, "cs", false},
	{"creat_", "creat", tree.Files, "c", false},
	{"openat2_trunc", "openat2", tree.Files, "c", false},
	{"o_direct", "write", tree.Files, "c", false},
	{"dd_direct", "write", tree.Files, "s", false},
	{"dd_notrunc", "write", tree.Files, "s", false},
	{"mmap_store", "mmap", tree.Files, "cp", true},
	{"mapped_store", "mmap", tree.Files, "cp", true},
	{"mmap_after_close", "mmap close", tree.Files, "c", true},
	{"mmap_mprotect", "mprotect", tree.Files, "c", true},
	{"madv_remove", "madvise", tree.Files, "c", true},
	{"madv_remove_half", "madvise", tree.Files, "c", true},
	{"read_into_map", "read", tree.Files, "c", true},
	{"io_submit_", "io_submit", tree.Both, "c", true},
	{"io_uring_write", "io_uring_setup io_uring_enter", tree.Both, "c", true},
	{"int80", "", tree.Files, "c", true},
	{"x32", "", tree.Both, "c", false},
	{"inherited", "write", tree.Files, "c", true},
	{"stdout_", "write dup2", tree.Files, "cps", true},
	{"proc_self_fd", "openat write", tree.Files, "cps", false},
	{"passed", "sendmsg recvmsg write", tree.Files, "cp", true},
	{"double_fork", "write", tree.Files, "cps", true},
	{"unshared", "unshare write", tree.Files, "c", true},
	{"memfd_exec", "memfd_create execveat write", tree.Files, "c", false},
	{"concurrent", "pwrite64 write", tree.Files, "cps", false},
	{"race_write", "write dup2", tree.Files, "c", false},
	{"race_fchmod", "fchmod dup2", tree.Files, "c", false},
	{"race_close", "write close", tree.Files, "c", false},
	{"race_path_chmod", "chmod", tree.Files, "c", false},
	{"race_path_truncate", "truncate", tree.Files, "c", false},
	{"race_path_unlink", "unlink", tree.Files, "c", false},
	{"create", "open openat", tree.Files, "cps", false},
	{"tmpfile_link", "linkat", tree.Files, "cp", false},
	{"rename_", "rename renameat renameat2", tree.Files, "cps", false},
	{"rename_over", "rename", tree.Files, "cps", false},
	{"rename_dir", "rename", tree.Files, "cps", false},
	{"rename_into", "rename", tree.Files, "cps", false},
	{"exchange", "renameat2", tree.Files, "cp", false},
	{"link_", "link linkat", tree.Files, "cps", false},
	{"symlink_", "symlink symlinkat", tree.Files, "cps", false},
	{"mkfifo_", "mknod mknodat", tree.Files, "cps", false},
	{"mknod_", "mknod mknodat", tree.Files, "cp", false},
	{"bind_", "bind", tree.Files, "cp", false},
	{"mkdir_", "mkdir mkdirat", tree.Files, "cps", false},
	{"rmdir_", "rmdir", tree.Files, "cps", false},
	{"unlink_", "unlink unlinkat", tree.Files, "cps", false},
	{"unlink_write", "unlink write", tree.Files, "c", true},
	{"replace_same", "unlink", tree.Files, "c", false},
	{"tree_", "unlinkat", tree.Files, "s", false},
	{"sed_i", "rename write", tree.Files, "s", false},
	{"long_name", "open openat", tree.Files, "cs", false},
	{"chmod_", "chmod fchmodat", tree.Files, "cps", false},
	{"fchmod_", "fchmod", tree.Files, "cp", true},
	{"fchmodat2_", "fchmodat2", tree.Files, "cp", false},
	{"chmod_dir", "chmod fchmodat", tree.Files, "cps", false},
	{"fchmod_dir", "fchmod", tree.Files, "c", false},
	{"chown_", "chown fchownat", tree.Files, "cps", false},
	{"lchown_", "lchown fchownat", tree.Files, "cp", false},
	{"fchown_", "fchown", tree.Files, "cp", true},
	{"utimensat_", "utimensat", tree.Files, "cps", false},
	{"utimensat_dir", "utimensat", tree.Files, "cps", false},
	{"futimens_", "utimensat", tree.Files, "cp", true},
	{"utimes_", "utimes", tree.Files, "c", false},
	{"futimesat_", "futimesat", tree.Files, "c", false},
	{"utime_", "utime", tree.Files, "c", false},
	{"touch", "utimensat", tree.Files, "cps", false},
	{"setxattr_", "setxattr", tree.Files, "cp", false},
	{"lsetxattr_", "lsetxattr", tree.Files, "c", false},
	{"fsetxattr_", "fsetxattr", tree.Files, "cp", true},
	{"setxattrat_", "setxattrat", tree.Files, "c", false},
	{"setxattr_dir", "setxattr", tree.Files, "c", false},
	{"removexattr_", "removexattr", tree.Files, "cp", false},
	{"lremovexattr_", "lremovexattr", tree.Files, "c", false},
	{"fremovexattr_", "fremovexattr", tree.Files, "c", true},
	{"removexattrat_", "removexattrat", tree.Files, "c", false},
	{"setflags", "ioctl", tree.Files, "cp", true},
	{"fssetxattr", "ioctl", tree.Files, "c", true},
	{"file_setattr_", "file_setattr", tree.Files, "c", false},
	{"setflags_dir", "ioctl", tree.Files, "c", false},

	{"shm", "shmget shmat", tree.Process, "cp", false},
	{"msg", "msgget", tree.Process, "cp", false},
	{"msg_sent", "msgsnd msgrcv", tree.Process, "c", false},
	{"sem", "semget", tree.Process, "cp", false},
	{"sem_used", "semop semtimedop semctl", tree.Process, "c", false},
	{"mq", "mq_open", tree.Process, "c", false},
	{"mq_sent", "mq_timedsend mq_timedreceive", tree.Process, "c", false},
	{"hostname", "sethostname", tree.Process, "cps", false},
	{"domainname", "setdomainname", tree.Process, "c", false},
	{"mount_", "mount", tree.Process, "cps", false},
	{"bind_mount", "mount", tree.Process, "cs", false},
	{"lo_ioctl", "ioctl", tree.Process, "c", false},
	{"netlink_set", "sendto", tree.Process, "c", false},
	{"netlink_write", "write", tree.Process, "c", false},
	{"limits_of_1", "prlimit64", tree.Process, "c", false},
	{"batch_of_1", "sched_setscheduler sched_setparam", tree.Process, "c", false},
	{"affinity_of_1", "sched_setaffinity", tree.Process, "c", false},
	{"nice_of_1", "setpriority", tree.Process, "s", false},
	{"survivor", "", tree.Process, "cps", false},
}

// still leaves nothing behind; the inspector should say so.
var still = map[string][]string{
	"c": {"quiet", "reads", "open_rdwr", "create_unlink", "mkdtemp_", "tmpfile_gone", "rename_new", "rename_back",
		"failed", "dev_null", "pipes", "memfd", "write_nothing", "private_map", "shared_map_read", "children",
		"fsyncs", "bound_gone", "big_temp", "netlink_get", "own_limits", "loopback", "link_unlink", "lock"},
	"p": {"quiet", "reads", "open_rdwr", "create_unlink", "mkdtemp_", "tmpfile_gone", "rename_new", "rename_back",
		"failed", "threads", "children", "bound_gone", "private_map", "link_unlink", "lock"},
	"s": {"quiet", "reads", "open_rdwr", "create_unlink", "mkdtemp_", "rename_new", "rename_back", "heredoc",
		"pipes", "failed", "children", "own_limits", "fsyncs", "link_unlink"},
}

// stratum is a row of the table that is printed.
type stratum struct{ way, lang, origin string }

func (s stratum) MarshalText() ([]byte, error) {
	return []byte(s.way + " " + s.lang + " " + s.origin), nil
}

func (s *stratum) UnmarshalText(text []byte) error {
	if _, err := fmt.Sscan(string(text), &s.way, &s.lang, &s.origin); err != nil {
		return fmt.Errorf("reading the row %q: %w", text, err)
	}
	return nil
}

// Whose descriptor is used.
const (
	own       = "own"
	inherited = "inherited"
	survivors = "survivor's"
	shared    = "shared" // with an idle thread
	raced     = "raced"  // with a thread that swaps it
)

var option = map[string]string{own: "", inherited: "-i", survivors: "-S", shared: "-t", raced: "-r"}

func strata() (all []stratum) {
	for _, r := range rows {
		for lang := range strings.SplitSeq(r.langs, "") {
			origins := []string{own}
			if lang != "s" {
				origins = append(origins, shared)
			}
			if r.fd {
				origins = append(origins, inherited, survivors)
				if lang != "s" {
					origins = append(origins, raced)
				}
			}
			for _, o := range origins {
				if s := (stratum{r.way, lang, o}); !slices.Contains(impossible, s) {
					all = append(all, s)
				}
			}
		}
	}
	return all
}

// refused are ways that the kernel refuses a sandbox, whose root has no rights over
// its namespaces or pid 1, and whose filter lets no call in the x32 way through. They are tried
// all the same, and must change nothing.
var refused = strings.Fields("x32 hostname domainname mount_ bind_mount sysctl lo_ioctl netlink_set netlink_write limits_of_1 batch_of_1 affinity_of_1 nice_of_1")

// impossible are combinations that would do something else than they say.
var impossible = []stratum{
	// A process with threads may not enter a user namespace.
	{"unshared", "c", shared}, {"unshared", "c", raced},
}

func rowOf(way string) row {
	return rows[slices.IndexFunc(rows, func(r row) bool { return r.way == way })]
}
