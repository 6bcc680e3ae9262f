package resolvconf

import "github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"

// locks are the inode flags that forbid to rename or to write a file.
const locks = hostfs.FlagImmutable | hostfs.FlagAppend

// unlock takes the locks from the original before it is moved or overwritten.
// The journal has them. It is called only with leave to do so, see
// TakeOver.OverrideImmutable; without, a file that has them is refused.
func (m *Manager) unlock(o original) error {
	if o.Flags&locks == 0 {
		return nil
	}
	return m.fs.SetFlags(m.path, o.Flags&^locks)
}

// lock gives the original, back in place, the locks that it had.
func (m *Manager) lock(o original) error {
	if o.Flags&locks == 0 {
		return nil
	}
	have, err := m.fs.Flags(m.path)
	if err != nil || have&locks == o.Flags&locks {
		return err
	}
	if err := m.fs.SetFlags(m.path, have|o.Flags&locks); err != nil {
		return err
	}
	return m.fs.SyncDir(m.dir) // before the journal forgets them
}
