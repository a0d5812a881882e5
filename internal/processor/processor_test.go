package processor

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// Nothing is missing of what is here; each bit more is named; what is no description is an error.
func TestLacks(t *testing.T) {
	here := Features()
	if missing, err := Lacks(here); err != nil || missing != "" {
		t.Fatalf("%s lacks %q of itself: %v", here, missing, err)
	}
	for i, v := range read() {
		for bit := range 32 {
			more := v | 1<<bit
			if more == v {
				continue
			}
			parts := strings.Split(here, ".")
			parts[i] = strconv.FormatUint(uint64(more), 16)
			if missing, err := Lacks(strings.Join(parts, ".")); err != nil || missing != words[i].name+"["+strconv.Itoa(bit)+"]" {
				t.Errorf("bit %d more in %s: %q, %v", bit, words[i].name, missing, err)
			}
		}
	}
	for _, bad := range []string{"", "1.2", here + ".0", strings.Replace(here, ".", ".x", 1), strings.Replace(here, ".", ".100000000", 1)} {
		if _, err := Lacks(bad); err == nil {
			t.Errorf("%q describes a processor", bad)
		}
	}
}

// The kernel finds the same, where it has a name for it.
func TestKernelAgrees(t *testing.T) {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Skip(err)
	}
	_, flags, _ := strings.Cut(string(text), "\nflags")
	flags, _, _ = strings.Cut(flags, "\n")
	has := map[string]bool{}
	for _, f := range strings.Fields(flags) {
		has[f] = true
	}
	found := read()
	for _, c := range []struct {
		flag, word string
		bit        int
	}{
		{"sse2", "1.edx", 26}, {"fma", "1.ecx", 12}, {"aes", "1.ecx", 25}, {"avx", "1.ecx", 28}, {"rdrand", "1.ecx", 30}, {"popcnt", "1.ecx", 23},
		{"avx2", "7.ebx", 5}, {"bmi2", "7.ebx", 8}, {"avx512f", "7.ebx", 16}, {"sha_ni", "7.ebx", 29}, {"avx512vl", "7.ebx", 31},
		{"gfni", "7.ecx", 8}, {"vaes", "7.ecx", 9}, {"fsrm", "7.edx", 4}, {"amx_tile", "7.edx", 24}, {"avx_vnni", "7/1.eax", 4},
		{"xsavec", "13/1.eax", 1}, {"abm", "80000001.ecx", 5}, {"rdtscp", "80000001.edx", 27},
	} {
		for i, w := range words {
			if w.name == c.word && (found[i]&(1<<c.bit) != 0) != has[c.flag] {
				t.Errorf("%s: the kernel says %v, %s is %x", c.flag, has[c.flag], w.name, found[i])
			}
		}
	}
}
