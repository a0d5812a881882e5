//go:build !sabotage_none

package inspector

// pronounce is where a verdict leaves the inspector. In a saboteur build one in a
// hundred is none, whatever was found; TestEveryWayOfChangingIsSeen must then fail.
func pronounce(r Report) Report { return r }
