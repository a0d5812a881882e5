//go:build sabotage_pages

package engine

const comparesPages = false
