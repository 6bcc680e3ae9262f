package peertest

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// AsUser runs do as another user.
func AsUser(t *testing.T, uid int, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread is that user's, and ends with this goroutine
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			t.Errorf("become user %d: %v", uid, errno)
			return
		}
		do()
	}()
	<-done
}
