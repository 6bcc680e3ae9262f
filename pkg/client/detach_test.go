//go:build linux

package client

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
)

// TestAwaitLockOfStopped: a daemon that is stopped after it took the order to detach goes on, and is waited for.
func TestAwaitLockOfStopped(t *testing.T) {
	c := config.Config{RunDir: t.TempDir()}
	c.StateDir = filepath.Join(c.RunDir, "state")
	path := rundir.Lock(c)
	// It ends when it is continued.
	holder := exec.Command("sh", "-c", `exec 9>>"$1" && flock 9 && echo $$ >&9 && kill -STOP $$`, "sh", path)
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = holder.Process.Kill(), holder.Wait() })
	var status unix.WaitStatus
	if _, err := unix.Wait4(holder.Process.Pid, &status, unix.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("holder: %v, %v", status, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), stopTimeout)
	defer cancel()
	owned, err := awaitLocks(ctx, c, holder.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := owned.Release(); err != nil {
		t.Error(err)
	}
}
