package resolvconf

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/sample"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs/faultfs"
)

// faultOriginals are the kinds of original that take different ways.
func faultOriginals() []originalCase {
	return slices.DeleteFunc(slices.Clone(originals), func(c originalCase) bool {
		switch c.name {
		case "1 regular", "2 resolved stub, relative", "5 dangling", "6 missing", "9 attributes":
			return false
		}
		return true
	})
}

var faultModes = []faultfs.Mode{faultfs.Once, faultfs.After, faultfs.Forever, faultfs.Short, faultfs.KillBefore, faultfs.KillAfter}

// errno of the failing call: a read-only disk for the rest of the time, a full
// one for a short write, else what a bad disk or a security module gives.
func errnos(mode faultfs.Mode) []error {
	switch mode {
	case faultfs.Forever:
		return []error{syscall.EROFS}
	case faultfs.Short:
		return []error{syscall.ENOSPC}
	case faultfs.After:
		return []error{syscall.EIO}
	case faultfs.KillBefore, faultfs.KillAfter:
		return []error{nil}
	}
	return []error{syscall.EIO, syscall.EPERM, syscall.EBUSY, syscall.EINVAL}
}

// operation is one that is cut short or failed everywhere.
type operation struct {
	name  string
	ready func(t testing.TB, h host) // before it
	do    func(m *Manager) error
	// rebuilt: the original can only be made anew.
	rebuilt bool
	// foreign: somebody's file was in place. Cut short, it may be that still,
	// with the original parked.
	foreign bool
	// missing: there was no file before it.
	missing bool
}

// prepare brings the host to where the operation begins, and returns what a
// restore must leave after it.
func (o operation) prepare(t testing.TB, h host) identity {
	t.Helper()
	want := identify(t, h.path)
	if o.ready != nil {
		o.ready(t, h)
	}
	switch {
	case o.rebuilt:
		return want.rebuilt()
	case o.foreign:
		return identify(t, h.path)
	}
	return want
}

// tidy is what is left to do after a restore that left a foreign file alone.
func (o operation) tidy(t testing.TB, h host) {
	t.Helper()
	if o.foreign {
		must(t, h.manager(t, nil).TakeOver(askAll))
		_, err := h.manager(t, nil).Restore()
		must(t, err)
	}
}

// intrude puts somebody else's file in place.
func intrude(t testing.TB, h host) {
	t.Helper()
	write(t, h.etc+"/x", "# theirs\nnameserver 203.0.113.9\n")
	must(t, os.Rename(h.etc+"/x", h.path))
}

var operations = []operation{
	{name: "takeover", do: func(m *Manager) error { return m.TakeOver(askAll) }},
	{name: "converge", ready: func(t testing.TB, h host) { must(t, h.manager(t, nil).TakeOver(askAll)) },
		do: func(m *Manager) error {
			return m.TakeOver(TakeOver{Nameservers: addrs("::1"), UpstreamsGiven: true})
		}},
	{name: "retake", foreign: true, ready: func(t testing.TB, h host) {
		must(t, h.manager(t, nil).TakeOver(askAll))
		intrude(t, h)
	}, do: func(m *Manager) error { return m.TakeOver(askAll) }},
	{name: "put back", missing: true, ready: func(t testing.TB, h host) {
		must(t, h.manager(t, nil).TakeOver(askAll))
		must(t, os.Remove(h.path))
	}, do: func(m *Manager) error { return m.PutBack(askAll) }},
	{name: "revert", foreign: true, rebuilt: true, ready: func(t testing.TB, h host) {
		must(t, h.manager(t, nil).TakeOver(askAll))
		saved := readFile(t, h.path)
		intrude(t, h)
		must(t, h.manager(t, nil).TakeOver(askAll))
		write(t, h.path, saved)
	}, do: func(m *Manager) error { return m.TakeOver(askAll) }},
	{name: "restore", ready: func(t testing.TB, h host) { must(t, h.manager(t, nil).TakeOver(askAll)) },
		do: func(m *Manager) error { _, err := m.Restore(); return err }},
	{name: "suspend", ready: func(t testing.TB, h host) { must(t, h.manager(t, nil).TakeOver(askAll)) },
		do: func(m *Manager) error { _, err := m.Suspend(); return err }},
	{name: "rebuild", rebuilt: true, ready: func(t testing.TB, h host) {
		must(t, h.manager(t, nil).TakeOver(askAll))
		must(t, hostfs.RemoveIfExists(hostfs.OS(), h.etc+"/"+ParkedName))
	}, do: func(m *Manager) error { _, err := m.Restore(); return err }},
}

// steps says which of many cases a test takes, see package sample.
type steps func(testing.TB) (next func() int)

func some(tb testing.TB) func() int {
	tb.Helper()
	return sample.Some(tb, 30)
}

// TestFaults is TestLongRunFaults with some of the calls.
func TestFaults(t *testing.T) { faults(t, some) }

// TestLongRunFaults lets every single call fail, fail for good, or be the last of a
// killed process, in every operation on every kind of original by every
// method. After each: the file is the original or ours, never missing or torn
// (but if it was missing before); an error that was reported left nothing
// behind; and a new process restores all.
func TestLongRunFaults(t *testing.T) { faults(t, sample.Steps) }

func faults(t *testing.T, steps steps) {
	t.Helper()
	root(t)
	allFaults(t, steps, append(faultOriginals(), locked), operations) // TestPowerLoss copies files, and no copy has the attribute
}

// TestFaultsInPlace is TestLongRunFaultsInPlace with some of the calls.
func TestFaultsInPlace(t *testing.T) { faultsInPlace(t, some) }

// TestLongRunFaultsInPlace is TestLongRunFaults of a file that can only be overwritten.
func TestLongRunFaultsInPlace(t *testing.T) { faultsInPlace(t, sample.Steps) }

func faultsInPlace(t *testing.T, steps steps) {
	t.Helper()
	if !inMountNamespace(t) {
		return
	}
	// Nobody can rename a file to a mount point, or remove it.
	possible := slices.DeleteFunc(slices.Clone(operations), func(o operation) bool { return o.foreign || o.missing })
	allFaults(t, steps, []originalCase{mounted, mountedLong}, possible)
}

func allFaults(t *testing.T, steps steps, list []originalCase, operations []operation) {
	t.Helper()
	points, kills := 0, 0
	for _, oc := range list {
		for _, way := range methods {
			if way.name != "exchange" && oc.name != "1 regular" && oc.wantType != TypeDangling && oc.wantType != TypeMissing {
				continue // The fallbacks treat a file and a link with a target alike.
			}
			for _, op := range operations {
				t.Run(oc.name+"/"+way.name+"/"+op.name, func(t *testing.T) {
					next := steps(t)
					for _, mode := range faultModes {
						for _, errno := range errnos(mode) {
							for at := next(); ; at += next() {
								f := fault{oc, op, mode, at, errno, way.unsupported}
								more, killed := f.run(t)
								if !more {
									break
								}
								points++
								if killed {
									kills++
								}
								if t.Failed() {
									t.FailNow()
								}
							}
						}
					}
				})
			}
		}
	}
	t.Logf("resolver file: %d points covered, %d of them kills", points, kills)
}

type fault struct {
	oc          originalCase
	op          operation
	mode        faultfs.Mode
	at          int
	errno       error
	unsupported map[string]error
}

// run covers one point; more is false when there are no further calls.
func (f fault) run(t *testing.T) (more, killed bool) {
	h := newFastHost(t)
	defer h.discard()
	f.oc.make(t, h)
	before := f.op.prepare(t, h)
	inode := before.Ino
	if f.unsupported["link"] != nil {
		before = before.rebuilt()
	}
	ffs := &faultfs.FS{Under: hostfs.OS(), Mode: f.mode, At: f.at, Err: f.errno, Unsupported: f.unsupported, NoSync: true}
	var err error
	killed = kill(func() {
		var m *Manager
		if m, err = h.open(ffs); err == nil {
			err = f.op.do(m)
		}
	})
	calls := ffs.Calls()
	if f.at > len(calls) {
		if err != nil {
			t.Fatalf("without a fault: %v", err)
		}
		return false, false
	}
	where := fmt.Sprintf("%v at call %d (%s) with %v: error %v", f.mode, f.at, calls[f.at-1], f.errno, err)
	for name, dirty := range ffs.Dirty() {
		if base := filepath.Base(name); dirty && (base == "resolv.conf" || base == "journal.json") {
			t.Errorf("%s\n%s is in place and not synced", where, base)
		}
	}
	if f.op.rebuilt && strings.HasPrefix(calls[f.at-1], "setxattr ") && (errors.Is(f.errno, syscall.EPERM) || errors.Is(f.errno, syscall.EINVAL)) {
		return true, killed // An attribute that is refused is listed as inexact instead.
	}
	// Never missing, never torn.
	now := identify(t, h.path)
	plain := now
	plain.Flags = before.Flags // they are set again last
	whole := now.Exists && sealed([]byte(now.Content)) || before.rebuilt().diff(plain.rebuilt()) == ""
	// One that is overwritten may be both.
	if !whole && (now.Exists || !f.op.missing) && !stat(t, h.path).MountRoot {
		t.Errorf("%s\nneither ours nor the original: %+v", where, now)
	}
	switch {
	case killed:
	case err != nil && strings.Contains(err.Error(), "\n") && f.mode != faultfs.Forever && f.mode != faultfs.After:
		t.Errorf("%s\nmore than one line", where)
	case err != nil && f.op.name == "takeover" && f.mode == faultfs.Once:
		// Where a fallback fails too, its cause counts.
		if !errors.Is(err, f.errno) && !errors.Is(f.errno, syscall.EINVAL) {
			t.Errorf("%s\nthe cause is not in it", where)
		}
		if d := before.diff(now); d != "" {
			t.Errorf("%s\nnot undone (-want +got)\n%s", where, d)
		}
		h.clean(t)
	case err == nil && f.op.name == "takeover" && !sealed([]byte(now.Content)):
		t.Errorf("%s\nsucceeded, but it isn't ours", where)
	case err == nil && (f.op.name == "restore" || f.op.name == "suspend" || f.op.name == "rebuild"):
		if d := before.diff(now); d != "" {
			t.Errorf("%s\nsucceeded, but (-want +got)\n%s", where, d)
		}
	}
	// A new process, on a healthy file system.
	m, oerr := h.open(&faultfs.FS{Under: hostfs.OS(), NoSync: true})
	if oerr != nil {
		t.Fatalf("%s\nopen: %v", where, oerr)
	}
	if _, rerr := m.Restore(); rerr != nil {
		t.Fatalf("%s\nrestore: %v", where, rerr)
	}
	got := identify(t, h.path)
	if got.Ino != inode {
		// Only a real failure of the swap may cost the object.
		if f.mode == faultfs.KillBefore || f.mode == faultfs.KillAfter {
			if d := before.diff(got); d != "" {
				t.Errorf("%s\nafter restore (-want +got)\n%s", where, d)
			}
		}
	}
	if d := before.rebuilt().diff(got.rebuilt()); d != "" {
		t.Errorf("%s\nafter restore (-want +got)\n%s", where, d)
	}
	f.op.tidy(t, h)
	h.clean(t)
	return true, killed
}

// newFastHost is newHost on tmpfs where there is one: thousands of fsyncs on a
// disk take minutes and prove nothing more.
func newFastHost(t testing.TB) host {
	base := "/dev/shm"
	if hostfs.OS().Access(base) != nil {
		base = ""
	}
	dir, err := os.MkdirTemp(base, "k2s-dnsbpf-test-") //nolint:usetesting // t.TempDir can't be told where
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	h := hostAt(filepath.Join(dir, "host"))
	for _, d := range []string{h.etc, h.root + "/run/systemd/resolve", h.root + "/run/NetworkManager", h.root + "/var/lib"} {
		must(t, os.MkdirAll(d, 0o755))
	}
	return h
}

// TestKillAtSteps is TestLongRunKillAtSteps with some of the steps.
func TestKillAtSteps(t *testing.T) { killAtSteps(t, some) }

// TestLongRunKillAtSteps walks the named steps and checks that each is there.
func TestLongRunKillAtSteps(t *testing.T) { killAtSteps(t, sample.Steps) }

func killAtSteps(t *testing.T, steps steps) {
	t.Helper()
	root(t)
	next := steps(t)
	want := map[string][]string{
		"takeover": {"classify", "record", "write", "exchange", "confirm"},
		"converge": {"classify", "record", "write", "exchange", "confirm"},
		"retake":   {"classify", "judge", "forget", "record", "write", "exchange", "confirm"},
		"put back": {"classify", "record", "write", "exchange", "confirm"},
		"revert":   {"classify", "judge", "put back", "verify", "forget", "record", "write", "exchange", "confirm"},
		"restore":  {"judge", "put back", "verify", "forget"},
		"suspend":  {"judge", "put back", "verify"},
		"rebuild":  {"judge", "put back", "verify", "forget"},
	}
	points, skip := 0, next()
	for _, oc := range originals {
		for _, op := range operations {
			for _, step := range want[op.name] {
				for _, when := range []string{"before", "after"} {
					if skip--; skip > 0 {
						continue
					}
					skip = next()
					h := newFastHost(t)
					oc.make(t, h)
					before := op.prepare(t, h)
					m := h.manager(t, nil)
					m.hook = func(point string) {
						if point == step+" "+when {
							panic(faultfs.Killed{Call: point})
						}
					}
					if !kill(func() { _ = op.do(m) }) {
						t.Fatalf("%s: %s never gets to %s %s", oc.name, op.name, step, when)
					}
					points++
					_, err := h.manager(t, nil).Restore()
					must(t, err)
					if d := before.diff(identify(t, h.path)); d != "" {
						t.Errorf("%s: %s killed %s %s (-want +got)\n%s", oc.name, op.name, when, step, d)
					}
					op.tidy(t, h)
					h.clean(t)
				}
			}
		}
	}
	t.Logf("named steps: %d points covered", points)
}

// TestPowerLoss is TestLongRunPowerLoss with some of the calls.
func TestPowerLoss(t *testing.T) { powerLoss(t, some) }

// TestLongRunPowerLoss copies the tree before every call, empties in the copy what was
// not synced yet, and restores from the copy. Inodes and dates of creation are
// other ones there, as after a restore of a backup.
func TestLongRunPowerLoss(t *testing.T) { powerLoss(t, sample.Steps) }

func powerLoss(t *testing.T, steps steps) {
	t.Helper()
	root(t)
	points := 0
	for _, oc := range faultOriginals() {
		for _, op := range operations {
			t.Run(oc.name+"/"+op.name, func(t *testing.T) {
				h := newFastHost(t)
				oc.make(t, h)
				before := op.prepare(t, h).rebuilt()
				snaps := filepath.Dir(h.root)
				var dirs []string
				var calls []string
				next := steps(t)
				skip := next()
				ffs := &faultfs.FS{Under: hostfs.OS(), NoSync: true}
				snap := func(call int, op, name string) {
					if skip--; skip > 0 {
						return
					}
					skip = next()
					dir := filepath.Join(snaps, fmt.Sprint(call))
					if out, err := exec.Command("cp", "-a", h.root, dir).CombinedOutput(); err != nil {
						t.Fatalf("cp: %v: %s", err, out)
					}
					for path, dirty := range ffs.Dirty() {
						rel, err := filepath.Rel(h.root, path)
						must(t, err)
						if dirty {
							must(t, os.Truncate(filepath.Join(dir, rel), 0))
						}
					}
					dirs, calls = append(dirs, dir), append(calls, op+" "+filepath.Base(name))
				}
				m := h.manager(t, ffs)
				ffs.Before = func(call int, op, name string) {
					if op == "lstat" || op == "read" || op == "readlink" || op == "close" || op == "access" || op == "xattrs" || op == "flags" {
						return // Nothing has changed since the last one that counts.
					}
					snap(call, op, name)
				}
				must(t, op.do(m))
				snap(len(ffs.Calls())+1, "end", "")
				for i, dir := range dirs {
					must(t, os.Rename(h.root, filepath.Join(snaps, "used"+fmt.Sprint(i))))
					must(t, os.Rename(dir, h.root))
					now := identify(t, h.path).rebuilt()
					if before.diff(now) != "" && !sealed([]byte(now.Content)) && (now.Exists || !op.missing) {
						t.Errorf("before %s: neither original nor ours: %+v", calls[i], now)
					}
					m, err := h.open(nil)
					if err != nil {
						t.Fatalf("before %s: %v", calls[i], err)
					}
					if _, err := m.Restore(); err != nil {
						t.Fatalf("before %s: %v", calls[i], err)
					}
					if d := before.diff(identify(t, h.path).rebuilt()); d != "" {
						t.Errorf("before %s (-want +got)\n%s", calls[i], d)
					}
					op.tidy(t, h)
					h.clean(t)
					points++
				}
			})
		}
	}
	t.Logf("power loss: %d points covered", points)
}
