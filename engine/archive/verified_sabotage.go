//go:build sabotage_archive

package archive

const checksSums = false
