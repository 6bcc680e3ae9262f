package resolvconf

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

// ourMode is readable by all: a host on which only root resolves is broken.
const ourMode = 0o644

// labelXattr is the SELinux label, which ours takes over from the original.
const labelXattr = "security.selinux"

// TakeOver says what the new file is to contain.
type TakeOver struct {
	// Nameservers of the new file, 1 to 3: the addresses the program serves on.
	Nameservers []netip.Addr
	// UpstreamsGiven: the caller has upstreams of its own (--upstream), so
	// ErrNoUpstream is no reason to refuse.
	UpstreamsGiven bool
	// LastGood are the upstreams in use, recorded with an original that names
	// none at the moment.
	LastGood []netip.Addr
	// InPlace: where the file is a bind mount, which can't be renamed, its
	// content is overwritten. Programs that read it in that instant may find
	// the one, the other, or the new one and blank lines.
	InPlace bool
	// OverrideImmutable: the attribute of chattr +i or +a is taken from the
	// file, and set again by Restore.
	OverrideImmutable bool
}

// Refused returns nil or the refusals of an inspection that t doesn't get over.
func (t TakeOver) Refused(i Inspection) error {
	var except []error
	if t.UpstreamsGiven {
		except = append(except, ErrNoUpstream)
	}
	if t.InPlace {
		except = append(except, ErrBindMount)
	}
	if t.OverrideImmutable {
		except = append(except, ErrImmutableFile)
	}
	return i.Refused(except...)
}

// TakeOver puts our file in place and parks the original beside it. If ours is
// in place already it converges: same content, nothing happens; other content,
// ours is replaced and the original stays parked. An earlier attach that was
// cut short is undone first. On an error everything is undone again; what the
// undo itself could not do, the error says too and Restore will.
//
// If a foreign file is in place of ours it becomes the new original, and the
// old one is discarded. If it is an earlier file of ours, from before such a
// change, then somebody has undone that change, as a VPN client does that puts
// back what it found: the original of that time is the original again.
func (m *Manager) TakeOver(t TakeOver) error {
	m.mu.Lock()
	defer m.mu.Unlock()

	own := append(slices.Clone(m.opts.Listen), t.Nameservers...)
	var s survey
	err := m.at("classify", func() (err error) {
		s, err = m.inspect(own)
		return err
	})
	if err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	// A takeover that continues needs no new permission.
	t.InPlace = t.InPlace || s.rec.original.InPlace
	if _, reverted := s.rec.reverted(s.cur); reverted {
		t.UpstreamsGiven = true // the original of that time had some
	}
	if err := t.Refused(s.Inspection); err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	if s.State == StateOurs {
		return m.converge(s, t)
	}
	serial := 0
	if s.rec.known || len(s.rec.texts) > 0 {
		serial = s.rec.original.Serial + 1
		err = m.settle(s.rec)
	} else {
		err = m.explain("take over "+m.path, m.cleanse(s.rec, s.cur))
	}
	if err != nil {
		return err
	}
	if s, err = m.inspect(own); err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	return m.takeOver(s, t, serial)
}

// settle ends an earlier attach before a new one begins.
func (m *Manager) settle(rec record) error {
	out, err := m.restore()
	if err != nil {
		return fmt.Errorf("take over: undo the earlier attach: %w", err)
	}
	if out.Result != LeftForeign {
		return nil
	}
	m.log.Info("the file was replaced by somebody else while attached: theirs is the original from now on",
		zap.String("path", m.path))
	if err := m.remember(rec); err != nil {
		return m.explain("take over "+m.path, err)
	}
	return m.discard(kindAttached, kindContent)
}

// remember notes which original our texts stood for, before another takes its
// place.
func (m *Manager) remember(rec record) error {
	for sum := range rec.texts {
		if err := m.journal.Record(kindEarlier, m.path+"@"+sum, rec.original); err != nil {
			return err
		}
	}
	var names []string
	for _, c := range m.journal.Changes() {
		if c.Kind == kindEarlier && strings.HasPrefix(c.Name, m.path+"@") {
			names = append(names, c.Name)
		}
	}
	for _, name := range names[:max(0, len(names)-maxEarlier)] {
		if err := m.journal.Forget(kindEarlier, name); err != nil {
			return err
		}
	}
	return nil
}

func (m *Manager) takeOver(s survey, t TakeOver, serial int) error {
	orig, err := m.describe(s, t)
	if err != nil {
		return m.explain("take over "+m.path+": save the original", err)
	}
	orig.Serial = serial
	text, err := m.render(s.File, orig, t)
	if err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	err = m.at("record", func() error {
		if err := m.journal.Record(kindOriginal, m.path, orig); err != nil {
			return err
		}
		return m.recordText(t, orig, text)
	})
	if err != nil {
		return m.undone(m.explain("take over "+m.path, err))
	}
	method, err := m.install(orig, text)
	if err != nil {
		return m.undone(m.explain("take over "+m.path, err))
	}
	if err := m.attached(method); err != nil {
		return m.undone(m.explain("take over "+m.path, err))
	}
	m.log.Info("resolver file taken over", zap.String("path", m.path), zap.String("method", method))
	return nil
}

func (m *Manager) render(base File, orig original, t TakeOver) ([]byte, error) {
	return rendering{
		path: m.path, undo: m.byHand(orig), attachID: m.attachID(), serial: orig.Serial, version: m.opts.Version,
		nameservers: t.Nameservers, base: base,
	}.render()
}

// recordText makes a text of ours known, before it is in place.
func (m *Manager) recordText(t TakeOver, orig original, text []byte) error {
	c := content{Nameservers: t.Nameservers}
	if orig.InPlace {
		c.Text = text
	}
	return m.journal.Record(kindContent, m.path+"@"+digest(text), c)
}

// describe collects all that a rebuild of the original would need.
func (m *Manager) describe(s survey, t TakeOver) (original, error) {
	o := original{Type: s.cur.Type, Info: s.cur.info, Parked: m.parked, InPlace: s.cur.info.MountRoot, AttachID: m.attachID()}
	for _, u := range s.Upstreams {
		o.Upstreams = append(o.Upstreams, u.Addr)
	}
	if len(o.Upstreams) == 0 {
		o.Upstreams = t.LastGood
	}
	if !s.cur.exists() {
		return o, nil
	}
	var err error
	if o.Xattrs, err = m.fs.Xattrs(m.path); err != nil {
		return o, err
	}
	switch s.cur.Type {
	case TypeSymlink:
		o.Link = []byte(s.cur.link)
	case TypeRegular:
		o.Content, o.SHA256 = s.cur.content, digest(s.cur.content)
		o.Flags, err = m.fs.Flags(m.path)
	}
	return o, err
}

// install writes and exchanges, and names the way that worked.
func (m *Manager) install(orig original, text []byte) (string, error) {
	// Under our own names, so from an attach whose journal was lost.
	for _, name := range []string{m.parked, m.fresh} {
		err := m.fs.Remove(name)
		switch {
		case err == nil:
			m.log.Warn("removed a stale file of an earlier attach", zap.String("path", name))
		case !errors.Is(err, fs.ErrNotExist):
			return "", err
		}
	}
	switch {
	case orig.Type == TypeMissing:
		return m.create(orig, text)
	case orig.InPlace:
		return m.overwrite(orig, text)
	}
	return m.exchange(orig, text)
}

// write makes our file under name, durable with its name.
func (m *Manager) write(name string, orig original, text []byte) error {
	if err := hostfs.WriteNew(m.fs, name, text, ourMode); err != nil {
		return err
	}
	if orig.Type == TypeRegular {
		for _, x := range orig.Xattrs {
			if x.Name != labelXattr {
				continue
			}
			if err := m.fs.SetXattr(name, x); err != nil && !errors.Is(err, syscall.EOPNOTSUPP) {
				return err
			}
		}
	}
	return m.fs.SyncDir(m.dir)
}

func (m *Manager) create(orig original, text []byte) (string, error) {
	if err := m.at("write", func() error { return m.write(m.fresh, orig, text) }); err != nil {
		return "", err
	}
	method := "create"
	err := m.at("exchange", func() error {
		err := m.fs.RenameNew(m.fresh, m.path)
		if cannot(err) {
			method = "create by link"
			if err = m.fs.Link(m.fresh, m.path); err == nil {
				err = m.fs.Remove(m.fresh)
			}
		}
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("%w: a file appeared: try again", ErrChanged)
		}
		if err != nil {
			return err
		}
		return m.fs.SyncDir(m.dir)
	})
	return method, err
}

// cannot tells "this kernel or file system has no such call" from a failure.
func cannot(err error) bool {
	return errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.EOPNOTSUPP)
}

func (m *Manager) exchange(orig original, text []byte) (string, error) {
	// Made under the parked name at once: with the swap the original is there,
	// and at no time does our header name a place where it isn't.
	if err := m.at("write", func() error { return m.write(m.parked, orig, text) }); err != nil {
		return "", err
	}
	method := "exchange"
	err := m.at("exchange", func() error {
		if err := m.unlock(orig); err != nil {
			return err
		}
		err := m.fs.Exchange(m.parked, m.path)
		if cannot(err) {
			if method, err = m.park(orig); err != nil {
				return err
			}
			return m.fs.SyncDir(m.dir)
		}
		if err != nil {
			return err
		}
		got, err := m.look(m.parked)
		if err != nil {
			return err
		}
		// By content if need be: an overlay gives another inode at copy-up.
		if !orig.is(got) {
			// Somebody replaced the file since it was classified, so it isn't the one we saved.
			if err := m.fs.Exchange(m.parked, m.path); err != nil {
				return err
			}
			return fmt.Errorf("%w: try again", ErrChanged)
		}
		return m.fs.SyncDir(m.dir)
	})
	return method, err
}

// park is for systems without RENAME_EXCHANGE: a second name for the original,
// or where there are no hard links a copy, and then ours over the first name.
// Our file was made under the parked name.
func (m *Manager) park(orig original) (string, error) {
	if err := m.fs.Rename(m.parked, m.fresh); err != nil {
		return "", err
	}
	method := "link"
	if err := m.fs.Link(m.path, m.parked); err != nil {
		if !cannot(err) && !errors.Is(err, syscall.EPERM) && !errors.Is(err, syscall.EMLINK) && !errors.Is(err, syscall.EXDEV) {
			return "", err
		}
		method = "copy"
		if _, err := m.rebuild(orig, m.parked); err != nil {
			return "", err
		}
	}
	if err := m.fs.SyncDir(m.dir); err != nil {
		return "", err
	}
	now, err := m.look(m.path)
	if err != nil {
		return "", err
	}
	if !orig.is(now) {
		return "", fmt.Errorf("%w: try again", ErrChanged)
	}
	return method, m.fs.Rename(m.fresh, m.path)
}

// attached confirms.
func (m *Manager) attached(method string) error {
	return m.at("confirm", func() error {
		info, err := m.fs.Lstat(m.path)
		if err != nil {
			return err
		}
		return m.journal.Record(kindAttached, m.path, attached{method, info.Dev, info.Ino})
	})
}

// undone undoes a takeover that failed with cause.
func (m *Manager) undone(cause error) error {
	out, err := m.restore()
	if err == nil && out.Result == LeftForeign {
		err = m.discard(allRecords...)
	}
	if err != nil {
		return fmt.Errorf("%w; the undo failed too, run k2s-dnsbpf restore when that is solved: %w", cause, err)
	}
	return cause
}

// PutBack puts ours in place again, whatever is there now: nothing, ours with
// another mode, or a file that is not a configuration, such as an empty one. The
// original stays what it is. A regular file that is not ours is copied to the
// state directory before. With nothing taken over it fails with ErrNotTaken.
func (m *Manager) PutBack(t TakeOver) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	doing := "put back " + m.path
	var s survey
	err := m.at("classify", func() (err error) {
		s, err = m.inspect(append(slices.Clone(m.opts.Listen), t.Nameservers...))
		return err
	})
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if !s.rec.known {
		return fmt.Errorf("%s: %w", doing, ErrNotTaken)
	}
	t.UpstreamsGiven, t.InPlace = true, t.InPlace || s.rec.original.InPlace
	if err := t.Refused(s.Inspection); err != nil {
		return err
	}
	before, err := m.former(s.rec)
	if err != nil {
		return m.explain(doing, err)
	}
	text, err := m.render(Parse(before.content), s.rec.original, t)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if s.cur.Type == TypeRegular && !s.rec.ours(s.cur) {
		m.keepEdited(s.cur)
	}
	if err := m.renew(s, t, text); err != nil {
		return m.explain(doing, err)
	}
	m.log.Info("resolver file put back", zap.String("path", m.path))
	return nil
}

// converge changes our file for another of ours. The original stays as it is.
func (m *Manager) converge(s survey, t TakeOver) error {
	text, err := m.render(s.File, s.rec.original, t)
	if err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	if digest(text) != digest(s.cur.content) {
		err = m.renew(s, t, text)
	} else {
		err = m.attached("converge")
	}
	return m.explain("renew "+m.path, err)
}

// renew puts text in place of what s found. The original is not touched.
func (m *Manager) renew(s survey, t TakeOver, text []byte) error {
	if err := m.at("record", func() error { return m.recordText(t, s.rec.original, text) }); err != nil {
		return err
	}
	if err := m.replace(s, text); err != nil {
		return err
	}
	if err := m.journal.Forget(kindAttached, m.path); err != nil {
		return err
	}
	if err := m.attached("converge"); err != nil {
		return err
	}
	return m.forgetTexts(digest(text))
}

// replace writes and exchanges where there is something that the original is not.
func (m *Manager) replace(s survey, text []byte) error {
	if s.rec.original.InPlace {
		return m.at("exchange", func() error { return m.overwriteFile(s.cur, text) })
	}
	err := m.at("write", func() error {
		if err := hostfs.RemoveIfExists(m.fs, m.fresh); err != nil {
			return err
		}
		return m.write(m.fresh, s.rec.original, text)
	})
	if err == nil {
		err = m.at("exchange", func() error {
			if err := m.swapIn(m.fresh, s.cur); err != nil {
				return err
			}
			return m.fs.SyncDir(m.dir)
		})
	}
	// What the spare name has now was replaced, or was never put in place.
	return errors.Join(err, hostfs.RemoveIfExists(m.fs, m.fresh))
}

// forgetTexts forgets our texts but for one, once none of them is in place.
func (m *Manager) forgetTexts(but string) error {
	for _, c := range m.journal.Changes() {
		sum, ok := strings.CutPrefix(c.Name, m.path+"@")
		if !ok || c.Kind != kindContent || sum == but {
			continue
		}
		if err := m.journal.Forget(c.Kind, c.Name); err != nil {
			return err
		}
	}
	return nil
}
