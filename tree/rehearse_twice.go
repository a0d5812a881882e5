//go:build rehearse

package tree

const rehearse = true
