package box

func hostile() int { return 2 }
