package state

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

const (
	// FileName is the journal's name in the state directory.
	FileName = "journal.json"
	// prevSuffix marks the generation before, kept for a disk that damages
	// the newest one.
	prevSuffix = ".prev"

	formatVersion = 1
	// maxJournal bounds what Open reads: two saved files of 1 MiB in base64,
	// and then some.
	maxJournal  = 16 << 20
	maxVersion  = 64    // octets of a version that is repeated
	journalMode = 0o600 // It holds copies of files that may be private.
)

// ErrCorrupt means that the journal is there, but that neither it nor the
// generation before it is whole.
var ErrCorrupt = errors.New("journal is damaged")

// ErrNewer means that a later version of this program wrote the journal, in a
// format that this one does not know.
var ErrNewer = errors.New("journal of a later version")

// Header says which attach the changes belong to.
type Header struct {
	AttachID string          `json:"attachID"`
	BootID   string          `json:"bootID"`
	Network  string          `json:"network,omitempty"` // the network namespace, as the caller names it
	Since    time.Time       `json:"since"`
	Version  string          `json:"version,omitempty"` // of the program
	Params   json.RawMessage `json:"params,omitempty"`  // the caller's own
}

// Change is one change made to the host. Data is what its undo needs.
type Change struct {
	Kind string          `json:"kind"` // "sysctl", "resolv.conf", "pin", ...
	Name string          `json:"name"` // which one, unique within the kind
	Time time.Time       `json:"time"`
	Data json.RawMessage `json:"data,omitempty"`
}

// body is what the checksum covers.
type body struct {
	Generation uint64   `json:"generation"`
	Header     Header   `json:"header"`
	Changes    []Change `json:"changes"`
}

// envelope is the file. The checksum is over the body without insignificant
// white space, so that a file that somebody reformatted is still whole.
type envelope struct {
	Format int             `json:"format"`
	SHA256 string          `json:"sha256"`
	Body   json.RawMessage `json:"body"`
}

// Journal is the record of changes. Its methods may be called concurrently.
// Between processes the lock of [Lock] must be held from Open to the last
// write: a Journal doesn't notice what another process wrote after Open.
type Journal struct {
	fs   hostfs.FS // nil for one in memory only
	dir  string
	path string

	recovered error // of Open

	mu       sync.Mutex
	cur      body
	keepPrev bool // prev is the only whole generation on disk
	unsure   bool // a write failed, so the disk may be ahead of cur
}

// Open reads the journal in dir. A missing file, or a missing dir, is an empty
// journal; dir is made by the first write. If the newest generation is damaged
// or gone and the one before is whole, that one is used and [Journal.Recovered]
// says why. If none is whole the error is ErrCorrupt. One of a later format is
// left alone, with ErrNewer, whatever the other generation is.
func Open(dir string) (*Journal, error) { return OpenFS(hostfs.OS(), dir) }

// OpenFS is Open on a given file system.
func OpenFS(fsys hostfs.FS, dir string) (*Journal, error) {
	j := &Journal{fs: fsys, dir: dir, path: filepath.Join(dir, FileName)}
	cur, err := load(fsys, j.path)
	if err == nil {
		j.cur = cur
		return j, nil
	}
	missing := errors.Is(err, fs.ErrNotExist)
	if !missing && !errors.Is(err, ErrCorrupt) {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	prev, perr := load(fsys, j.path+prevSuffix)
	switch {
	case errors.Is(perr, ErrNewer):
		return nil, fmt.Errorf("read journal: %w", perr)
	case perr == nil:
		j.cur, j.recovered, j.keepPrev = prev, err, true
		return j, nil
	case missing && errors.Is(perr, fs.ErrNotExist):
		return j, nil
	case errors.Is(perr, fs.ErrNotExist) || errors.Is(perr, ErrCorrupt):
		return nil, fmt.Errorf("read journal: %w; and before it: %w: compare /etc/resolv.conf and the sysctls of lo by hand, then remove %s*",
			err, perr, j.path)
	default:
		return nil, fmt.Errorf("read journal: %w", perr)
	}
}

// Unrecorded returns an empty journal that is in memory only, for an undo that
// must leave the one on disk as it is.
func Unrecorded() *Journal { return new(Journal) }

// SetAside renames a damaged journal, so that Open begins an empty one and what
// can be undone without it still is. It returns the new name of the newest
// generation.
func SetAside(dir string) (string, error) { return setAside(hostfs.OS(), dir) }

func setAside(fsys hostfs.FS, dir string) (string, error) {
	path := filepath.Join(dir, FileName)
	for _, name := range []string{path + prevSuffix, path} {
		if err := fsys.Rename(name, name+".damaged"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("set journal aside: %w", err)
		}
	}
	if err := fsys.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("set journal aside: %w", err)
	}
	return path + ".damaged", nil
}

func load(fsys hostfs.FS, path string) (body, error) {
	raw, err := fsys.ReadFile(path, maxJournal)
	if err != nil {
		return body{}, err
	}
	b, err := decode(raw)
	if err != nil && !errors.Is(err, ErrNewer) {
		err = fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if err != nil {
		return body{}, fmt.Errorf("%s: %w", path, err)
	}
	return b, nil
}

func decode(raw []byte) (body, error) {
	var env envelope
	if err := json.Unmarshal(raw, &env); err != nil {
		return body{}, err
	}
	if env.Format > formatVersion {
		return body{}, fmt.Errorf("%w%s: format %d, this version knows %d: run the k2s-dnsbpf that wrote it", ErrNewer, env.writer(), env.Format, formatVersion)
	}
	if env.Format != formatVersion {
		return body{}, fmt.Errorf("format %d, not %d", env.Format, formatVersion)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, env.Body); err != nil {
		return body{}, err
	}
	if checksum(compact.Bytes()) != env.SHA256 {
		return body{}, errors.New("checksum differs")
	}
	var b body
	if err := json.Unmarshal(compact.Bytes(), &b); err != nil {
		return body{}, err
	}
	return b, nil
}

// writer names the program's version, if that is where this format has it.
func (e envelope) writer() string {
	var b struct{ Header Header }
	if json.Unmarshal(e.Body, &b) != nil || b.Header.Version == "" || len(b.Header.Version) > maxVersion {
		return ""
	}
	return fmt.Sprintf(" (%q)", b.Header.Version)
}

func encode(b body) ([]byte, error) {
	raw, err := json.Marshal(b)
	if err != nil {
		return nil, err
	}
	out, err := json.MarshalIndent(envelope{Format: formatVersion, SHA256: checksum(raw), Body: raw}, "", " ")
	if err != nil {
		return nil, err
	}
	return append(out, '\n'), nil
}

// checksum wants compact JSON.
func checksum(raw []byte) string {
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// Recovered is not nil if Open had to fall back on the generation before, of
// which the last change may be missing. It wraps ErrCorrupt or fs.ErrNotExist.
func (j *Journal) Recovered() error { return j.recovered }

// Path is the file's name.
func (j *Journal) Path() string { return j.path }

// Header returns what Begin was last given, completed.
func (j *Journal) Header() Header {
	j.mu.Lock()
	defer j.mu.Unlock()
	h := j.cur.Header
	h.Params = slices.Clone(h.Params)
	return h
}

// Begin writes the header. An empty AttachID, BootID or Since is filled in.
// Changes already recorded stay: an attach over a running one converges, and
// its detach must still undo them all.
func (j *Journal) Begin(h Header) error {
	if h.AttachID == "" {
		h.AttachID = strings.ToLower(rand.Text())
	}
	if h.BootID == "" {
		h.BootID = j.bootID()
	}
	if h.Since.IsZero() {
		h.Since = time.Now().UTC().Truncate(time.Millisecond)
	}
	return j.update("begin attach", func(b *body) bool {
		b.Header = h
		return true
	})
}

// bootID is only for telling a reboot from a restart, so a host without it
// passes: it is "" there.
func (j *Journal) bootID() string {
	if j.fs == nil {
		return ""
	}
	id, err := j.fs.ReadFile("/proc/sys/kernel/random/boot_id", 64)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}

// Rebooted reports whether the host was started again since the header was
// written: what was changed in the kernel is gone. It is false where that can't
// be told.
func (j *Journal) Rebooted() bool {
	then, now := j.Header().BootID, j.bootID()
	return then != "" && now != "" && then != now
}

// Record adds a change, durably, before the caller makes it. If that kind and
// name is recorded already the first record stays, since only it knows what
// was there before us, and nothing is written. On an error the caller must not
// make the change.
func (j *Journal) Record(kind, name string, data any) error {
	raw, err := json.Marshal(data)
	if err != nil {
		return fmt.Errorf("journal %s %s: %w", kind, name, err)
	}
	return j.update("journal "+kind+" "+name, func(b *body) bool {
		if index(b.Changes, kind, name) >= 0 {
			return false
		}
		b.Changes = append(slices.Clone(b.Changes), Change{
			Kind: kind, Name: name, Time: time.Now().UTC().Truncate(time.Millisecond), Data: raw,
		})
		return true
	})
}

// Replace is Record, but if that kind and name is recorded already its data is
// exchanged, in one step: what its undo is to bring back is something else now.
func (j *Journal) Replace(kind, name string, data any) error {
	raw, err := json.Marshal(data)
	if err != nil {
		return fmt.Errorf("journal %s %s: %w", kind, name, err)
	}
	return j.update("journal "+kind+" "+name, func(b *body) bool {
		c := Change{Kind: kind, Name: name, Time: time.Now().UTC().Truncate(time.Millisecond), Data: raw}
		b.Changes = slices.Clone(b.Changes)
		if i := index(b.Changes, kind, name); i >= 0 {
			b.Changes[i] = c
		} else {
			b.Changes = append(b.Changes, c)
		}
		return true
	})
}

// Forget removes the record of a change after it has been undone. It is no
// failure if there is none.
func (j *Journal) Forget(kind, name string) error {
	return j.update("forget "+kind+" "+name, func(b *body) bool {
		i := index(b.Changes, kind, name)
		if i < 0 {
			return false
		}
		b.Changes = slices.Delete(slices.Clone(b.Changes), i, i+1)
		return true
	})
}

// update writes a changed copy and keeps it only once it is durable.
func (j *Journal) update(what string, change func(*body) bool) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	next := j.cur
	if !change(&next) && !j.unsure {
		return nil
	}
	next.Generation++
	raw, err := encode(next)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	// What is kept in memory is what the next Open reads, to the byte.
	if next, err = decode(raw); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if err := j.write(raw); err != nil {
		j.unsure = true
		return fmt.Errorf("%s: write %s: %w", what, j.path, err)
	}
	j.cur, j.unsure = next, false
	return nil
}

// write replaces the file. There is a whole journal under its name at every
// instant; the hard link keeps the generation before without a copy.
func (j *Journal) write(raw []byte) error {
	if j.fs == nil {
		return nil
	}
	if err := hostfs.MkdirAll(j.fs, j.dir); err != nil {
		return err
	}
	if !j.keepPrev {
		if err := hostfs.RemoveIfExists(j.fs, j.path+prevSuffix); err != nil {
			return err
		}
		// No hard links on this file system, or no journal yet: then without.
		_ = j.fs.Link(j.path, j.path+prevSuffix)
	}
	if err := hostfs.WriteFile(j.fs, j.path, raw, journalMode); err != nil {
		return err
	}
	j.keepPrev = false
	return nil
}

// Changes returns the changes in the order of their recording; undo them from
// the last to the first.
func (j *Journal) Changes() []Change {
	j.mu.Lock()
	defer j.mu.Unlock()
	out := slices.Clone(j.cur.Changes)
	for i := range out {
		out[i].Data = slices.Clone(out[i].Data)
	}
	return out
}

// Lookup decodes the data of one change into into, which may be nil, and
// reports whether there is such a change.
func (j *Journal) Lookup(kind, name string, into any) (bool, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	i := index(j.cur.Changes, kind, name)
	if i < 0 {
		return false, nil
	}
	if into == nil {
		return true, nil
	}
	if err := json.Unmarshal(j.cur.Changes[i].Data, into); err != nil {
		return true, fmt.Errorf("journal %s %s: %w", kind, name, err)
	}
	return true, nil
}

// Empty reports whether no change is recorded.
func (j *Journal) Empty() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.cur.Changes) == 0
}

// Clear removes the file: all is undone. The generation before goes first,
// since alone it would be taken for the truth.
func (j *Journal) Clear() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.fs == nil {
		j.cur = body{}
		return nil
	}
	for _, name := range []string{hostfs.TempName(j.path), j.path + prevSuffix, j.path} {
		if err := hostfs.RemoveIfExists(j.fs, name); err != nil {
			return fmt.Errorf("clear journal: %w", err)
		}
	}
	if err := j.fs.SyncDir(j.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("clear journal: %w", err)
	}
	j.cur, j.keepPrev, j.unsure = body{}, false, false
	return nil
}

func index(changes []Change, kind, name string) int {
	return slices.IndexFunc(changes, func(c Change) bool { return c.Kind == kind && c.Name == name })
}

// MkdirAll makes a directory and its missing parents with mode 0755 whatever the umask.
func MkdirAll(dir string) error { return hostfs.MkdirAll(hostfs.OS(), dir) }

// WriteFile puts data at path in one step, synced, with exactly this mode
// whatever the umask. The directory must exist. One writer of a path at a time.
func WriteFile(path string, data []byte, mode fs.FileMode) error {
	if err := hostfs.WriteFile(hostfs.OS(), path, data, mode); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
