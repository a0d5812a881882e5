package tree

func writeUntilKilled(dir string) {}
