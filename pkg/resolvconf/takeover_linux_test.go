package resolvconf

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs/faultfs"
)

func root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: owners, labels, attributes and mounts")
	}
}

// methods are the ways to take over, the latter two on a file system that
// lacks the calls.
var methods = []struct {
	name        string
	unsupported map[string]error
	sameInode   bool
}{
	{"exchange", nil, true},
	{"link", map[string]error{"exchange": syscall.EINVAL, "renamenew": syscall.EINVAL}, true},
	{"copy", map[string]error{"exchange": syscall.ENOSYS, "link": syscall.EPERM}, false},
}

func TestTakeOverAndRestore(t *testing.T) {
	root(t)
	defer syscall.Umask(syscall.Umask(0o077))
	for _, oc := range originals {
		for _, way := range methods {
			t.Run(oc.name+"/"+way.name, func(t *testing.T) {
				h := newHost(t)
				oc.make(t, h)
				before := identify(t, h.path)
				if !way.sameInode {
					before = before.rebuilt()
				}
				ffs := &faultfs.FS{Under: hostfs.OS(), Unsupported: way.unsupported}
				m := h.manager(t, ffs)
				checkState(t, m, map[bool]State{true: StateOriginal, false: StateMissing}[before.Exists])

				ins, err := m.Inspect()
				must(t, err)
				if ins.Type != oc.wantType {
					t.Errorf("type %q, want %q", ins.Type, oc.wantType)
				}
				checkUpstreams(t, ins, oc.upstreams)
				if oc.noUp {
					err := m.TakeOver(TakeOver{Nameservers: ask.Nameservers})
					if !errors.Is(err, ErrNoUpstream) || !strings.Contains(err.Error(), "--upstream") {
						t.Fatalf("%v, want ErrNoUpstream with its remedy", err)
					}
					if err := ins.Refused(); !errors.Is(err, ErrNoUpstream) || ins.Refused(ErrNoUpstream) != nil {
						t.Errorf("refusals %v", ins.Refusals)
					}
					h.clean(t)
				}
				ask := ask
				ask.UpstreamsGiven = oc.noUp
				must(t, m.TakeOver(ask))
				checkOurs(t, h)
				checkState(t, m, StateOurs)
				now := identify(t, h.path)

				// Twice is once.
				must(t, m.TakeOver(ask))
				must(t, h.manager(t, ffs).TakeOver(ask))
				if d := now.diff(identify(t, h.path)); d != "" {
					t.Error("the second takeover changed the file\n" + d)
				}
				ins, err = h.manager(t, ffs).Inspect()
				must(t, err)
				checkUpstreams(t, ins, oc.upstreams)
				if ins.State != StateOurs || ins.BeforeLink != before.Link {
					t.Errorf("while attached: %v, link %q", ins.State, ins.BeforeLink)
				}

				fresh := h.manager(t, ffs)
				out, err := fresh.Restore()
				must(t, err)
				if out.Result != Restored || len(out.Inexact) > 0 {
					t.Errorf("%+v", out)
				}
				if d := before.diff(identify(t, h.path)); d != "" {
					t.Error("not the original (-want +got)\n" + d)
				}
				h.clean(t)
				for range 2 {
					out, err = fresh.Restore()
					must(t, err)
					if out.Result != NothingToDo {
						t.Errorf("again: %+v", out)
					}
				}
				must(t, h.manager(t, nil).TakeOver(ask)) // A new attach works.
				_, err = h.manager(t, nil).Restore()
				must(t, err)
				if d := before.rebuilt().diff(identify(t, h.path)); d != "" {
					t.Error("second round (-want +got)\n" + d)
				}
			})
		}
	}
}

func checkUpstreams(t *testing.T, ins Inspection, want []string) {
	t.Helper()
	var got []string
	for _, u := range ins.Upstreams {
		got = append(got, u.Addr.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error("upstreams (-want +got)\n" + diff)
	}
}

func checkState(t *testing.T, m *Manager, want State) {
	t.Helper()
	if got, err := m.State(); err != nil || got != want {
		t.Errorf("state %q, %v; want %q", got, err, want)
	}
}

// checkOurs: a file that a resolver can use, readable by all.
func checkOurs(t *testing.T, h host) {
	t.Helper()
	info := stat(t, h.path)
	if info.Mode != ourMode || info.UID != 0 {
		t.Errorf("ours has mode %v, owner %d", info.Mode, info.UID)
	}
	text := readFile(t, h.path)
	if got := Parse([]byte(text)); len(got.Nameservers) != 1 || got.Nameservers[0] != listen[0] || !sealed([]byte(text)) {
		t.Errorf("not our file:\n%s", text)
	}
}

func TestCarriesOverSearchAndOptions(t *testing.T) {
	h := newHost(t)
	write(t, h.path, two)
	must(t, h.manager(t, nil).TakeOver(ask))
	f := Parse([]byte(readFile(t, h.path)))
	if diff := cmp.Diff([]string{"corp.example", "ndots:5"}, append(f.Search, f.Options...)); diff != "" {
		t.Error(diff)
	}
	// What our file says to do by hand, without the program, must work.
	before := stat(t, h.etc+"/"+ParkedName)
	must(t, os.Rename(h.etc+"/"+ParkedName, h.path))
	out, err := h.manager(t, nil).Restore()
	must(t, err)
	if out.Result != NothingToDo || !stat(t, h.path).SameFile(before) {
		t.Errorf("after an undo by hand: %+v", out)
	}
	h.clean(t)
}

func TestNoWritesThroughTheLink(t *testing.T) {
	h := newHost(t)
	target := h.root + "/run/systemd/resolve/resolv.conf"
	write(t, target, "nameserver 198.51.100.1\n")
	must(t, os.Symlink("../run/systemd/resolve/resolv.conf", h.path))
	before := identify(t, target)
	must(t, h.manager(t, nil).TakeOver(ask))
	// The manager renews its file while we are attached: the new servers count.
	if d := before.diff(identify(t, target)); d != "" {
		t.Error("target changed\n" + d)
	}
	write(t, target, "nameserver 198.51.100.7\nnameserver 127.0.0.1\n")
	ins, err := h.manager(t, nil).Inspect()
	must(t, err)
	checkUpstreams(t, ins, []string{"198.51.100.7"})
	must(t, os.Remove(target))
	// Gone: what was chosen at attach still counts, and the link goes back.
	ins, err = h.manager(t, nil).Inspect()
	must(t, err)
	checkUpstreams(t, ins, []string{"198.51.100.1"})
	_, err = h.manager(t, nil).Restore()
	must(t, err)
	if link, _ := os.Readlink(h.path); link != "../run/systemd/resolve/resolv.conf" {
		t.Errorf("link %q", link)
	}
}

// TestConverge: new settings while attached never pass through the original.
func TestConverge(t *testing.T) {
	h := newHost(t)
	write(t, h.path, two)
	before := identify(t, h.path)
	must(t, h.manager(t, nil).TakeOver(ask))
	must(t, h.manager(t, nil).TakeOver(TakeOver{Nameservers: addrs("172.19.1.1", "127.0.0.1")}))
	f := Parse([]byte(readFile(t, h.path)))
	if diff := cmp.Diff(addrs("172.19.1.1", "127.0.0.1"), f.Nameservers, compareAddr); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"corp.example"}, f.Search); diff != "" {
		t.Error(diff)
	}
	checkState(t, h.manager(t, nil), StateOurs)
	_, err := h.manager(t, nil).Restore()
	must(t, err)
	if d := before.diff(identify(t, h.path)); d != "" {
		t.Error(d)
	}
	h.clean(t)
}

func TestForeignFileIsKept(t *testing.T) {
	foreign := map[string]func(t *testing.T, h host){
		"renamed over": func(t *testing.T, h host) {
			write(t, h.etc+"/x", "nameserver 203.0.113.9\n")
			must(t, os.Rename(h.etc+"/x", h.path))
		},
		"in place": func(t *testing.T, h host) { write(t, h.path, "nameserver 203.0.113.9\n") },
		"link": func(t *testing.T, h host) {
			write(t, h.etc+"/vpn", "nameserver 203.0.113.9\n")
			must(t, os.Remove(h.path))
			must(t, os.Symlink("vpn", h.path))
		},
	}
	for name, intrude := range foreign {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			write(t, h.path, two)
			before := identify(t, h.path)
			must(t, h.manager(t, nil).TakeOver(ask))
			intrude(t, h)
			theirs := identify(t, h.path)
			checkState(t, h.manager(t, nil), StateForeign)
			for range 2 {
				out, err := h.manager(t, nil).Restore()
				must(t, err)
				if out.Result != LeftForeign || !strings.Contains(out.Detail, "mv -f "+h.etc+"/"+ParkedName) {
					t.Fatalf("%+v", out)
				}
				if d := theirs.diff(identify(t, h.path)); d != "" {
					t.Fatal("their file was changed\n" + d)
				}
			}
			if d := before.diff(identify(t, h.etc+"/"+ParkedName)); d != "" {
				t.Fatal("the parked original must stay\n" + d)
			}
			// The next attach takes theirs for the original.
			must(t, h.manager(t, nil).TakeOver(ask))
			_, err := h.manager(t, nil).Restore()
			must(t, err)
			if d := theirs.diff(identify(t, h.path)); d != "" {
				t.Error("not their file\n" + d)
			}
			h.clean(t)
		})
	}
}

// TestEditedFileDoesNotStrand: ours, edited, still names only us.
func TestEditedFileDoesNotStrand(t *testing.T) {
	h := newHost(t)
	write(t, h.path, two)
	before := identify(t, h.path)
	must(t, h.manager(t, nil).TakeOver(ask))
	edited := readFile(t, h.path) + "options rotate\n"
	write(t, h.path, edited)
	out, err := h.manager(t, nil).Restore()
	must(t, err)
	if out.Result != Restored {
		t.Errorf("%+v", out)
	}
	if d := before.diff(identify(t, h.path)); d != "" {
		t.Error(d)
	}
	if readFile(t, h.state+"/"+editedName) != edited {
		t.Error("the edited file must be kept")
	}
	h.clean(t)
}

// TestEmptiedFileDoesNotStrand: what names no server is not left behind either,
// unless the original does not.
func TestEmptiedFileDoesNotStrand(t *testing.T) {
	for _, emptied := range []string{"", "# Generated by NetworkManager\nsearch x\n"} {
		h := newHost(t)
		write(t, h.path, two)
		before := identify(t, h.path)
		must(t, h.manager(t, nil).TakeOver(ask))
		write(t, h.path, emptied)
		out, err := h.manager(t, nil).Restore()
		must(t, err)
		if out.Result != Restored || !strings.Contains(out.Detail, h.state+"/"+editedName) {
			t.Errorf("%+v", out)
		}
		if d := before.diff(identify(t, h.path)); d != "" {
			t.Error(d)
		}
		if readFile(t, h.state+"/"+editedName) != emptied {
			t.Error("what was there must be kept")
		}
		h.clean(t)
	}
	h := newHost(t)
	write(t, h.path, "# none\n")
	must(t, h.manager(t, nil).TakeOver(askAll))
	write(t, h.path, "")
	out, err := h.manager(t, nil).Restore()
	must(t, err)
	if out.Result != LeftForeign {
		t.Errorf("%+v", out)
	}
}

// TestLosses: each of parked original, journal and live file may be lost alone.
func TestLosses(t *testing.T) {
	root(t)
	losses := map[string]func(t *testing.T, h host){
		"parked": func(t *testing.T, h host) {
			if err := os.Remove(h.etc + "/" + ParkedName); !errors.Is(err, os.ErrNotExist) {
				must(t, err)
			}
		},
		"parked replaced": func(t *testing.T, h host) {
			_ = os.Remove(h.etc + "/" + ParkedName)
			write(t, h.etc+"/"+ParkedName, "nameserver 6.6.6.6\n")
		},
		"journal":      func(t *testing.T, h host) { must(t, os.RemoveAll(h.state)) },
		"live":         func(t *testing.T, h host) { must(t, os.Remove(h.path)) },
		"journal torn": func(t *testing.T, h host) { must(t, os.Truncate(h.state+"/"+state.FileName, 30)) },
	}
	for _, oc := range originals {
		for name, lose := range losses {
			t.Run(oc.name+"/"+name, func(t *testing.T) {
				h := newHost(t)
				oc.make(t, h)
				before := identify(t, h.path)
				if strings.HasPrefix(name, "parked") {
					before = before.rebuilt()
				}
				must(t, h.manager(t, nil).TakeOver(ask))
				lose(t, h)
				_, err := h.manager(t, nil).Restore()
				must(t, err)
				if d := before.diff(identify(t, h.path)); d != "" {
					t.Error("(-want +got)\n" + d)
				}
				h.clean(t)
			})
		}
	}
}

func TestLeftoverIsRefused(t *testing.T) {
	h := newHost(t)
	write(t, h.path, two)
	must(t, h.manager(t, nil).TakeOver(ask))
	must(t, os.RemoveAll(h.state))
	checkState(t, h.manager(t, nil), StateOurs)
	if err := h.manager(t, nil).TakeOver(ask); !errors.Is(err, ErrLeftover) {
		t.Errorf("%v, want ErrLeftover", err)
	}
	must(t, os.Remove(h.etc+"/"+ParkedName))
	if _, err := h.manager(t, nil).Restore(); !errors.Is(err, ErrLost) {
		t.Errorf("%v, want ErrLost", err)
	}
	checkOurs(t, h)
}

// TestSomebodyElseInBetween: the file is replaced between looking and the swap.
func TestSomebodyElseInBetween(t *testing.T) {
	for _, way := range methods {
		t.Run(way.name, func(t *testing.T) {
			h := newHost(t)
			write(t, h.path, two)
			m := h.manager(t, &faultfs.FS{Under: hostfs.OS(), Unsupported: way.unsupported})
			m.hook = func(point string) {
				if point == "exchange before" {
					write(t, h.etc+"/x", "nameserver 203.0.113.9\n")
					must(t, os.Rename(h.etc+"/x", h.path))
				}
			}
			if err := m.TakeOver(ask); !errors.Is(err, ErrChanged) {
				t.Fatalf("%v, want ErrChanged", err)
			}
			if got := readFile(t, h.path); got != "nameserver 203.0.113.9\n" {
				t.Errorf("their file became %q", got)
			}
			h.clean(t)
		})
	}
	t.Run("restore", func(t *testing.T) {
		h := newHost(t)
		write(t, h.path, two)
		must(t, h.manager(t, nil).TakeOver(ask))
		m := h.manager(t, nil)
		m.hook = func(point string) {
			if point == "put back before" {
				write(t, h.etc+"/x", "nameserver 203.0.113.9\n")
				must(t, os.Rename(h.etc+"/x", h.path))
			}
		}
		if _, err := m.Restore(); !errors.Is(err, ErrChanged) {
			t.Fatalf("%v, want ErrChanged", err)
		}
		m.hook = nil
		if out, err := m.Restore(); err != nil || out.Result != LeftForeign {
			t.Fatalf("%+v, %v", out, err)
		}
		if got := readFile(t, h.path); got != "nameserver 203.0.113.9\n" {
			t.Errorf("their file became %q", got)
		}
	})
}

func TestOtherRefusals(t *testing.T) {
	tests := map[string]struct {
		make func(t *testing.T, h host)
		want error
		says string
	}{
		"directory": {func(t *testing.T, h host) { must(t, os.Mkdir(h.path, 0o755)) }, ErrNotFile, "it is a directory: move it away"},
		"fifo":      {func(t *testing.T, h host) { must(t, syscall.Mkfifo(h.path, 0o644)) }, ErrNotFile, "it is a FIFO: move it away"},
		"socket": {func(t *testing.T, h host) {
			must(t, os.MkdirAll(h.etc, 0o755))
			must(t, unix.Mknod(h.path, unix.S_IFSOCK|0o644, 0))
		}, ErrNotFile, "it is a socket: move it away"},
		"too large": {func(t *testing.T, h host) { write(t, h.path, strings.Repeat("#", MaxSize+1)) }, ErrTooLarge, "make it smaller"},
		"ourselves": {func(t *testing.T, h host) { write(t, h.path, "nameserver 127.0.0.1\n") }, ErrNoUpstream, ""},
		"link to itself": {
			func(t *testing.T, h host) { must(t, os.Symlink("resolv.conf", h.path)) }, ErrNoUpstream,
			"it is a link to resolv.conf, which is a circle of links: give one with --upstream",
		},
		"link to a fifo": {func(t *testing.T, h host) {
			must(t, syscall.Mkfifo(h.etc+"/fifo", 0o644))
			must(t, os.Symlink("fifo", h.path))
		}, ErrNoUpstream, "it is a link to fifo, which is a FIFO: give one with --upstream"},
		"link to a device": {
			func(t *testing.T, h host) { must(t, os.Symlink("/dev/zero", h.path)) }, ErrNoUpstream,
			"it is a link to /dev/zero, which is a character device",
		},
		"link to a directory": {
			func(t *testing.T, h host) { must(t, os.Symlink("/", h.path)) }, ErrNoUpstream, "it is a link to /, which is a directory",
		},
		"link to an empty file": {func(t *testing.T, h host) {
			write(t, h.etc+"/empty", "")
			must(t, os.Symlink("empty", h.path))
		}, ErrNoUpstream, "empty, which it is a link to, names no server"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			tt.make(t, h)
			m := h.manager(t, nil)
			err := m.TakeOver(TakeOver{Nameservers: ask.Nameservers})
			if !errors.Is(err, tt.want) || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), h.path) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v, want one line that is %v and says %q", err, tt.want, tt.says)
			}
			if errors.Is(err, ErrNotFile) && errors.Is(err, ErrNoUpstream) {
				t.Errorf("%v, of what is no file", err)
			}
			h.clean(t)
			if _, err := os.Stat(h.state); err == nil {
				t.Error("state directory made by a refusal")
			}
		})
	}
}

// TestSuspend: the guardian of a daemon that hangs puts the original back and writes no record; the daemon, which knows
// nothing of that, takes over again, restores, or is followed by somebody who restores.
func TestSuspend(t *testing.T) {
	root(t)
	for _, oc := range originals {
		t.Run(oc.name, func(t *testing.T) {
			h := newFastHost(t)
			oc.make(t, h)
			before := identify(t, h.path)
			same := func(when string) {
				t.Helper()
				if d := before.diff(identify(t, h.path)); d != "" {
					t.Fatalf("%s (-want +got)\n%s", when, d)
				}
			}
			daemon := h.manager(t, nil)
			must(t, daemon.TakeOver(ask))
			for range 2 {
				journal, err := os.ReadFile(daemon.journal.Path())
				must(t, err)
				for range 2 { // a second one finds nothing to do
					_, err = h.manager(t, nil).Suspend()
					must(t, err)
					same("suspended")
				}
				now, err := os.ReadFile(daemon.journal.Path())
				must(t, err)
				if string(now) != string(journal) {
					t.Fatal("the journal was written")
				}
				must(t, daemon.TakeOver(ask))
				if now, err := daemon.State(); err != nil || now != StateOurs {
					t.Fatalf("taken over again, the file is %s %v", now, err)
				}
			}
			_, err := h.manager(t, nil).Suspend()
			must(t, err)
			_, err = daemon.Restore()
			must(t, err)
			same("restored by the daemon")
			h.clean(t)

			must(t, daemon.TakeOver(ask))
			_, err = h.manager(t, nil).Suspend()
			must(t, err)
			_, err = h.manager(t, nil).Restore()
			must(t, err)
			same("restored by somebody else")
			h.clean(t)
		})
	}
}
