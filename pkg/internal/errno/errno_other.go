//go:build !windows

package errno

import "syscall"

func posix(number syscall.Errno) syscall.Errno { return number }
