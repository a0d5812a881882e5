//go:build !sabotage_archive

package archive

// checksSums: an archive is what was written (law 5). The build tag sabotage_archive breaks this on purpose;
// TestEveryDamageIsSeen must then fail.
const checksSums = true
