//go:build !rehearse

package tree

// rehearse: each function given to Update runs twice, the first time for nothing. A build with
// the tag rehearse does so, and every test must then go as before: see Update.
const rehearse = false
