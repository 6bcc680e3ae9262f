package rundir

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

func directories(t *testing.T, stateDir bool) config.Config {
	t.Helper()
	c := config.Default()
	root := t.TempDir()
	c.RunDir, c.StateDir = filepath.Join(root, "run"), filepath.Join(root, "state")
	if stateDir {
		if err := os.Mkdir(c.StateDir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// TestTry: whoever has one of the locks keeps others from undoing, and what was not there before is not there afterwards.
func TestTry(t *testing.T) {
	for name, locked := range map[string]func(config.Config) string{"the run directory": Lock, "the state directory": stateLock} {
		c := directories(t, true)
		lock, err := state.TryLock(locked(c))
		if err != nil {
			t.Fatal(err)
		}
		if owned, err := Try(c); owned != nil || !errors.Is(err, state.ErrLocked) {
			t.Errorf("%s is locked: %v, %v", name, owned, err)
		}
		canceled, cancel := context.WithCancel(t.Context())
		cancel()
		if owned, err := Await(canceled, c); owned != nil || !errors.Is(err, state.ErrLocked) || !errors.Is(err, context.Canceled) {
			t.Errorf("%s is locked: %v, %v", name, owned, err)
		}
		if err := lock.Remove(); err != nil {
			t.Fatal(err)
		}
		owned, err := Await(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(owned.Unlock(), owned.Unlock(), owned.Release()); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(filepath.Join(filepath.Dir(c.RunDir), "*")); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

// TestTryWithoutState: no state directory is made for nothing to be undone.
func TestTryWithoutState(t *testing.T) {
	c := directories(t, false)
	owned, err := Try(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(c.StateDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v", c.StateDir, err)
	}
	if err := owned.Release(); err != nil {
		t.Error(err)
	}
}

// TestTryWithoutRoom: a lock that can't be made is told of, and the other one is taken all the same.
func TestTryWithoutRoom(t *testing.T) {
	c := directories(t, true)
	if err := os.WriteFile(c.RunDir, nil, 0o600); err != nil { // no directory can be there
		t.Fatal(err)
	}
	owned, err := Try(c)
	if owned == nil || err == nil || errors.Is(err, state.ErrLocked) {
		t.Fatalf("%v, %v", owned, err)
	}
	if _, err := state.TryLock(stateLock(c)); !errors.Is(err, state.ErrLocked) {
		t.Errorf("the state directory is not locked: %v", err)
	}
	if err := owned.Unlock(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(c.RunDir); err != nil {
		t.Errorf("what is no directory of ours was removed: %v", err)
	}
	if _, err := Await(t.Context(), c); err == nil || errors.Is(err, state.ErrLocked) {
		t.Errorf("Await without a run directory: %v", err)
	}
}

// TestAcquire: a daemon needs both locks, and says which other one is in its way.
func TestAcquire(t *testing.T) {
	c := directories(t, false)
	first, err := Acquire(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Acquire(c); !errors.Is(err, ErrAttached) {
		t.Errorf("the same directories: %v", err)
	}
	other := c
	other.RunDir += "2"
	if _, err := Acquire(other); !errors.Is(err, ErrElsewhere) {
		t.Errorf("another run directory: %v", err)
	}
	if _, err := os.Lstat(other.RunDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory is left: %v", err)
	}
	if err := first.Release(); err != nil {
		t.Error(err)
	}
	second, err := Acquire(other)
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Release(); err != nil {
		t.Error(err)
	}
}
