//go:build sabotage_thread

package thread

const keepsFirst = false
