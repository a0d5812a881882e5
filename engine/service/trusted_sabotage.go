//go:build sabotage_trust

package service

const asksWhoTrusts = false
