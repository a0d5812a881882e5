// Package processor says which instructions programs can use here. A program asks once,
// when it starts, and goes on with what it found: its memory can only be restored on a
// processor that has all of it.
package processor

import (
	"fmt"
	"strconv"
	"strings"
)

func cpuid(leaf, sub uint32) (a, b, c, d uint32)

// words are the registers of CPUID that name instructions and the registers that are saved for them,
// each with the bits that concern programs. What only kernels use is left out, and so is what
// depends on the kernel's version alone.
var words = []struct {
	name      string
	leaf, sub uint32
	register  int // eax, ebx, ecx, edx
	bits      uint32
}{
	{"1.ecx", 1, 0, 2, 0x7ed83203},
	{"1.edx", 1, 0, 3, 0x07888911},
	{"7.ebx", 7, 0, 1, 0xfdef4b3d},
	{"7.ecx", 7, 0, 2, 0x3a415ffb},
	{"7.edx", 7, 0, 3, 0x03d1413c},
	{"7/1.eax", 7, 1, 0, 0x80a01cb7},
	{"7/1.edx", 7, 1, 3, 0x00084530},
	{"13.eax", 13, 0, 0, ^uint32(0)}, // what XSAVE saves
	{"13/1.eax", 13, 1, 0, 0x00000007},
	{"80000001.ecx", 0x80000001, 0, 2, 0x202109e1},
	{"80000001.edx", 0x80000001, 0, 3, 0xc8400800},
}

// Features are those of this processor: a hexadecimal word for each of words, with dots between.
func Features() string {
	out := make([]string, len(words))
	for i, v := range read() {
		out[i] = strconv.FormatUint(uint64(v), 16)
	}
	return strings.Join(out, ".")
}

func read() []uint32 {
	most, _, _, _ := cpuid(0, 0)
	mostExtended, _, _, _ := cpuid(0x80000000, 0)
	out := make([]uint32, len(words))
	for i, w := range words {
		if w.leaf <= most || w.leaf > 0x80000000 && w.leaf <= mostExtended {
			a, b, c, d := cpuid(w.leaf, w.sub)
			out[i] = [...]uint32{a, b, c, d}[w.register] & w.bits
		}
	}
	return out
}

// Lacks names what there was where Features gave had and isn't here; "" if nothing is missing.
func Lacks(had string) (string, error) {
	parts := strings.Split(had, ".")
	if len(parts) != len(words) {
		return "", fmt.Errorf("%.100q doesn't describe a processor", had)
	}
	var missing []string
	for i, here := range read() {
		v, err := strconv.ParseUint(parts[i], 16, 32)
		if err != nil {
			return "", fmt.Errorf("%.100q doesn't describe a processor", had)
		}
		for bit := range 32 {
			if uint32(v)&^here&(1<<bit) != 0 {
				missing = append(missing, fmt.Sprintf("%s[%d]", words[i].name, bit))
			}
		}
	}
	return strings.Join(missing, " "), nil
}
