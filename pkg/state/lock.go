package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ErrLocked means that another process, or another Locked of this one, holds
// the lock.
var ErrLocked = errors.New("locked")

// errNoHolder means that the lock is held and its file names nobody.
var errNoHolder = fmt.Errorf("%w by another process", ErrLocked)

// lockAttempts is how often TryLock tries again when nobody is named, or when the directory has just been removed.
const lockAttempts = 5

// errHeld is what lockFile says of a file that another process has locked.
var errHeld = errors.New("held")

// lockPoll is how often Lock tries again: the system's own wait can't be cancelled.
const lockPoll = 20 * time.Millisecond

// dyingPolls is how often the holder of a lock is looked for where none can be seen.
const dyingPolls = 20

// Locked is a held lock. The kernel drops it when the process dies, however it
// dies.
type Locked struct{ f *os.File }

// TryLock takes an exclusive lock on path (flock(2); LockFileEx on Windows), or
// fails at once with an error that is ErrLocked and names the holder. The file, and its directory, are
// made if missing.
func TryLock(path string) (*Locked, error) {
	for attempt := 0; ; attempt++ {
		l, err := tryLock(path)
		if (errors.Is(err, errNoHolder) || errors.Is(err, fs.ErrNotExist)) && attempt < lockAttempts {
			// Another process that only looks for the holder, see Holder, or that has just got it; or one that, at its end,
			// removed the directory between our making it and the file.
			time.Sleep(lockPoll)
			continue
		}
		if err != nil {
			return nil, err
		}
		// Who held it before may have removed the file, see Remove: then this is a lock on nothing.
		if l.isAt(path) {
			return l, nil
		}
		_ = l.f.Close()
	}
}

func (l *Locked) isAt(path string) bool {
	mine, err := l.f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(mine, there)
}

func tryLock(path string) (*Locked, error) {
	if err := MkdirAll(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	f, err := openLock(path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if err := lockFile(f, true); err != nil {
		defer f.Close()
		if !errors.Is(err, errHeld) {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		buf := make([]byte, 16)
		n, _ := f.Read(buf)
		pid := strings.TrimSpace(string(buf[:n]))
		if pid == "" {
			if holder := holderOf(f); holder != 0 {
				pid = strconv.Itoa(holder)
			} else {
				return nil, fmt.Errorf("%s: %w: try again", path, errNoHolder)
			}
		}
		return nil, fmt.Errorf("%s: %w by process %s: wait for it, or end it", path, ErrLocked, pid)
	}
	// The number only helps a person; the lock holds without it.
	if f.Truncate(0) == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return &Locked{f}, nil
}

// Holder returns the process that holds the lock on path, 0 if that one can't be seen from here: in another PID namespace.
// held is false if nobody does.
func Holder(path string) (pid int, held bool) {
	// One that dies has its lock a moment longer than its descriptors, by which it is known.
	for range dyingPolls {
		if pid, held = holder(path); pid != 0 || !held {
			break
		}
		time.Sleep(lockPoll)
	}
	return pid, held
}

func holder(path string) (pid int, held bool) {
	f, err := openLock(path, os.O_RDONLY)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	if err := lockFile(f, false); !errors.Is(err, errHeld) {
		return 0, false
	}
	if pid := holderOf(f); pid != 0 {
		return pid, true
	}
	// What it says itself, if it had room to.
	buf := make([]byte, 16)
	n, _ := f.Read(buf)
	if pid, err = strconv.Atoi(strings.TrimSpace(string(buf[:n]))); err != nil || pid <= 0 || !holds(pid, f) {
		return 0, true
	}
	return pid, true
}

// Remove removes the lock file and releases the lock. A process that waits for it finds out and takes a new one.
func (l *Locked) Remove() error {
	if l == nil || l.f == nil {
		return nil
	}
	var err error
	if l.isAt(l.f.Name()) { // else it is somebody else's
		err = os.Remove(l.f.Name())
	}
	return errors.Join(err, l.Unlock())
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
