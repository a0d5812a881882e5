//go:build !sabotage_nesting

package box

// restoredNests: in a restored box no namespaces can be made unless its policy allows it. The build tag
// sabotage_nesting breaks this on purpose; TestARestoredBoxIsConfinedAsAFreshOne must then fail.
const restoredNests = false
