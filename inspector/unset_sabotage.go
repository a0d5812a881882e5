//go:build sabotage_flag

package inspector

const neverSet = sawOld
