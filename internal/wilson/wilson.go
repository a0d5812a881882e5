// Package wilson says how far a share that was counted may lie from the true one.
package wilson

import (
	"fmt"
	"math"

	"gonum.org/v1/gonum/stat/distuv"
)

// Interval is the 95 % score interval of k of n (E. B. Wilson, Probable
// inference, the law of succession, and statistical inference, Journal of the
// American Statistical Association 22, 1927). Unlike the normal approximation it
// says something at k = 0: 0 of 200 leaves up to 1.9 %. With n = 0 all is open.
func Interval(k, n int64) (low, high float64) {
	if n <= 0 {
		return 0, 1
	}
	z := distuv.UnitNormal.Quantile(0.975)
	m, p := float64(n), float64(k)/float64(n)
	middle := p + z*z/(2*m)
	half := z * math.Sqrt(p*(1-p)/m+z*z/(4*m*m))
	whole := 1 + z*z/m
	return max(0, (middle-half)/whole), min(1, (middle+half)/whole)
}

// String is "k of n (low to high %)".
func String(k, n int64) string {
	low, high := Interval(k, n)
	return fmt.Sprintf("%d of %d (%.2f to %.2f %%)", k, n, 100*low, 100*high)
}
