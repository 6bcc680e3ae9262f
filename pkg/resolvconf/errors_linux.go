package resolvconf

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// What a caller can act on. Every error of the package that has one of these
// causes wraps it, together with what the kernel said.
var (
	// ErrReadOnly: the file system is mounted read-only.
	ErrReadOnly = errors.New("read-only file system")
	// ErrImmutable: chattr +i or +a is set on the file or its directory.
	ErrImmutable = errors.New("immutable or append-only attribute")
	// ErrImmutableFile is an ErrImmutable of the file itself, which
	// TakeOver.OverrideImmutable is for.
	ErrImmutableFile = fmt.Errorf("%w", ErrImmutable)
	// ErrBindMount: the file is a mount point and can't be renamed. That is
	// what TakeOver.InPlace is for.
	ErrBindMount = errors.New("bind mount")
	// ErrNoSpace: the disk, the quota or the inodes are used up.
	ErrNoSpace = errors.New("no space")
	// ErrPermission: not root, or a security module refuses.
	ErrPermission = errors.New("not permitted")
	// ErrElsewhere: this process sees another file than the rest of the host,
	// which would not notice a takeover.
	ErrElsewhere = errors.New("in another mount namespace than the host's")
	// ErrNotFile: neither a regular file nor a symbolic link.
	ErrNotFile = errors.New("neither a file nor a symbolic link")
	// ErrTooLarge: over MaxSize.
	ErrTooLarge = safefile.ErrTooLarge
	// ErrNoUpstream: the old configuration names no server that could answer.
	// A caller who was given upstreams passes TakeOver.UpstreamsGiven.
	ErrNoUpstream = errors.New("no usable upstream")
	// ErrLeftover: the file in place is ours, but the journal knows nothing of
	// it. Restore first.
	ErrLeftover = errors.New("left over from an earlier attach")
	// ErrChanged: somebody replaced the file while we worked; try again.
	ErrChanged = errors.New("changed by somebody else meanwhile")
	// ErrNotTaken: there is nothing to put ours back in place of.
	ErrNotTaken = errors.New("not taken over")
	// ErrLost: the file in place is ours and the original is nowhere.
	ErrLost = errors.New("original is lost")
	// ErrRecordKept: the original is in place, and what is parked or recorded
	// could not be removed. It does no harm; a later restore removes it.
	ErrRecordKept = errors.New("restored, but not tidied up")
	// ErrNothingToPublish: no upstream that a pod could reach, and no file of
	// an earlier time to keep.
	ErrNothingToPublish = errors.New("nothing to publish")
)

// explain adds cause and remedy to an error of a system call. doing says what
// was attempted, with the file's name.
func explain(doing string, err error) error {
	if err == nil {
		return nil
	}
	var cause error
	var remedy string
	switch {
	case errors.Is(err, syscall.EROFS):
		cause, remedy = ErrReadOnly, "remount it read-write, or name another place: --state-dir for the journal, --resolver none to leave resolv.conf alone"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		cause, remedy = ErrNoSpace, "free disk space or inodes (df, df -i) and try again"
	case errors.Is(err, syscall.EBUSY):
		cause, remedy = ErrBindMount, "unmount it, or use --resolver none"
	case errors.Is(err, syscall.EPERM):
		// EPERM is what a set attribute gives, and what a security module does.
		cause, remedy = ErrPermission, "see lsattr for an immutable attribute and the audit log for a security module"
	case errors.Is(err, fs.ErrPermission):
		cause, remedy = ErrPermission, "run as root"
	case errors.Is(err, syscall.EIO):
		return fmt.Errorf("%s: %w: see the kernel log for the disk", doing, err)
	default:
		return fmt.Errorf("%s: %w", doing, err)
	}
	return fmt.Errorf("%s: %w: %w: %s", doing, cause, err, remedy)
}

// explain is the function of that name, which also looks whether an attribute
// that was set meanwhile is the cause.
func (m *Manager) explain(doing string, err error) error {
	if errors.Is(err, syscall.EPERM) {
		for _, name := range []string{m.path, m.dir, m.parked} {
			info, lerr := m.fs.Lstat(name)
			if flag := attribute(info); lerr == nil && flag != "" {
				return fmt.Errorf("%s: %w: chattr +%s is set: run chattr -%s %s (%w)", doing, ErrImmutable, flag, flag, name, err)
			}
		}
	}
	return explain(doing, err)
}
