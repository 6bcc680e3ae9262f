package resolvconf

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

const (
	// newName is used where the swap can't be made in one step.
	newName = ".resolv.conf.k2s-dnsbpf-new"
	// editedName is a copy, in the state directory, of a file of ours that
	// somebody edited in place.
	editedName = "resolv.conf.edited"
)

// Options are the settings of New.
type Options struct {
	// Path of the file; default /etc/resolv.conf.
	Path string
	// StateDir holds the journal. Required.
	StateDir string
	// Journal of StateDir. Required; its lock must be held by the caller for
	// TakeOver and Restore.
	Journal *state.Journal
	// FS is the file system; nil is the real one.
	FS hostfs.FS
	// Root is put before the paths at which other programs publish their
	// servers, such as /run/systemd/resolve/resolv.conf. For tests; default "".
	Root string
	// Logger; nil logs nothing.
	Logger *zap.Logger
	// Listen are the addresses the program itself serves on: never upstreams.
	Listen []netip.Addr
	// AttachID is named in our file; default that of the journal's header.
	AttachID string
	// Version of the program, named in our file.
	Version string
}

// Manager looks after one resolv.conf. Its methods may be called concurrently,
// one runs at a time. Other processes are kept out by the journal's lock only.
type Manager struct {
	opts    Options
	fs      hostfs.FS
	journal *state.Journal
	log     *zap.Logger
	path    string
	dir     string
	parked  string
	fresh   string // path of newName

	mu sync.Mutex
	// hook, of tests, is told "record before", "record after" and so on.
	hook func(point string)
}

// New returns a Manager and touches nothing.
func New(o Options) (*Manager, error) {
	if o.Path == "" {
		o.Path = "/etc/resolv.conf"
	}
	if !filepath.IsAbs(o.Path) || strings.ContainsAny(o.Path, "\n\x00") {
		return nil, fmt.Errorf("resolver file %q: give an absolute path", o.Path)
	}
	if o.Journal == nil || o.StateDir == "" {
		return nil, errors.New("resolvconf: Journal and StateDir are required")
	}
	if o.FS == nil {
		o.FS = hostfs.OS()
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	path := filepath.Clean(o.Path)
	dir := filepath.Dir(path)
	return &Manager{
		opts: o, fs: o.FS, journal: o.Journal, log: o.Logger,
		path: path, dir: dir,
		parked: filepath.Join(dir, ParkedName),
		fresh:  filepath.Join(dir, newName),
	}, nil
}

// at runs one named step between its two points.
func (m *Manager) at(step string, do func() error) error {
	if m.hook != nil {
		m.hook(step + " before")
	}
	err := do()
	if m.hook != nil {
		m.hook(step + " after")
	}
	return err
}

func (m *Manager) attachID() string {
	if m.opts.AttachID != "" {
		return m.opts.AttachID
	}
	if id := m.journal.Header().AttachID; id != "" {
		return id
	}
	return strings.ToLower(rand.Text())
}

// object is one name as it was found.
type object struct {
	Type     Type
	info     hostfs.Info
	link     string
	content  []byte // of a regular file
	tooLarge bool
}

func (o object) exists() bool { return o.Type != TypeMissing }

// look reads a name without following it. A file over MaxSize is not an error.
func (m *Manager) look(name string) (object, error) {
	info, err := m.fs.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return object{Type: TypeMissing}, nil
	}
	if err != nil {
		return object{}, err
	}
	o := object{info: info}
	switch {
	case info.Mode&fs.ModeSymlink != 0:
		o.Type = TypeSymlink
		o.link, err = m.fs.Readlink(name)
	case info.Mode.IsRegular():
		o.Type = TypeRegular
		o.content, err = m.fs.ReadFile(name, MaxSize)
		if errors.Is(err, ErrTooLarge) {
			o.tooLarge, err = true, nil
		}
	default:
		o.Type = TypeOther
	}
	if err != nil {
		return object{}, err
	}
	return o, nil
}

// Kinds of journal records. The name of all is the file's path, followed for
// kindContent and kindEarlier by "@" and the digest of a text of ours.
const (
	kindOriginal = "resolv.conf"
	kindContent  = "resolv.conf.content"
	kindAttached = "resolv.conf.attached"
	kindEarlier  = "resolv.conf.earlier"
)

// allRecords are the kinds of records besides the original, which goes last.
var allRecords = []string{kindAttached, kindContent, kindEarlier}

// maxEarlier bounds how many earlier originals are remembered: as many VPN
// clients, each within the other, as somebody may have, and no more, since a
// journal of a host that stays attached for months must not grow.
const maxEarlier = 4

// original is what is recorded before ours is written: everything about the file as it was.
type original struct {
	Type    Type           `json:"type"`
	Link    []byte         `json:"link,omitempty"` // bytes: a link text need not be UTF-8
	Content []byte         `json:"content,omitempty"`
	SHA256  string         `json:"sha256,omitempty"`
	Info    hostfs.Info    `json:"info"`
	Xattrs  []hostfs.Xattr `json:"xattrs,omitempty"`
	Flags   uint32         `json:"flags,omitempty"`
	Parked  string         `json:"parked"`
	// InPlace: the file can't be renamed, so its content is overwritten, and
	// what is parked is a copy.
	InPlace  bool   `json:"inPlace,omitempty"`
	AttachID string `json:"attachID"`
	// Upstreams are values, since the files they came from change while we are
	// attached.
	Upstreams []netip.Addr `json:"upstreams,omitempty"`
	// Serial counts the originals of one attach, from 0. It is in our text, so
	// that the text tells which original it stands for.
	Serial int `json:"serial,omitempty"`
}

// content is the record of one text of ours, by which it is known again.
type content struct {
	Nameservers []netip.Addr `json:"nameservers"`
	// Text is kept of a file that is overwritten in place: a crash can leave a
	// mixture there.
	Text []byte `json:"text,omitempty"`
}

// attached is what is recorded once ours is in place.
type attached struct {
	Method string `json:"method"`
	Dev    uint64 `json:"dev"`
	Ino    uint64 `json:"ino"`
}

// record is what the journal knows of the path.
type record struct {
	known    bool // there is an original
	original original
	texts    map[string]content  // by the digest of the text
	earlier  map[string]original // digest of a text of before -> the original that it stood for
}

func (m *Manager) record() (record, error) {
	r := record{texts: map[string]content{}, earlier: map[string]original{}}
	known, err := m.journal.Lookup(kindOriginal, m.path, &r.original)
	if err != nil {
		return record{}, err
	}
	r.known = known
	for _, c := range m.journal.Changes() {
		sum, ok := strings.CutPrefix(c.Name, m.path+"@")
		if !ok {
			continue
		}
		switch c.Kind {
		case kindContent:
			var t content
			if _, err := m.journal.Lookup(c.Kind, c.Name, &t); err != nil {
				return record{}, err
			}
			r.texts[sum] = t
		case kindEarlier:
			var o original
			if _, err := m.journal.Lookup(c.Kind, c.Name, &o); err != nil {
				return record{}, err
			}
			r.earlier[sum] = o
		}

	}
	return r, nil
}

// reverted returns the original that an earlier text of ours stood for, if o
// is one: somebody has put it back.
func (r record) reverted(o object) (original, bool) {
	if o.Type != TypeRegular || o.tooLarge || r.ours(o) {
		return original{}, false
	}
	was, ok := r.earlier[digest(o.content)]
	return was, ok
}

// ours reports whether o is a text that we wrote, unchanged.
func (r record) ours(o object) bool {
	if o.Type != TypeRegular || o.tooLarge {
		return false
	}
	_, ok := r.texts[digest(o.content)]
	return ok
}

// isOriginal reports whether o is the original.
func (r record) isOriginal(o object) bool {
	return r.known && !r.ours(o) && r.original.is(o)
}

// is reports whether o is the same object, whatever has become of its content,
// or an equal one.
func (r original) is(o object) bool {
	switch {
	case o.Type != r.Type:
		return false
	case o.Type == TypeMissing:
		return true
	case o.Type == TypeSymlink:
		return o.link == string(r.Link)
	case o.Type == TypeRegular:
		return !r.InPlace && o.info.SameFile(r.Info) || !o.tooLarge && digest(o.content) == r.SHA256
	}
	return false
}

// served are all addresses that a file of ours named.
func (r record) served() []netip.Addr {
	var out []netip.Addr
	for _, t := range r.texts {
		out = append(out, t.Nameservers...)
	}
	return out
}

// State says whose the file is.
type State string

// The states.
const (
	StateOriginal State = "original" // as before us, or never taken over
	StateOurs     State = "ours"
	StateForeign  State = "foreign" // somebody replaced or edited ours
	StateMissing  State = "missing" // there is none, and there was one
)

// State tells by the journal, not by a comment in the file. Without a record a
// file is the original, unless its own checksum proves it to be ours.
func (m *Manager) State() (State, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	cur, err := m.look(m.path)
	if err != nil {
		return "", explain("read "+m.path, err)
	}
	r, err := m.record()
	if err != nil {
		return "", err
	}
	return r.state(cur), nil
}

func (r record) state(cur object) State {
	switch {
	case r.ours(cur):
		return StateOurs
	case r.isOriginal(cur):
		return StateOriginal
	case r.torn(cur):
		return StateOurs
	case !cur.exists():
		return StateMissing
	case r.known:
		return StateForeign
	case cur.Type == TypeRegular && sealed(cur.content):
		return StateOurs
	}
	return StateOriginal
}

// RecordedPaths are the files that a journal knows to be taken over, for a
// restore that isn't told which.
func RecordedPaths(j *state.Journal) []string {
	var out []string
	for _, c := range j.Changes() {
		if c.Kind == kindOriginal {
			out = append(out, c.Name)
		}
	}
	slices.Sort(out)
	return out
}

func (m *Manager) byHand(o original) byHand {
	switch {
	case o.Type == TypeMissing:
		return byHand{command: "rm -f " + m.path}
	case o.InPlace:
		return byHand{parked: m.parked, command: fmt.Sprintf("cp %s %s", m.parked, m.path)}
	}
	return byHand{parked: m.parked, command: fmt.Sprintf("mv -f %s %s", m.parked, m.path)}
}
