//go:build !sabotage_pages

package engine

// comparesPages: a page isn't stored again if another has the same bytes, not if it is likely to. The build tag
// sabotage_pages breaks this on purpose; TestDumpsShareTheirPages must then fail.
const comparesPages = true
