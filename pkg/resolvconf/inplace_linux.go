package resolvconf

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

// A file that is a mount point can't be renamed, exchanged or removed, only
// overwritten. What that costs is made up for so: a copy of the original is
// synced beside the file and in the journal before the first octet of it is
// changed, and a mixture of the two, which a crash can leave, is known for what
// it is by [record.torn]. To write the original back takes no new space.

// overwrite writes and exchanges for a file that can't be renamed.
func (m *Manager) overwrite(orig original, text []byte) (string, error) {
	err := m.at("write", func() error {
		if _, err := m.rebuild(orig, m.parked); err != nil {
			return err
		}
		return m.fs.SyncDir(m.dir)
	})
	if err != nil {
		return "", err
	}
	return "in place", m.at("exchange", func() error {
		if err := m.unlock(orig); err != nil {
			return err
		}
		return m.overwriteFile(object{info: orig.Info, content: orig.Content}, text)
	})
}

// overwriteFile gives the file new content, if it still is as it was when we
// looked.
func (m *Manager) overwriteFile(cur object, text []byte) error {
	now, err := m.look(m.path)
	if err != nil {
		return err
	}
	if !now.info.SameFile(cur.info) || !bytes.Equal(now.content, cur.content) {
		return fmt.Errorf("%w: try again", ErrChanged)
	}
	return hostfs.Overwrite(m.fs, m.path, text)
}

// copyIn gives the file the content and the times of the one that is parked
// under from, which stays.
func (m *Manager) copyIn(from string, cur object) error {
	parked, err := m.look(from)
	if err != nil {
		return err
	}
	if err := m.overwriteFile(cur, parked.content); err != nil {
		return err
	}
	return m.fs.SetTimes(m.path, parked.info.Atime, parked.info.Mtime)
}

// complete gives the original, back in place, what can only be set there, as far
// as a restore that was cut short did not.
func (m *Manager) complete(o original) error {
	if o.InPlace {
		now, err := m.fs.Lstat(m.path)
		if err != nil {
			return err
		}
		if now.SameFile(o.Info) && !now.Mtime.Equal(o.Info.Mtime) {
			if err := m.fs.SetTimes(m.path, o.Info.Atime, o.Info.Mtime); err != nil {
				return err
			}
		}
	}
	return m.lock(o)
}

// torn reports whether o is a mixture of the original and texts of ours, as a
// crash leaves it that came while one was written over the other: each octet is
// that of one of them, or of the space behind their ends.
func (r record) torn(o object) bool {
	if !r.known || !r.original.InPlace || o.Type != TypeRegular || o.tooLarge || !o.info.SameFile(r.original.Info) {
		return false
	}
	texts := [][]byte{r.original.Content}
	for _, t := range r.texts {
		texts = append(texts, t.Text)
	}
	byLength := func(a, b []byte) int { return len(a) - len(b) }
	shortest, longest := slices.MinFunc(texts, byLength), slices.MaxFunc(texts, byLength)
	if len(o.content) < len(shortest) || len(o.content) > len(longest) {
		return false
	}
	for i, octet := range o.content {
		known := octet == '\n' || octet == 0
		for _, text := range texts {
			known = known || i < len(text) && text[i] == octet
		}
		if !known {
			return false
		}
	}
	return true
}
