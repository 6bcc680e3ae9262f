package resolvconf

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

// Inspection describes the current file, and what TakeOver would make of it.
type Inspection struct {
	Path  string
	Type  Type
	Link  string // text of the symbolic link at Path
	State State
	// Before and BeforeLink are what Restore would put back while attached:
	// the original's type and link text.
	Before     Type
	BeforeLink string
	// Target is where the effective content was read: Path itself, the end of
	// its links, or while attached the parked original.
	Target string
	// File is the content that counted, or counts while attached, before us.
	File         File
	Owner        Owner
	OwnerReasons []string
	// Mount is the source of a bind mount on the file, "" if there is none.
	Mount     string
	Upstreams []Upstream
	// Dropped are the servers that are not upstreams, with reasons.
	Dropped []Skip
	// Refusals are the reasons for which TakeOver would fail, as far as they
	// can be foreseen without writing. Each wraps an error of this package.
	Refusals []error
}

// Refused returns nil or the refusals, but for those that are one of except,
// as one error of one line.
func (i Inspection) Refused(except ...error) error {
	var out error
	for _, r := range i.Refusals {
		if slices.ContainsFunc(except, func(e error) bool { return errors.Is(r, e) }) {
			continue
		}
		if out == nil {
			out = r
		} else {
			out = fmt.Errorf("%w; %w", out, r)
		}
	}
	return out
}

// Inspect looks without changing anything. It works in every state; while
// attached it describes the original.
func (m *Manager) Inspect() (Inspection, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, err := m.inspect(m.opts.Listen)
	return s.Inspection, err
}

// survey is an Inspection with what TakeOver needs besides.
type survey struct {
	Inspection
	cur object
	rec record
	eff effective
}

func (m *Manager) inspect(own []netip.Addr) (survey, error) {
	cur, err := m.look(m.path)
	if err != nil {
		return survey{}, explain("read "+m.path, err)
	}
	rec, err := m.record()
	if err != nil {
		return survey{}, err
	}
	s := survey{cur: cur, rec: rec}
	s.Path, s.Type, s.Link, s.State = m.path, cur.Type, cur.link, rec.state(cur)
	if rec.known {
		s.Before, s.BeforeLink = rec.original.Type, string(rec.original.Link)
	}
	own = append(slices.Clone(own), rec.served()...)

	eff, err := m.effective(s)
	if err != nil {
		return survey{}, explain("read "+m.path, err)
	}
	s.eff = eff
	s.Target, s.File = eff.target, Parse(eff.content)
	if cur.Type == TypeSymlink && eff.dangling && s.State != StateOurs {
		s.Type = TypeDangling
	}
	if cur.info.MountRoot {
		s.Type = TypeBindMount
		s.Mount = m.mountSource(cur.info.MountID)
	}
	s.Owner, s.OwnerReasons = DetectOwner(m.environment(s, eff))

	if err := m.upstreams(&s, own); err != nil {
		return survey{}, err
	}
	s.Refusals = append(m.refusals(s, eff.tooLarge), m.upstreamRefusal(s)...)
	return s, nil
}

func (m *Manager) environment(s survey, eff effective) Environment {
	e := Environment{
		Type: s.Type, Link: s.Link, Target: m.unroot(eff.target), Content: eff.content,
		Immutable: s.cur.info.Immutable, Mount: s.Mount,
		ReadOnly: errors.Is(m.fs.Access(m.dir), syscall.EROFS),
		Resolved: m.exists(resolvedUplinks), Netplan: m.exists("/etc/netplan"), CloudInit: m.exists("/run/cloud-init"),
	}
	if s.State == StateOurs && s.rec.known {
		// Who will own it again after detach.
		e.Type, e.Link = s.rec.original.Type, string(s.rec.original.Link)
		e.Immutable = s.rec.original.Flags&hostfs.FlagImmutable != 0
		if e.Type == TypeSymlink && eff.dangling {
			e.Type = TypeDangling
		}
	} else if s.State == StateOurs {
		e.Ours = true
	}
	return e
}

// exists reports whether another program's file or directory is there.
func (m *Manager) exists(path string) bool {
	_, err := m.fs.Lstat(m.opts.Root + path)
	return err == nil
}

func (m *Manager) unroot(path string) string {
	if rest, ok := strings.CutPrefix(path, m.opts.Root); ok && strings.HasPrefix(rest, "/") {
		return rest
	}
	return path
}

// effective is the content that a resolver would read.
type effective struct {
	target   string
	links    []string // the names of the links on the way to target
	content  []byte
	dangling bool
	tooLarge bool
	kind     string // of a target that is not a regular file, in the words of safefile.Kind
}

// effective reads the content of before us: what is in place, or while ours is
// in place what the parked original or the journal's copy leads to.
func (m *Manager) effective(s survey) (effective, error) {
	if s.State != StateOurs || !s.rec.known {
		return m.follow(s.cur, m.path)
	}
	return m.former(s.rec)
}

// former reads what the original leads to.
func (m *Manager) former(rec record) (effective, error) {
	parked, err := m.look(m.parked)
	if err != nil {
		return effective{}, err
	}
	if rec.isOriginal(parked) {
		return m.follow(parked, m.parked)
	}
	o := rec.original
	return m.follow(object{Type: o.Type, link: string(o.Link), content: o.Content}, m.path)
}

// maxLinks is how many symbolic links the kernel follows.
const maxLinks = 40

// follow reads where o, found at name, leads. Link texts are joined by their
// letters, which is only wrong for a ".." behind a linked directory; it is the
// name to show and to tell the owner by, and the read follows it again.
func (m *Manager) follow(o object, name string) (effective, error) {
	var links []string
	for range maxLinks {
		switch o.Type {
		case TypeRegular:
			return effective{target: name, links: links, content: o.content, tooLarge: o.tooLarge}, nil
		case TypeMissing:
			return effective{target: name, links: links, dangling: true}, nil
		case TypeOther:
			return effective{target: name, links: links, kind: safefile.Kind(o.info.Mode)}, nil
		}
		links = append(links, name)
		if filepath.IsAbs(o.link) {
			name = filepath.Clean(o.link)
		} else {
			name = filepath.Join(filepath.Dir(name), o.link)
		}
		next, err := m.look(name)
		if err != nil {
			return effective{}, err
		}
		o = next
	}
	return effective{target: name, links: links, dangling: true, kind: "a circle of links"}, nil
}

// Files in which managers publish the servers that they learned.
const (
	resolvedUplinks = "/run/systemd/resolve/resolv.conf"
	nmUplinks       = "/run/NetworkManager/no-stub-resolv.conf"
)

func (m *Manager) published(path string) (serverList, error) {
	path = m.opts.Root + path
	data, err := m.fs.ReadFile(path, MaxSize)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, ErrTooLarge) || errors.Is(err, safefile.ErrNotRegular) {
			return serverList{source: path}, nil
		}
		return serverList{}, explain("read "+path, err)
	}
	return serverList{source: path, servers: Parse(data).Nameservers}, nil
}

func (m *Manager) upstreams(s *survey, own []netip.Addr) error {
	uplinks, err := m.published(resolvedUplinks)
	if err != nil {
		return err
	}
	nm, err := m.published(nmUplinks)
	if err != nil {
		return err
	}
	others := []serverList{nm}
	if s.State == StateOurs && s.rec.known {
		// While attached the managers may publish our own address; what was
		// chosen at attach is still true then.
		others = append(others, serverList{source: journalSource, servers: s.rec.original.Upstreams})
	}
	s.Upstreams, s.Dropped = chooseUpstreams(serverList{s.Target, s.File.Nameservers}, uplinks, others, own)
	return nil
}

func (m *Manager) upstreamRefusal(s survey) []error {
	if len(s.Upstreams) > 0 || s.cur.Type == TypeOther { // see refusals
		return nil
	}
	why := "it names no server"
	switch {
	case len(s.Dropped) > 0:
		why = joinSkips(s.Dropped)
	case s.Type == TypeMissing:
		why = "the file is missing"
	case s.eff.kind != "":
		why = fmt.Sprintf("it is a link to %s, which is %s", s.Link, s.eff.kind)
	case s.Type == TypeDangling:
		why = "it is a link to " + s.Link + ", which doesn't exist"
	case s.Type == TypeSymlink:
		why = fmt.Sprintf("%s, which it is a link to, names no server", s.Link)
	}
	return []error{fmt.Errorf("%s: %w: %s: give one with --upstream", m.path, ErrNoUpstream, why)}
}

// refusals foresees, from what can be read, why the swap would fail.
func (m *Manager) refusals(s survey, tooLarge bool) []error {
	var out []error
	add := func(cause error, format string, args ...any) {
		out = append(out, fmt.Errorf("%s: %w: %s", m.path, cause, fmt.Sprintf(format, args...)))
	}
	switch {
	case s.cur.Type == TypeOther:
		add(ErrNotFile, "it is %s: move it away", safefile.Kind(s.cur.info.Mode))
	case s.cur.info.MountRoot:
		add(ErrBindMount, "%s is mounted over the file: unmount it, or use --in-place or --resolver none", s.Mount)
	case tooLarge:
		add(ErrTooLarge, "more than %d bytes: make it smaller", MaxSize)
	}
	if s.State == StateOurs && !s.rec.known {
		add(ErrLeftover, "run k2s-dnsbpf restore")
	}
	if flag := attribute(s.cur.info); flag != "" {
		add(ErrImmutableFile, "chattr +%s is set: if that may change, run chattr -%s %s, or use --override-immutable", flag, flag, m.path)
	} else if s.cur.info.MountRoot {
		if err := m.fs.Access(m.path); err != nil {
			out = append(out, explain("write to "+m.path, err))
		}
	}
	if m.elsewhere(s.cur) {
		add(ErrElsewhere, "process 1 has another file there: run this outside of the container or unit with mounts of its own (nsenter -t 1 -m)")
	}
	dir, err := m.fs.Lstat(m.dir)
	if err != nil {
		return append(out, explain("look at "+m.dir, err))
	}
	if flag := attribute(dir); flag != "" {
		add(ErrImmutable, "chattr +%s is set on %s: if that may change, run chattr -%s %s", flag, m.dir, flag, m.dir)
	} else if err := m.fs.Access(m.dir); err != nil {
		out = append(out, explain("write to "+m.dir, err))
	}
	if err := m.stateAccess(); err != nil {
		out = append(out, explain("write to "+m.opts.StateDir, err))
	}
	return out
}

func attribute(i hostfs.Info) string {
	switch {
	case i.Immutable:
		return "i"
	case i.Append:
		return "a"
	}
	return ""
}

// stateAccess checks the state directory, or the one it would be made in.
func (m *Manager) stateAccess() error {
	for dir := filepath.Clean(m.opts.StateDir); ; dir = filepath.Dir(dir) {
		err := m.fs.Access(dir)
		if !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return err
		}
	}
}

// mountSource names what is mounted, by proc_pid_mountinfo(5): the path within
// its file system and the device.
func (m *Manager) mountSource(id uint64) string {
	data, err := m.fs.ReadFile("/proc/self/mountinfo", 16<<20)
	if err != nil {
		return "something"
	}
	return findMount(string(data), id)
}

func findMount(mountinfo string, id uint64) string {
	for line := range strings.Lines(mountinfo) {
		f := strings.Fields(line)
		if len(f) < 10 || f[0] != strconv.FormatUint(id, 10) {
			continue
		}
		for i := 6; i+2 < len(f); i++ {
			if f[i] == "-" {
				return fmt.Sprintf("%s of %s (%s)", f[3], f[i+2], f[i+1])
			}
		}
	}
	return "something"
}
