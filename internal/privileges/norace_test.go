//go:build !race

package privileges

const underRace = false
