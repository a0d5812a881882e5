//go:build !sabotage_failed

package engine

// failedCaptureTaints: no verdict leans on a capture that failed (law 2). The build tag sabotage_failed breaks this on purpose;
// TestFailedCaptureIsRemembered must then fail.
const failedCaptureTaints = true
