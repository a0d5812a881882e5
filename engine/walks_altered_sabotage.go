//go:build sabotage_files

package engine

func alterClone(dir string) error { return alterFile(dir, func() bool { return true }) }
