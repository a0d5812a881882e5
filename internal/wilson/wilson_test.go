package wilson

import (
	"math"
	"testing"
)

// The expected values are those of other implementations of the same interval.
func TestInterval(t *testing.T) {
	for _, c := range []struct {
		k, n      int64
		low, high float64
	}{
		{0, 0, 0, 1},
		{0, 10, 0, 0.277533},
		{0, 200, 0, 0.018845},
		{1, 10, 0.017876, 0.404150},
		{5, 10, 0.236593, 0.763407},
		{10, 10, 0.722467, 1},
		{15, 148, 0.062391, 0.160536},
	} {
		low, high := Interval(c.k, c.n)
		if math.Abs(low-c.low) > 1e-4 || math.Abs(high-c.high) > 1e-4 {
			t.Errorf("%d of %d: %.6f to %.6f, want %.6f to %.6f", c.k, c.n, low, high, c.low, c.high)
		}
	}
	if s := String(0, 200); s != "0 of 200 (0.00 to 1.88 %)" {
		t.Errorf("%q", s)
	}
}
