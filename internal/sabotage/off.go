//go:build !sabotage

package sabotage

// On is false in all that is released, so that the compiler leaves the fault out.
func On(string) bool { return false }

// Hundredth is false in all that is released.
func Hundredth(string) bool { return false }
