package resolvconf

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

// TestOverrideImmutable: with leave, the attribute is off while
// attached, and set again with the original, after a crash too.
func TestOverrideImmutable(t *testing.T) {
	root(t)
	for name, bit := range map[string]uint32{"+i": hostfs.FlagImmutable, "+a": hostfs.FlagAppend} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			write(t, h.path, two)
			addFlag(t, h.path, bit)
			before := identify(t, h.path)
			if err := h.manager(t, nil).TakeOver(ask); !errors.Is(err, ErrImmutableFile) || !strings.Contains(err.Error(), "--override-immutable") {
				t.Fatalf("%v, want ErrImmutableFile with its remedies", err)
			}
			must(t, h.manager(t, nil).TakeOver(askAll))
			checkOurs(t, h)
			if info := stat(t, h.path); info.Immutable || info.Append {
				t.Error("the attribute must not be on our file")
			}
			ins, err := h.manager(t, nil).Inspect()
			must(t, err)
			if bit == hostfs.FlagImmutable && ins.Owner != OwnerAdmin {
				t.Errorf("owner %q: %v", ins.Owner, ins.OwnerReasons)
			}
			out, err := h.manager(t, nil).Restore()
			must(t, err)
			if out.Result != Restored {
				t.Errorf("%+v", out)
			}
			if d := before.diff(identify(t, h.path)); d != "" {
				t.Error("(-want +got)\n" + d)
			}
			h.clean(t)

			// By hand, as our file says, and then detach.
			must(t, h.manager(t, nil).TakeOver(askAll))
			must(t, os.Rename(h.etc+"/"+ParkedName, h.path))
			_, err = h.manager(t, nil).Restore()
			must(t, err)
			if d := before.diff(identify(t, h.path)); d != "" {
				t.Error("undone by hand (-want +got)\n" + d)
			}
		})
	}
	t.Run("not for the directory", func(t *testing.T) {
		h := newHost(t)
		write(t, h.path, two)
		addFlag(t, h.etc, hostfs.FlagImmutable)
		if err := h.manager(t, nil).TakeOver(askAll); !errors.Is(err, ErrImmutable) || errors.Is(err, ErrImmutableFile) {
			t.Errorf("%v, want ErrImmutable of the directory", err)
		}
	})
}

// TestInPlace: with leave, a bind mount is overwritten in place.
func TestInPlace(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	for _, oc := range []originalCase{mounted, mountedLong} {
		t.Run(oc.name, func(t *testing.T) {
			h := newHost(t)
			defer h.discard()
			oc.make(t, h)
			before := identify(t, h.path)
			m := h.manager(t, nil)
			safe := false
			m.hook = func(point string) {
				if point == "exchange before" { // nothing is overwritten yet, and the copy is whole
					safe = before.rebuilt().diff(identify(t, h.etc+"/"+ParkedName).rebuilt()) == "" && before.diff(identify(t, h.path)) == ""
				}
			}
			must(t, m.TakeOver(askAll))
			if !safe {
				t.Error("no whole copy of the original before the first octet of it is changed")
			}
			text := readFile(t, h.path)
			if f := Parse([]byte(text)); len(f.Nameservers) != 1 || f.Nameservers[0] != listen[0] || !sealed([]byte(text)) {
				t.Fatalf("not our file:\n%s", text)
			}
			if !strings.Contains(text, "cp "+h.etc+"/"+ParkedName+" "+h.path) {
				t.Errorf("not how to undo it by hand:\n%s", text)
			}
			if now := stat(t, h.path); now.Ino != before.Ino || now.Mode != before.Mode {
				t.Errorf("another file is in place: %+v", now)
			}
			checkState(t, h.manager(t, nil), StateOurs)
			must(t, h.manager(t, nil).TakeOver(ask)) // it goes on without new leave
			must(t, h.manager(t, nil).TakeOver(TakeOver{Nameservers: addrs("172.19.1.1", "127.0.0.1")}))
			ins, err := h.manager(t, nil).Inspect()
			must(t, err)
			checkUpstreams(t, ins, []string{"192.0.2.1", "192.0.2.2"})

			out, err := h.manager(t, nil).Restore()
			must(t, err)
			if out.Result != Restored {
				t.Errorf("%+v", out)
			}
			if d := before.diff(identify(t, h.path)); d != "" {
				t.Error("not the original (-want +got)\n" + d)
			}
			h.clean(t)

			// Without the journal it is told by the checksum and the copy.
			must(t, h.manager(t, nil).TakeOver(askAll))
			must(t, os.RemoveAll(h.state))
			_, err = h.manager(t, nil).Restore()
			must(t, err)
			if d := before.diff(identify(t, h.path)); d != "" {
				t.Error("journal lost (-want +got)\n" + d)
			}
			h.clean(t)

			// A container runtime writes a new one in place: it is kept.
			must(t, h.manager(t, nil).TakeOver(askAll))
			write(t, h.path, "nameserver 203.0.113.9\n")
			checkState(t, h.manager(t, nil), StateForeign)
			out, err = h.manager(t, nil).Restore()
			must(t, err)
			if out.Result != LeftForeign || !strings.Contains(out.Detail, "cp "+h.etc) {
				t.Errorf("%+v", out)
			}
			// And is the original of the next attach.
			must(t, h.manager(t, nil).TakeOver(askAll))
			_, err = h.manager(t, nil).Restore()
			must(t, err)
			if got := readFile(t, h.path); got != "nameserver 203.0.113.9\n" {
				t.Errorf("restored to %q", got)
			}
			h.clean(t)
		})
	}
	t.Run("mount ended while attached", func(t *testing.T) {
		h := newHost(t)
		defer h.discard()
		mounted.make(t, h)
		must(t, h.manager(t, nil).TakeOver(askAll))
		must(t, unix.Unmount(h.path, unix.MNT_DETACH))
		out, err := h.manager(t, nil).Restore()
		must(t, err)
		if got := readFile(t, h.path); got != "covered" || out.Result != LeftForeign {
			t.Errorf("%+v: %q", out, got)
		}
	})
	t.Run("read-only mount", func(t *testing.T) {
		h := newHost(t)
		defer h.discard()
		mounted.make(t, h)
		must(t, unix.Mount("", h.path, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
		if err := h.manager(t, nil).TakeOver(askAll); !errors.Is(err, ErrReadOnly) {
			t.Errorf("%v, want ErrReadOnly", err)
		}
		h.clean(t)
	})
	t.Run("full disk", func(t *testing.T) { // in place
		h := newHost(t)
		defer h.discard()
		tmpfs(t, h.root+"/run", "size=32k")
		mounted.make(t, h)
		before := identify(t, h.path)
		fill, err := os.Create(h.root + "/run/fill")
		must(t, err)
		for err == nil {
			_, err = fill.Write(make([]byte, 4096))
		}
		must(t, fill.Close())
		long := askAll
		write(t, h.etc+"/x", "") // its own file system has room
		m := h.manager(t, nil)
		m.opts.Version = strings.Repeat("v", 8192) // ours needs more room than the original has
		if err := m.TakeOver(long); !errors.Is(err, ErrNoSpace) {
			t.Fatalf("%v, want ErrNoSpace", err)
		}
		if d := before.diff(identify(t, h.path)); d != "" {
			t.Error("(-want +got)\n" + d)
		}
		h.clean(t)
	})
}

// TestTorn: what is a mixture of two texts, and what is somebody else's.
func TestTorn(t *testing.T) {
	info := hostfs.Info{Dev: 1, Ino: 2, MountRoot: true}
	r := record{known: true, original: original{Type: TypeRegular, InPlace: true, Info: info, Content: []byte("nameserver 192.0.2.1\n")},
		texts: map[string]content{"x": {Text: []byte("# ours\nnameserver 127.0.0.1\n")}}}
	for text, want := range map[string]bool{
		"# ours\nnameserver 127":                 true, // cut off
		"# ours\nnameserver 192.0.2.1\n":         false,
		"nameserver 192.0.2.1\n\n\n\n":           true, // before it is cut off
		"nameserver 192.0.2.1\n.0.0.1\n":         true,
		"nameserver 192.0.2.1\n\x00\x00\x00":     true, // lengthened, and not written
		"nameserver 203.0.113.9\n":               false,
		"":                                       false,
		"nameserver 192.0.2.1\n# and one more\n": false,
	} {
		o := object{Type: TypeRegular, info: info, content: []byte(text)}
		if got := r.torn(o); got != want {
			t.Errorf("%q: torn %v", text, got)
		}
		o.info.Ino++
		if r.torn(o) {
			t.Errorf("%q: another file", text)
		}
	}
}

// TestMountNamespace: the mounts that decide are those of process 1.
func TestMountNamespace(t *testing.T) {
	tests := map[string]struct {
		first  func(t *testing.T, h host, first string) // what process 1 sees
		refuse bool
	}{
		"same":                 {func(t *testing.T, h host, first string) { must(t, os.Symlink("/", first)) }, false},
		"other file":           {func(t *testing.T, h host, first string) { plant(t, first+h.path, two) }, true},
		"no such name there":   {func(t *testing.T, h host, first string) { must(t, os.MkdirAll(first, 0o755)) }, false},
		"process 1 is unknown": {func(t *testing.T, h host, first string) {}, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			write(t, h.path, two)
			must(t, os.MkdirAll(h.root+"/proc/1", 0o755))
			tt.first(t, h, h.root+"/proc/1/root")
			ins, err := h.manager(t, nil).Inspect()
			must(t, err)
			if got := errors.Is(ins.Refused(), ErrElsewhere); got != tt.refuse {
				t.Errorf("refused %v: %v", got, ins.Refused())
			}
		})
	}
}

func plant(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	write(t, path, text)
}

// TestComments: a person's are carried over, a manager's are not.
func TestComments(t *testing.T) {
	h := newHost(t)
	write(t, h.path, two)
	must(t, h.manager(t, nil).TakeOver(ask))
	if got := readFile(t, h.path); !strings.Contains(got, "\n# by hand\n; kept\n") {
		t.Errorf("comments are lost:\n%s", got)
	}
	for _, comments := range [][]string{
		{"# Generated by NetworkManager", "# more of it"},
		{"# This file was automatically generated by WSL.", "# [network]"},
		{headerLine, createdMark, sumPrefix + "00"},
	} {
		if got := carriedComments(comments); len(got) > 0 {
			t.Errorf("carried over: %q", got)
		}
	}
}

// TestContentCases: what the file of a host becomes.
func TestContentCases(t *testing.T) {
	seven := strings.Repeat("a", 50)
	tests := []struct {
		name, in  string
		upstreams []string
		skipped   int
		carried   []string // lines of ours
		absent    []string
		refused   bool
	}{
		{name: "15 tolerant", in: "nameserver 1.1.1.1 # x\r\n;c\n nameserver 9.9.9.9\nNAMESERVER 8.8.8.8\nnameserver\t1.0.0.1\x00x\nnameserver 4.4.4.4",
			upstreams: []string{"1.1.1.1", "1.0.0.1", "4.4.4.4"}, skipped: 3},
		{name: "15 byte order mark", in: "\xef\xbb\xbfnameserver 1.1.1.1\nnameserver 1.0.0.1\n", upstreams: []string{"1.0.0.1"}, skipped: 1},
		{name: "16 odd addresses", in: "nameserver fe80::1%eth0\nnameserver fe80::1\nnameserver ::1\nnameserver ::ffff:1.1.1.1\nnameserver 0.0.0.0\nnameserver 127.0.0.1\nnameserver 127.0.0.53\nnameserver [::1]:5353\n",
			upstreams: []string{"fe80::1%eth0", "1.1.1.1"}, skipped: 1},
		{name: "17 five and a duplicate", in: "nameserver 1.0.0.1\nnameserver 1.0.0.2\nnameserver 1.0.0.1\nnameserver 1.0.0.3\nnameserver 1.0.0.4\nnameserver 1.0.0.5\n",
			upstreams: []string{"1.0.0.1", "1.0.0.2", "1.0.0.3", "1.0.0.4", "1.0.0.5"}},
		{name: "18 long search", in: "nameserver 1.0.0.1\nsearch x\nsearch " + strings.Repeat(seven+" ", 7) + "\n", upstreams: []string{"1.0.0.1"},
			carried: []string{"search " + strings.TrimSpace(strings.Repeat(seven+" ", 7))}, absent: []string{"search x"}},
		{name: "18 dot", in: "nameserver 1.0.0.1\nsearch .\n", upstreams: []string{"1.0.0.1"}, carried: []string{"search ."}},
		{name: "18 domain, then search", in: "nameserver 1.0.0.1\ndomain a.example\nsearch b.example\n", upstreams: []string{"1.0.0.1"},
			carried: []string{"search b.example"}, absent: []string{"domain"}},
		{name: "18 search, then domain", in: "nameserver 1.0.0.1\nsearch b.example\ndomain a.example\n", upstreams: []string{"1.0.0.1"},
			carried: []string{"domain a.example"}, absent: []string{"search"}},
		{name: "19 options", in: "nameserver 1.0.0.1\noptions ndots:5 timeout:1 attempts:3 rotate edns0 trust-ad\noptions single-request use-vc no-aaaa no-reload\nsortlist 10.0.0.0/8\n",
			upstreams: []string{"1.0.0.1"}, carried: []string{"options ndots:5 timeout:1 attempts:3 rotate edns0 trust-ad single-request use-vc no-aaaa", "sortlist 10.0.0.0/8"}, absent: []string{"no-reload"}},
		{name: "19 no trust-ad of ours", in: "nameserver 1.0.0.1\n", upstreams: []string{"1.0.0.1"}, absent: []string{"trust-ad"}},
		{name: "20 ourselves only", in: "nameserver 127.0.0.1\nnameserver ::1\n", refused: true},
		{name: "20 an earlier file of ours", in: string(seal([]byte(headerLine + "\nnameserver 127.0.0.1\n"))), refused: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHost(t)
			write(t, h.path, tt.in)
			m := h.manager(t, nil)
			ins, err := m.Inspect()
			must(t, err)
			checkUpstreams(t, ins, tt.upstreams)
			if len(ins.File.Skipped) != tt.skipped {
				t.Errorf("skipped %v, want %d", ins.File.Skipped, tt.skipped)
			}
			err = m.TakeOver(TakeOver{Nameservers: addrs("127.0.0.1")})
			if tt.refused {
				if !errors.Is(err, ErrNoUpstream) && !errors.Is(err, ErrLeftover) {
					t.Errorf("%v, want a refusal", err)
				}
				return
			}
			must(t, err)
			lines := strings.Split(readFile(t, h.path), "\n")
			for _, want := range append(tt.carried, "nameserver 127.0.0.1") {
				if !contains(lines, func(l string) bool { return l == want }) {
					t.Errorf("no line %q in %q", want, lines)
				}
			}
			for _, word := range tt.absent {
				if contains(lines, func(l string) bool { return !strings.HasPrefix(l, "#") && strings.Contains(l, word) }) {
					t.Errorf("%q in %q", word, lines)
				}
			}
			_, err = m.Restore()
			must(t, err)
			if got := readFile(t, h.path); got != tt.in {
				t.Error("not the same octets:\n" + cmp.Diff(tt.in, got))
			}
		})
	}
}

func contains(lines []string, match func(string) bool) bool {
	for _, l := range lines {
		if match(l) {
			return true
		}
	}
	return false
}

// TestKubeletFileOutlives: the file is there, whole, through attach,
// detach and an attach with other servers, and only ever replaced by rename.
func TestKubeletFileOutlives(t *testing.T) {
	h := newHost(t)
	path := filepath.Join(h.state, KubeletFile)
	write(t, h.path, two)
	publish := func(servers ...string) {
		t.Helper()
		_, err := PublishKubelet(Publish{Path: path, Upstreams: addrs(servers...), Own: listen})
		must(t, err)
	}
	publish("192.0.2.1", "192.0.2.2")
	must(t, h.manager(t, nil).TakeOver(ask))
	first := stat(t, path)
	if got := Parse([]byte(readFile(t, path))).Nameservers; len(got) != 2 {
		t.Errorf("servers %v", got)
	}
	reader, err := os.Open(path)
	must(t, err)
	defer reader.Close()
	publish("192.0.2.9")
	if stat(t, path).SameFile(first) {
		t.Error("it was overwritten in place: a kubelet may have read the half of it")
	}
	old := make([]byte, 4096)
	n, _ := reader.Read(old)
	if !strings.Contains(string(old[:n]), "192.0.2.1") {
		t.Errorf("who has it open sees %q", old[:n])
	}
	before := readFile(t, path)
	_, err = h.manager(t, nil).Restore()
	must(t, err)
	if readFile(t, path) != before {
		t.Error("a detach changed it")
	}
	// A host's only server is on its loopback.
	if _, err := PublishKubelet(Publish{Path: path + ".2", Upstreams: addrs("127.0.0.2"), Own: listen}); !errors.Is(err, ErrNothingToPublish) {
		t.Errorf("%v, want ErrNothingToPublish", err)
	}
}

func TestFindMount(t *testing.T) {
	const info = "36 35 98:0 / / rw,noatime master:1 - ext3 /dev/root rw\n" +
		"44 36 98:0 /var/lib/x\\040y /etc/resolv.conf rw,relatime shared:1 master:2 - ext4 /dev/vda rw\n"
	if got := findMount(info, 44); got != `/var/lib/x\040y of /dev/vda (ext4)` {
		t.Error(got)
	}
	if got := findMount(info, 4); got != "something" {
		t.Error(got)
	}
}
