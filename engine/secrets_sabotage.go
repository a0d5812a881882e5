//go:build sabotage_secrets

package engine

const hidesSecrets = false
