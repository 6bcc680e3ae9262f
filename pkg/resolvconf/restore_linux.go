package resolvconf

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

// Result is how a restore ended.
type Result string

// The results.
const (
	Restored    Result = "restored"
	NothingToDo Result = "nothing to do"
	LeftForeign Result = "left, it is somebody else's" // Outcome.Detail says what to do
)

// Outcome of a Restore.
type Outcome struct {
	Result Result
	Detail string // one line for the operator; may be empty
	// Inexact lists attributes of a rebuilt original that could not be set. An
	// original that was parked needs no rebuild and is exact.
	Inexact []string
}

// Restore puts the original back if ours is in place, or if nothing is. A
// foreign file is left, and then the original stays parked and recorded. It
// needs nothing but the journal, or with the journal lost the parked original,
// and no free space as long as that one is there. To call it again, or after
// it was cut short anywhere, is safe. On an error nothing is forgotten.
//
// A foreign file isn't left if it would leave the host without DNS: one that
// names no server, or none but us, such as ours edited by hand. It is copied to
// the state directory.
func (m *Manager) Restore() (Outcome, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out, err := m.restore()
	if err != nil {
		return out, err
	}
	// The caller tells it.
	m.log.Debug("resolver file", zap.String("path", m.path), zap.String("result", string(out.Result)),
		zap.String("detail", out.Detail))
	return out, nil
}

// Suspend puts the original back as Restore does, and leaves the record as it
// is. It is for a process that must not write the journal since another one,
// which hangs, has it open. Ours is under the parked name then; a TakeOver or
// Restore by the journal's owner continues from there, and so does a Restore by
// anybody once the owner is dead.
func (m *Manager) Suspend() (Outcome, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out, settled, err := m.reinstate(false)
	if err != nil || !settled {
		return out, err
	}
	rec, err := m.record()
	if err != nil {
		return out, err
	}
	now, err := m.look(m.path)
	if err != nil {
		return out, err
	}
	if rec.isOriginal(now) {
		err = m.explain(m.path+" is restored: set its attributes again", m.complete(rec.original))
	}
	return out, err
}

func (m *Manager) restore() (Outcome, error) {
	out, settled, err := m.reinstate(true)
	switch {
	case err != nil:
		return Outcome{}, err
	case settled:
		rec, err := m.record()
		if err != nil {
			return Outcome{}, err
		}
		return m.finish(rec, out)
	case out.Result == NothingToDo:
		return out, m.forget(allRecords...)
	}
	return out, nil
}

// reinstate judges, puts back and verifies. It reports whether the matter is settled, so that what
// is parked and recorded can go. Unless durable it leaves the journal as it is.
func (m *Manager) reinstate(durable bool) (out Outcome, settled bool, err error) {
	doing := "restore " + m.path
	var rec record
	var cur object
	err = m.at("judge", func() (err error) {
		if cur, err = m.look(m.path); err != nil {
			return err
		}
		rec, err = m.record()
		return err
	})
	if err != nil {
		return Outcome{}, false, m.explain(doing, err)
	}
	if !rec.known {
		return m.restoreUnrecorded(cur, rec)
	}
	var kept string
	switch rec.state(cur) {
	case StateOriginal:
		return Outcome{Result: NothingToDo, Detail: "the original is in place"}, true, nil
	case StateForeign:
		was, reverted := rec.reverted(cur)
		switch {
		case reverted:
			if durable {
				// Written down first: cut short, this must not end with the other.
				if err := m.journal.Replace(kindOriginal, m.path, was); err != nil {
					return Outcome{}, false, m.explain(doing, err)
				}
			}
			rec.original = was
		case !strands(cur, rec) && !rec.emptied(cur):
			out, err = m.leave(rec, cur)
			return out, false, err
		default:
			kept = m.keepEdited(cur)
		}
	}
	if out, err = m.replaceOurs(rec, cur); err != nil {
		return Outcome{}, false, m.explain(doing, err)
	}
	out.Detail += kept
	return out, true, nil
}

// replaceOurs has the original in the place of cur, and makes sure.
func (m *Manager) replaceOurs(rec record, cur object) (out Outcome, err error) {
	out = Outcome{Result: Restored}
	err = m.at("put back", func() (err error) {
		if rec.original.Type == TypeMissing {
			out.Detail = "there was no file before, so it was removed"
			if err = m.unchanged(cur); err == nil {
				err = m.fs.Remove(m.path)
			}
		} else {
			out.Inexact, err = m.putBack(rec, cur)
			out.Detail = m.describeOriginal(rec.original)
		}
		if err != nil {
			return err
		}
		return m.fs.SyncDir(m.dir)
	})
	if err != nil {
		return out, err
	}
	return out, m.at("verify", func() error {
		now, err := m.look(m.path)
		if err == nil && !rec.isOriginal(now) {
			err = fmt.Errorf("%w: what is there now is not the original: try again", ErrChanged)
		}
		return err
	})
}

// describeOriginal warns of a link that leads nowhere now: it is put back all
// the same, since its target is somebody else's to make.
func (m *Manager) describeOriginal(o original) string {
	if o.Type != TypeSymlink {
		return "regular file of " + say.Count(len(o.Content), "byte")
	}
	text := fmt.Sprintf("symbolic link to %s", o.Link)
	eff, err := m.follow(object{Type: TypeSymlink, link: string(o.Link)}, m.path)
	if err != nil || !eff.dangling {
		return text
	}
	text += ", which doesn't exist: start the program that writes it"
	for i, a := range o.Upstreams {
		if i == 0 {
			text += ", or replace the link by a file with"
		}
		text += " nameserver " + a.String()
	}
	return text
}

// unchanged fails if the name isn't any more what it was when we looked.
func (m *Manager) unchanged(cur object) error {
	now, err := m.fs.Lstat(m.path)
	if err != nil {
		return err
	}
	if !now.SameFile(cur.info) {
		return fmt.Errorf("%w: try again", ErrChanged)
	}
	return nil
}

// putBack exchanges: the parked original, or else one rebuilt from the journal,
// goes to its name. Ours is then under the spare name.
func (m *Manager) putBack(rec record, cur object) (inexact []string, err error) {
	parked, err := m.look(m.parked)
	if err != nil {
		return nil, err
	}
	from := m.parked
	if !rec.isOriginal(parked) {
		from = m.fresh
		if err := hostfs.RemoveIfExists(m.fs, from); err != nil {
			return nil, err
		}
		if inexact, err = m.rebuild(rec.original, from); err != nil {
			return nil, err
		}
		if err := m.fs.SyncDir(m.dir); err != nil {
			return nil, err
		}
	}
	if rec.original.InPlace && cur.info.MountRoot {
		return inexact, m.copyIn(from, cur)
	}
	return inexact, m.swapIn(from, cur)
}

// swapIn moves from to the file's name. With an exchange a foreign file that
// came in between is found under from, and goes back.
func (m *Manager) swapIn(from string, cur object) error {
	if !cur.exists() {
		err := m.fs.RenameNew(from, m.path)
		if cannot(err) {
			err = m.fs.Rename(from, m.path)
		}
		return err
	}
	err := m.fs.Exchange(from, m.path)
	if cannot(err) {
		if err := m.unchanged(cur); err != nil {
			return err
		}
		return m.fs.Rename(from, m.path)
	}
	if err != nil {
		return err
	}
	out, err := m.fs.Lstat(from)
	if err != nil {
		return err
	}
	if out.SameFile(cur.info) {
		return nil
	}
	if err := m.fs.Exchange(from, m.path); err != nil {
		return err
	}
	return fmt.Errorf("%w: try again", ErrChanged)
}

// rebuild recreates the original under name. Attributes that this file system
// or a security module refuses are listed, not a failure: DNS matters more.
func (m *Manager) rebuild(o original, name string) (inexact []string, err error) {
	switch o.Type {
	case TypeSymlink:
		err = m.fs.Symlink(string(o.Link), name)
	default:
		err = hostfs.WriteNew(m.fs, name, o.Content, o.Info.Mode.Perm())
	}
	if err != nil {
		return nil, err
	}
	attributes := func() error {
		if err := m.fs.Chown(name, o.Info.UID, o.Info.GID); err != nil {
			return err
		}
		for _, x := range o.Xattrs {
			err := m.fs.SetXattr(name, x)
			switch {
			case cannot(err) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES):
				inexact = append(inexact, err.Error())
			case err != nil:
				return err
			}
		}
		if o.Flags != 0 {
			if err := m.restoreFlags(o, name); err != nil {
				inexact = append(inexact, err.Error())
			}
		}
		return m.fs.SetTimes(name, o.Info.Atime, o.Info.Mtime)
	}
	if err := attributes(); err != nil {
		return nil, errors.Join(err, hostfs.RemoveIfExists(m.fs, name))
	}
	return inexact, nil
}

// restoreFlags sets flags that differ. A new file of the same file system has
// most of them already.
func (m *Manager) restoreFlags(o original, name string) error {
	have, err := m.fs.Flags(name)
	// Not the locks, which would forbid the rename that is to come.
	want := o.Flags &^ locks
	if err != nil || have == want {
		return err
	}
	return m.fs.SetFlags(name, want)
}

// finish forgets, with the original in place: our names have nothing of value in
// them now, whatever a crash may have left there. The original is forgotten
// last, so that a crash in between finds its way here again.
func (m *Manager) finish(rec record, out Outcome) (Outcome, error) {
	if err := m.complete(rec.original); err != nil {
		return Outcome{}, m.explain(m.path+" is restored: set its attributes again", err)
	}
	if err := m.discard(allRecords...); err != nil {
		return out, fmt.Errorf("%s: %w: %w", m.path, ErrRecordKept, err)
	}
	return out, nil
}

// discard removes the parked original, its record and those of other kinds.
func (m *Manager) discard(kinds ...string) error {
	return m.at("forget", func() error {
		if err := m.drop(m.parked, m.fresh); err != nil {
			return m.explain("clear up beside "+m.path, err)
		}
		return m.forget(kinds...)
	})
}

// drop removes names, durably. It looks first: a read-only file system refuses
// the removal of what isn't there, too.
func (m *Manager) drop(names ...string) error {
	dropped := false
	for _, name := range names {
		if _, err := m.fs.Lstat(name); errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		if err := hostfs.RemoveIfExists(m.fs, name); err != nil {
			return err
		}
		dropped = true
	}
	if !dropped {
		return nil
	}
	return m.fs.SyncDir(m.dir)
}

func (m *Manager) forget(kinds ...string) error {
	for _, c := range m.journal.Changes() {
		if slices.Contains(kinds, c.Kind) && (c.Name == m.path || strings.HasPrefix(c.Name, m.path+"@")) {
			if err := m.journal.Forget(c.Kind, c.Name); err != nil {
				return err
			}
		}
	}
	return m.journal.Forget(kindOriginal, m.path)
}

// leave is the end of a restore that found somebody else's file.
func (m *Manager) leave(rec record, cur object) (Outcome, error) {
	parked, err := m.look(m.parked)
	if err != nil {
		return Outcome{}, m.explain("restore "+m.path, err)
	}
	out := Outcome{Result: LeftForeign}
	switch {
	case cur.info.MountRoot && !rec.original.InPlace:
		out.Detail = fmt.Sprintf("a mount covers %s, and is kept; ours is below it: unmount it and run k2s-dnsbpf restore", m.path)
		return out, nil
	case rec.original.Type == TypeMissing:
		out.Detail = fmt.Sprintf("%s was made by somebody else, and is kept; before the attach there was none", m.path)
	case rec.isOriginal(parked):
		out.Detail = fmt.Sprintf("%s was replaced by somebody else, and is kept; to have the one from before: %s",
			m.path, m.byHand(rec.original).command)
	default:
		out.Detail = fmt.Sprintf("%s was replaced by somebody else, and is kept; the one from before is in %s",
			m.path, m.journal.Path())
		if err := m.drop(m.parked); err != nil {
			return Outcome{}, m.explain("restore "+m.path, err)
		}
	}
	if err := m.drop(m.fresh); err != nil {
		return Outcome{}, m.explain("restore "+m.path, err)
	}
	if err := m.cleanse(rec, cur); err != nil {
		return Outcome{}, m.explain("restore "+m.path, err)
	}
	return out, nil
}

// strands reports whether a foreign file names servers, and only ours. Once we
// stop, a host with it has no DNS.
func strands(cur object, rec record) bool {
	if cur.Type != TypeRegular || cur.tooLarge {
		return false
	}
	servers, own := Parse(cur.content).Nameservers, rec.served()
	return len(servers) > 0 && !slices.ContainsFunc(servers, func(a netip.Addr) bool { return !isOwn(a.Unmap(), own) })
}

// emptied reports whether a foreign file names no server, where there were some:
// programs then ask the loopback address. What was below a mount is another file.
func (r record) emptied(cur object) bool {
	return cur.Type == TypeRegular && !cur.tooLarge && cur.info.MountRoot == r.original.InPlace &&
		len(Parse(cur.content).Nameservers) == 0 && len(r.original.Upstreams) > 0
}

// keepEdited copies what is not left in place, and says where to.
func (m *Manager) keepEdited(cur object) string {
	path := filepath.Join(m.opts.StateDir, editedName)
	if err := hostfs.WriteFile(m.fs, path, cur.content, 0o600); err != nil {
		m.log.Warn("our file was edited or replaced while attached; the copy of what is there failed", zap.String("path", path), zap.Error(err))
		return ""
	}
	m.log.Warn("our file was edited or replaced while attached; a copy of what is there is kept", zap.String("path", path))
	return "; ours had been edited or replaced, a copy of that is " + path
}

// restoreUnrecorded is for a journal that was lost, or never written. A file
// that its own checksum proves to be ours is undone by the parked original.
func (m *Manager) restoreUnrecorded(cur object, rec record) (out Outcome, settled bool, err error) {
	doing := "restore " + m.path
	parked, err := m.look(m.parked)
	if err != nil {
		return Outcome{}, false, m.explain(doing, err)
	}
	parkedOurs := parked.Type == TypeRegular && sealed(parked.content)
	if rec.state(cur) != StateOurs {
		out = Outcome{Result: NothingToDo}
		switch {
		case !cur.exists() && parked.exists() && !parkedOurs:
			out = Outcome{Result: Restored, Detail: "the file was missing; the parked original is back"}
			if err := m.swapIn(m.parked, cur); err != nil {
				return Outcome{}, false, m.explain(doing, err)
			}
		case parked.exists() && !parkedOurs:
			out.Detail = fmt.Sprintf("%s is not ours; %s is from an attach whose journal is lost, and is kept", m.path, m.parked)
			return out, false, nil
		}
		return out, true, nil
	}
	err = m.at("put back", func() error {
		switch {
		case parked.exists() && !parkedOurs && cur.info.MountRoot:
			if err := m.copyIn(m.parked, cur); err != nil {
				return err
			}
		case parked.exists() && !parkedOurs:
			if err := m.swapIn(m.parked, cur); err != nil {
				return err
			}
		case strings.Contains(string(cur.content), createdMark+"\n"):
			if err := m.unchanged(cur); err != nil {
				return err
			}
			if err := m.fs.Remove(m.path); err != nil {
				return err
			}
		default:
			return fmt.Errorf("%w: neither journal nor %s are there: write the file by hand", ErrLost, m.parked)
		}
		return m.fs.SyncDir(m.dir)
	})
	if err != nil {
		return Outcome{}, false, m.explain(doing, err)
	}
	return Outcome{Result: Restored, Detail: "the journal was lost; told by the file's own checksum"}, true, nil
}
