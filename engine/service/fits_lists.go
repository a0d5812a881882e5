//go:build !sabotage_lists

package service

// boundsLists: no list of a request is longer than a call takes. The build tag sabotage_lists breaks this on purpose;
// TestRequestsAreBounded must then fail.
const boundsLists = true
