//go:build unix

package state

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

func openLock(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, flags|unix.O_NOFOLLOW, 0o600)
}

// lockFile takes flock(2), for this open file alone or shared. The error is errHeld if another has it.
func lockFile(f *os.File, exclusive bool) error {
	how := unix.LOCK_SH
	if exclusive {
		how = unix.LOCK_EX
	}
	for {
		switch err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); {
		case errors.Is(err, unix.EWOULDBLOCK):
			return errHeld
		case !errors.Is(err, unix.EINTR):
			return err
		}
	}
}
