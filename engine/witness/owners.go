package witness

import (
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// GiveSockets gives the sockets of restored processes, which are as is, to the users to whom they belonged: CRIU, which is root,
// makes them. It says whether there were any. The processes should not run yet.
func GiveSockets(was, is *State) (given bool, err error) {
	for pid, p := range was.Processes {
		host, there := is.hosts[pid]
		if !there || len(p.Owners) == 0 {
			continue
		}
		fd, err := unix.PidfdOpen(host, 0)
		if err != nil {
			return given, fmt.Errorf("giving sockets of process %d to their users: %w", pid, err)
		}
		for name, owner := range p.Owners {
			if err = give(fd, name, is.uid+owner[0], is.gid+owner[1]); err != nil {
				err = fmt.Errorf("giving the socket of descriptor %s of process %d to its user: %w", name, pid, err)
				break
			}
			given = true
		}
		unix.Close(fd)
		if err != nil {
			return given, err
		}
	}
	return given, nil
}

func give(process int, name string, uid, gid int) error {
	number, err := strconv.Atoi(name)
	if err != nil {
		return err
	}
	fd, err := unix.PidfdGetfd(process, number, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return errors.New("it is no socket")
	}
	return unix.Fchown(fd, uid, gid)
}
