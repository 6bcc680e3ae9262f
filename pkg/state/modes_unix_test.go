//go:build unix

package state

import (
	"syscall"
	"testing"
)

// hasModes: files have the modes that they are given.
const hasModes = true

func narrowUmask(t *testing.T) {
	old := syscall.Umask(0o077)
	t.Cleanup(func() { syscall.Umask(old) })
}
