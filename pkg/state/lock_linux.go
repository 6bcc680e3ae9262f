package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrLocked means that another process, or another Locked of this one, holds
// the lock.
var ErrLocked = errors.New("locked")

// lockPoll is how often Lock tries again: flock(2) itself can't be cancelled.
const lockPoll = 20 * time.Millisecond

// Locked is a held lock. The kernel drops it when the process dies, however it
// dies.
type Locked struct{ f *os.File }

// TryLock takes an exclusive flock(2) on path, or fails at once with an error
// that is ErrLocked and names the holder. The file, and its directory, are
// made if missing and stay: to remove a lock file is a race.
func TryLock(path string) (*Locked, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		defer f.Close()
		if err != unix.EWOULDBLOCK {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		buf := make([]byte, 16)
		n, _ := f.Read(buf)
		holder := "another process"
		if pid := strings.TrimSpace(string(buf[:n])); pid != "" {
			holder = "process " + pid
		}
		return nil, fmt.Errorf("%s: %w by %s: wait for it, or end it", path, ErrLocked, holder)
	}
	// The number only helps a person; the lock holds without it.
	if f.Truncate(0) == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return &Locked{f}, nil
}

// Lock is TryLock that waits until ctx is done. The error then is both
// ErrLocked and the context's.
func Lock(ctx context.Context, path string) (*Locked, error) {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		l, err := TryLock(path)
		if err == nil || !errors.Is(err, ErrLocked) {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (%w)", err, ctx.Err())
		case <-tick.C:
		}
	}
}

// Unlock releases the lock; the second call does nothing. Not for concurrent
// use.
func (l *Locked) Unlock() error {
	if l == nil || l.f == nil {
		return nil
	}
	f := l.f
	l.f = nil
	_ = f.Truncate(0)
	return f.Close()
}
