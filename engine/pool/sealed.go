//go:build !sabotage_seal

package pool

// checksSeals: what is cloned has been held against its seal (law 5). The build tag sabotage_seal breaks this on purpose;
// TestNoSpareOfAChangedSnapshot must then fail.
const checksSeals = true
