//go:build sabotage_lists

package service

const boundsLists = false
