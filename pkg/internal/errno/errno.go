// Package errno says by which number of POSIX a system call failed. Windows has numbers of its own, of which those of sockets
// compare equal to none of those in package syscall. It is a leaf; every room may use it.
package errno

import (
	"errors"
	"slices"
	"syscall"
)

// Of returns the number that is in err, and whether there is one.
func Of(err error) (syscall.Errno, bool) {
	number, ok := errors.AsType[syscall.Errno](err)
	return posix(number), ok
}

// Is reports whether err has one of these numbers in it.
func Is(err error, numbers ...syscall.Errno) bool {
	number, ok := Of(err)
	return ok && slices.Contains(numbers, number)
}
