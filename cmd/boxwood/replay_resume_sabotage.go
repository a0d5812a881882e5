//go:build sabotage_resume

package main

const (
	beginsAnew = true
	countsAll  = false
)
