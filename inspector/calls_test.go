package inspector

import (
	"bufio"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

func TestTableIsWellFormed(t *testing.T) {
	byName := map[string]bool{}
	for i, c := range calls {
		if c.nr < 0 || c.nr >= 512 || byName[c.name] || i > 0 && calls[i-1].nr >= c.nr {
			t.Errorf("row %d (%d %s) is out of order, out of range, or there twice", i, c.nr, c.name)
		}
		byName[c.name] = true
		if c.class&bitContent != 0 && c.class&bitFD == 0 {
			t.Errorf("%s: content without a descriptor", c.name)
		}
	}
}

// compat32 are calls that only 32-bit programs have. All their calls count as
// anything, whatever the number.
var compat32 = regexp.MustCompile(`(16|32|_time32|_time64)$|^(ia32_|s390_|old|spu_|pciconfig_|compat_)`)

// only32 are those that the pattern doesn't tell, and names that the kernel uses
// for what the table has under the call's own name.
var only32 = strings.Fields(`fadvise64_64 fstatfs64 gethostname ipc llseek mmap_pgoff newfstat newlstat newstat
	newuname ni_syscall nice readdir recv rtas send sendfile64 sgetmask signal sigpending sigprocmask sigsuspend
	socketcall ssetmask statfs64 stime subpage_prot sync_file_range2 umount vm86 waitpid sigaction sigreturn`)

// A call that the running kernel has and the table doesn't name is a hole in the
// argument (though not in the verdict: unnamed calls count as anything).
func TestEveryCallOfThisKernelIsNamed(t *testing.T) {
	testenv.Require(t, testenv.Root)
	f, err := os.Open("/proc/kallsyms")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	named := map[string]bool{}
	for _, c := range calls {
		named[c.name] = true
	}
	seen := 0
	symbol := regexp.MustCompile(`^\S+ [tT] __x64_sys_(\w+)$`)
	for s := bufio.NewScanner(f); s.Scan(); {
		m := symbol.FindStringSubmatch(s.Text())
		if m == nil || compat32.MatchString(m[1]) || slices.Contains(only32, m[1]) {
			continue
		}
		seen++
		if !named[m[1]] {
			t.Errorf("the kernel has %s, the table doesn't", m[1])
		}
	}
	if seen < 300 {
		t.Fatalf("only %d calls found in /proc/kallsyms: this test can't see", seen)
	}
}

// The C library's header knows numbers, too.
func TestNumbersAreTheHeaders(t *testing.T) {
	data, err := os.ReadFile("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
	testenv.Require(t, func() string {
		if err != nil {
			return "needs the kernel's headers (linux-libc-dev): " + err.Error()
		}
		return ""
	})
	rows := regexp.MustCompile(`(?m)^#define __NR_(\w+) (\d+)$`).FindAllStringSubmatch(string(data), -1)
	if len(rows) < 300 {
		t.Fatalf("only %d numbers in the header", len(rows))
	}
	for _, row := range rows {
		nr, _ := strconv.Atoi(row[2])
		if i := slices.IndexFunc(calls, func(c call) bool { return c.nr == nr }); i < 0 || calls[i].name != row[1] {
			t.Errorf("the header has %s as %d, the table doesn't", row[1], nr)
		}
	}
}

// Calls that change files must never be classed as nothing.
func TestCallsThatChangeAreClassed(t *testing.T) {
	change := regexp.MustCompile(`^(p?write|pwritev|mk|rm|un?link|sym|link|rename|ch(mod|own)|f?l?ch(mod|own)|[fl]?(set|remove)xattr|[f]?truncate|fallocate|splice|sendfile|copy_|utime|futime|mount|u?mount|pivot|sethost|setdomain|shm(get|at)|sem|msg|mq_|keyctl|add_key|io_(submit|uring)|file_setattr|creat|open)`)
	for _, c := range calls {
		reads := slices.Contains([]string{"chdir", "semctl", "msgctl", "open_tree", "open_tree_attr", "mq_notify", "unlink_"}, c.name)
		if change.MatchString(c.name) && c.class == nothing && !reads {
			t.Errorf("%s is classed as nothing", c.name)
		}
	}
}
