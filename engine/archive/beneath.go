//go:build !sabotage_beneath

package archive

import "golang.org/x/sys/unix"

// beneath: what an archive says of files is done in the folder of changes and nowhere else (law 8). The build tag sabotage_beneath
// breaks this on purpose; TestNothingLeadsOutOfALayer must then fail.
const beneath = unix.RESOLVE_NO_XDEV | unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS
