package resolvconf

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs/faultfs"
)

// host is a directory tree that stands for the host's.
type host struct{ root, etc, path, state string }

func newHost(t testing.TB) host {
	t.Helper()
	h := hostAt(filepath.Join(t.TempDir(), "host"))
	for _, dir := range []string{h.etc, h.root + "/run/systemd/resolve", h.root + "/run/NetworkManager", h.root + "/var/lib"} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	return h
}

func hostAt(root string) host {
	return host{root: root, etc: root + "/etc", path: root + "/etc/resolv.conf", state: root + "/var/lib/k2s-dnsbpf"}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t testing.TB, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o644))
}

func readFile(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return string(data)
}

func stat(t testing.TB, path string) hostfs.Info {
	t.Helper()
	info, err := hostfs.OS().Lstat(path)
	must(t, err)
	return info
}

var listen = addrs("127.0.0.1", "::1")

// open makes a Manager with a journal read anew, as a new process would.
func (h host) open(fsys hostfs.FS) (*Manager, error) {
	if fsys == nil {
		fsys = hostfs.OS()
	}
	j, err := state.OpenFS(fsys, h.state)
	if err != nil {
		return nil, err
	}
	return New(Options{Path: h.path, StateDir: h.state, Journal: j, FS: fsys, Root: h.root,
		Listen: listen, AttachID: "testid", Version: "0.0.0"})
}

func (h host) manager(t testing.TB, fsys hostfs.FS) *Manager {
	t.Helper()
	m, err := h.open(fsys)
	must(t, err)
	return m
}

var ask = TakeOver{Nameservers: addrs("127.0.0.1"), UpstreamsGiven: true}

// askAll gets over all that can be got over.
var askAll = TakeOver{Nameservers: addrs("127.0.0.1"), UpstreamsGiven: true, InPlace: true, OverrideImmutable: true}

// identity is all that must be the same after a restore.
type identity struct {
	Exists  bool
	Mode    fs.FileMode
	Link    string
	Content string
	UID     uint32
	GID     uint32
	Xattrs  []hostfs.Xattr
	Flags   uint32
	Mtime   time.Time
	Ino     uint64 // 0 where it may differ
}

func identify(t testing.TB, path string) identity {
	t.Helper()
	osfs := hostfs.OS()
	info, err := osfs.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return identity{}
	}
	must(t, err)
	id := identity{Exists: true, Mode: info.Mode, UID: info.UID, GID: info.GID, Mtime: info.Mtime, Ino: info.Ino}
	id.Xattrs, err = osfs.Xattrs(path)
	must(t, err)
	if info.Mode&fs.ModeSymlink != 0 {
		id.Link, err = os.Readlink(path)
		must(t, err)
		return id
	}
	if info.Mode.IsRegular() {
		id.Content = readFile(t, path)
		id.Flags, err = osfs.Flags(path)
		must(t, err)
	}
	return id
}

// rebuilt is the identity of an original that could not be kept as an object.
func (i identity) rebuilt() identity {
	i.Ino = 0
	return i
}

func (i identity) diff(o identity) string {
	if i.Ino == 0 || o.Ino == 0 {
		i.Ino, o.Ino = 0, 0
	}
	return cmp.Diff(i, o)
}

// clean fails if anything of ours is left in /etc or the journal.
func (h host) clean(t testing.TB) {
	t.Helper()
	entries, err := os.ReadDir(h.etc)
	must(t, err)
	for _, e := range entries {
		if strings.Contains(e.Name(), "k2s") {
			t.Errorf("left in /etc: %s", e.Name())
		}
	}
	j, err := state.Open(h.state)
	must(t, err)
	if !j.Empty() {
		t.Errorf("journal still has %d changes", len(j.Changes()))
	}
}

// kill runs f and reports whether faultfs or a hook "killed" it.
func kill(f func()) (killed bool) {
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(faultfs.Killed); !ok {
				panic(r)
			}
			killed = true
		}
	}()
	f()
	return false
}

// original states.
type originalCase struct {
	name      string
	make      func(t testing.TB, h host)
	wantType  Type
	upstreams []string
	noUp      bool // TakeOver refuses without upstreams
}

// locked and mounted are originals that take askAll.
var (
	locked = originalCase{name: "11 immutable", make: func(t testing.TB, h host) {
		write(t, h.path, two)
		addFlag(t, h.path, hostfs.FlagImmutable)
	}}
	// In a mount namespace of its own only; discard ends the mount.
	mounted = originalCase{name: "12 bind mount", make: func(t testing.TB, h host) {
		write(t, h.path, "covered")
		source := h.root + "/run/container-resolv.conf"
		write(t, source, two)
		must(t, os.Chmod(source, 0o640))
		must(t, os.Chtimes(source, time.Unix(1e9, 5), time.Unix(1e9, 123456789)))
		must(t, unix.Mount(source, h.path, "", unix.MS_BIND, ""))
	}}
	// A longer original is cut off at the takeover, a shorter one at the restore.
	mountedLong = originalCase{name: "12 bind mount, long", make: func(t testing.TB, h host) {
		mounted.make(t, h)
		write(t, h.path, strings.Repeat("# a long comment, but nothing else\n", 100)+two)
	}}
)

func addFlag(t testing.TB, name string, flag uint32) {
	t.Helper()
	flags, err := hostfs.OS().Flags(name)
	must(t, err)
	if err := hostfs.OS().SetFlags(name, flags|flag); err != nil {
		t.Skipf("no such attribute here: %v", err)
	}
	t.Cleanup(func() { _ = hostfs.OS().SetFlags(name, flags) })
}

// discard removes a host whatever holds it.
func (h host) discard() {
	_ = unix.Unmount(h.path, unix.MNT_DETACH)
	if flags, err := hostfs.OS().Flags(h.path); err == nil {
		_ = hostfs.OS().SetFlags(h.path, flags&^locks)
	}
	_ = os.RemoveAll(filepath.Dir(h.root))
}

const two = "# by hand\n; kept\nnameserver\t192.0.2.1\nnameserver 192.0.2.2 # second\nsearch corp.example\noptions ndots:5 no-reload"

var originals = []originalCase{
	{"1 regular", func(t testing.TB, h host) { write(t, h.path, two) }, TypeRegular, []string{"192.0.2.1", "192.0.2.2"}, false},
	{"2 resolved stub, relative", func(t testing.TB, h host) {
		write(t, h.root+"/run/systemd/resolve/stub-resolv.conf", "nameserver 127.0.0.53\noptions edns0 trust-ad\nsearch lan\n")
		write(t, h.root+"/run/systemd/resolve/resolv.conf", "nameserver 198.51.100.1\nnameserver 198.51.100.2\nsearch lan\n")
		must(t, os.Symlink("../run/systemd/resolve/stub-resolv.conf", h.path))
	}, TypeSymlink, []string{"198.51.100.1", "198.51.100.2"}, false},
	{"3 absolute link to uplinks", func(t testing.TB, h host) {
		write(t, h.root+"/run/systemd/resolve/resolv.conf", "nameserver 198.51.100.1\n")
		must(t, os.Symlink(h.root+"/run/systemd/resolve/resolv.conf", h.path))
	}, TypeSymlink, []string{"198.51.100.1"}, false},
	{"3 chain of links", func(t testing.TB, h host) {
		write(t, h.root+"/run/systemd/resolve/resolv.conf", "nameserver 198.51.100.1\n")
		must(t, os.Symlink("../run/systemd/resolve/resolv.conf", h.etc+"/middle.conf"))
		must(t, os.Symlink("middle.conf", h.path))
	}, TypeSymlink, []string{"198.51.100.1"}, false},
	{"4 NetworkManager", func(t testing.TB, h host) {
		write(t, h.root+"/run/NetworkManager/resolv.conf", "# Generated by NetworkManager\nnameserver 203.0.113.1\n")
		must(t, os.Symlink("../run/NetworkManager/resolv.conf", h.path))
	}, TypeSymlink, []string{"203.0.113.1"}, false},
	{"5 dangling", func(t testing.TB, h host) { must(t, os.Symlink("../run/nowhere/resolv.conf", h.path)) }, TypeDangling, nil, true},
	{"6 missing", func(t testing.TB, h host) {}, TypeMissing, nil, true},
	{"7 empty", func(t testing.TB, h host) { write(t, h.path, "") }, TypeRegular, nil, true},
	{"7 comments only", func(t testing.TB, h host) { write(t, h.path, "# nothing\n") }, TypeRegular, nil, true},
	{"7 one MiB", func(t testing.TB, h host) {
		write(t, h.path, strings.Repeat("# 345678901234\n\n", MaxSize/16))
	}, TypeRegular, nil, true},
	{"7 junk", func(t testing.TB, h host) {
		write(t, h.path, "\x00\xff\xfe\x7fELF\n\n\x01nameserver 1.1.1.1\r\x00\n")
	}, TypeRegular, nil, true},
	{"9 attributes", func(t testing.TB, h host) {
		write(t, h.path, two)
		for _, x := range []hostfs.Xattr{{Name: "user.note", Value: []byte("a\x00b")}, {Name: "trusted.k2s", Value: []byte("t")}, {Name: "user.empty"},
			{Name: "system.posix_acl_access", Value: acl}, {Name: "security.selinux", Value: []byte("system_u:object_r:net_conf_t:s0\x00")}} {
			if err := hostfs.OS().SetXattr(h.path, x); err != nil {
				t.Logf("not covered here: %v", err)
			}
		}
		must(t, os.Chown(h.path, 12, 34))
		must(t, os.Chmod(h.path, 0o600))
		must(t, os.Chtimes(h.path, time.Unix(1e9, 5), time.Unix(1e9, 123456789)))
	}, TypeRegular, []string{"192.0.2.1", "192.0.2.2"}, false},
}

// acl is user::rw- user:1000:r-- group::--- mask::r-- other::---, as
// linux/posix_acl_xattr.h lays it out.
var acl = []byte{2, 0, 0, 0,
	1, 0, 6, 0, 0xff, 0xff, 0xff, 0xff,
	2, 0, 4, 0, 0xe8, 3, 0, 0,
	4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff,
	16, 0, 4, 0, 0xff, 0xff, 0xff, 0xff,
	32, 0, 0, 0, 0xff, 0xff, 0xff, 0xff}
