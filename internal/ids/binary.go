package ids

import (
	"strings"
	"time"
)

// Binary is an id without its prefix, as its 16 bytes: they sort like the text. What
// isn't an id with this prefix, written as this package writes it, is not ok.
func Binary(id, prefix string) (b [16]byte, ok bool) {
	s, found := strings.CutPrefix(id, prefix)
	if !found || len(s) != 26 || s[0] > '7' {
		return b, false
	}
	// 26 digits of 5 bits, of which the first has 3: 128 in all.
	var hi, lo uint64
	for i := range 13 {
		a, z := digits[s[i]], digits[s[13+i]]
		if a|z > 31 {
			return b, false
		}
		hi, lo = hi<<5|uint64(a), lo<<5|uint64(z) // 63 bits and 65, whose top bit is shifted out
	}
	top := uint64(digits[s[13]]) >> 4 // and is this one
	for i := range 8 {
		b[8+i] = byte(lo >> (56 - 8*i))
		b[i] = byte((hi<<1 | top) >> (56 - 8*i))
	}
	return b, true
}

// MadeAt is when an id was made, to the millisecond; the zero time of what is none.
func MadeAt(id string) time.Time {
	prefix, _, _ := strings.Cut(id, "_")
	b, ok := Binary(id, prefix+"_")
	if !ok {
		return time.Time{}
	}
	var ms int64
	for _, x := range b[:6] {
		ms = ms<<8 | int64(x)
	}
	return time.UnixMilli(ms)
}

// Text is the id whose Binary is b.
func Text(prefix string, b [16]byte) string {
	var hi, lo uint64
	for i := range 8 {
		hi, lo = hi<<8|uint64(b[i]), lo<<8|uint64(b[8+i])
	}
	out := make([]byte, len(prefix)+26)
	s := out[copy(out, prefix):]
	for i := 25; i >= 0; i-- {
		s[i] = alphabet[lo&31]
		lo = lo>>5 | hi<<59
		hi >>= 5
	}
	return string(out)
}

const alphabet = "0123456789abcdefghjkmnpqrstvwxyz" // Crockford's, in lower case

var digits = func() (d [256]byte) {
	for i := range d {
		d[i] = 0xff
	}
	for i := range alphabet {
		d[alphabet[i]] = byte(i)
	}
	return d
}()
