//go:build sabotage_beneath

package archive

const beneath = 0
