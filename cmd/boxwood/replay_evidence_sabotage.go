//go:build sabotage_evidence

package main

const (
	beginsAnew = false
	countsAll  = true
)
