package errno

import (
	"syscall"

	"golang.org/x/sys/windows"
)

// numbers are those of sockets, and of files where package syscall does not know them.
var numbers = map[syscall.Errno]syscall.Errno{
	windows.ERROR_DIR_NOT_EMPTY:     syscall.ENOTEMPTY,
	windows.ERROR_SHARING_VIOLATION: syscall.EBUSY,
	windows.WSAEACCES:               syscall.EACCES,
	windows.WSAEADDRINUSE:           syscall.EADDRINUSE,
	windows.WSAEADDRNOTAVAIL:        syscall.EADDRNOTAVAIL,
	windows.WSAEAFNOSUPPORT:         syscall.EAFNOSUPPORT,
	windows.WSAECONNABORTED:         syscall.ECONNABORTED,
	windows.WSAECONNREFUSED:         syscall.ECONNREFUSED,
	windows.WSAECONNRESET:           syscall.ECONNRESET,
	windows.WSAEHOSTDOWN:            syscall.EHOSTDOWN,
	windows.WSAEHOSTUNREACH:         syscall.EHOSTUNREACH,
	windows.WSAEINVAL:               syscall.EINVAL,
	windows.WSAEMFILE:               syscall.EMFILE,
	windows.WSAEMSGSIZE:             syscall.EMSGSIZE,
	windows.WSAENETDOWN:             syscall.ENETDOWN,
	windows.WSAENETUNREACH:          syscall.ENETUNREACH,
	windows.WSAENOBUFS:              syscall.ENOBUFS,
	windows.WSAETIMEDOUT:            syscall.ETIMEDOUT,
}

func posix(number syscall.Errno) syscall.Errno {
	if known, ok := numbers[number]; ok {
		return known
	}
	return number
}
