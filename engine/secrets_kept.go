//go:build !sabotage_secrets

package engine

// hidesSecrets: what is recorded has no secret in it. The build tag sabotage_secrets breaks this on purpose;
// TestSecretsAreKeptNowhere must then fail.
const hidesSecrets = true
