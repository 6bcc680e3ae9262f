package state

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs/faultfs"
)

// hasBootID: the system tells boots apart. Wine shows a Windows program the files of Linux.
var hasBootID = func() bool {
	_, err := os.Stat("/proc/sys/kernel/random/boot_id")
	return err == nil
}()

func mustOpen(t *testing.T, dir string) *Journal {
	t.Helper()
	j, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func names(j *Journal) []string {
	out := []string{}
	for _, c := range j.Changes() {
		out = append(out, c.Kind+"/"+c.Name)
	}
	return out
}

func TestJournalOpenWritesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	j := mustOpen(t, dir)
	if !j.Empty() || j.Recovered() != nil {
		t.Fatal("a missing journal must be empty and whole")
	}
	must(t, j.Forget("sysctl", "nothing"))
	must(t, j.Clear())
	if _, err := os.Stat(filepath.Dir(dir)); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("directory was made without a record: %v", err)
	}
}

func TestJournalRebooted(t *testing.T) {
	for bootID, want := range map[string]bool{"": false, "00000000-0000-4000-8000-000000000000": hasBootID} {
		j := mustOpen(t, t.TempDir())
		if j.Rebooted() {
			t.Error("an empty journal tells of a reboot")
		}
		must(t, j.Begin(Header{BootID: bootID}))
		if got := j.Rebooted(); got != want {
			t.Errorf("written in boot %q: rebooted is %v", bootID, got)
		}
	}
}

func TestJournalRoundTrip(t *testing.T) {
	narrowUmask(t)
	dir := filepath.Join(t.TempDir(), "a", "b")
	j := mustOpen(t, dir)
	must(t, j.Begin(Header{Version: "1.2", Params: json.RawMessage(`{"zone":"<cluster.local>"}`)}))
	must(t, j.Record("sysctl", "accept_local", "0"))
	must(t, j.Record("resolv.conf", "/etc/resolv.conf", map[string]int{"mode": 7}))
	must(t, j.Record("sysctl", "accept_local", "1")) // Must not replace the oldest.
	must(t, j.Replace("resolv.conf", "/etc/resolv.conf", map[string]int{"mode": 8}))
	var data map[string]int
	if ok, err := mustOpen(t, dir).Lookup("resolv.conf", "/etc/resolv.conf", &data); !ok || err != nil || data["mode"] != 8 {
		t.Errorf("not replaced: %v, %v, %v", ok, err, data)
	}
	must(t, j.Replace("resolv.conf", "/etc/resolv.conf", map[string]int{"mode": 7}))

	info, err := os.Stat(dir)
	must(t, err)
	if hasModes && info.Mode().Perm() != 0o755 {
		t.Errorf("directory has mode %v, want 0755 whatever the umask", info.Mode())
	}
	k := mustOpen(t, dir)
	if diff := cmp.Diff(j.Header(), k.Header()); diff != "" {
		t.Error(diff)
	}
	if h := k.Header(); h.AttachID == "" || h.BootID == "" && hasBootID || h.Since.IsZero() {
		t.Errorf("header isn't filled in: %+v", h)
	}
	if diff := cmp.Diff(j.Changes(), k.Changes()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"sysctl/accept_local", "resolv.conf//etc/resolv.conf"}, names(k)); diff != "" {
		t.Error(diff)
	}
	var before string
	if ok, err := k.Lookup("sysctl", "accept_local", &before); !ok || err != nil || before != "0" {
		t.Errorf("Lookup: %v, %v, %q; the first record must stay", ok, err, before)
	}
	if ok, _ := k.Lookup("sysctl", "other", nil); ok {
		t.Error("Lookup found what was never recorded")
	}
	must(t, k.Forget("sysctl", "accept_local"))
	must(t, k.Begin(Header{AttachID: "second"}))
	if got := mustOpen(t, dir); got.Empty() || got.Header().AttachID != "second" {
		t.Error("Begin must keep the changes and replace the header")
	}
	must(t, k.Clear())
	must(t, k.Clear())
	left, err := os.ReadDir(dir)
	must(t, err)
	if len(left) > 0 || !k.Empty() {
		t.Errorf("left after Clear: %v", left)
	}
}

func TestJournalDamage(t *testing.T) {
	damage := map[string]func(string) error{
		"torn":      func(p string) error { return os.Truncate(p, 100) },
		"empty":     func(p string) error { return os.Truncate(p, 0) },
		"gone":      os.Remove,
		"bit flip":  func(p string) error { return edit(p, `"name": "two"`, `"name": "twp"`) },
		"other sum": func(p string) error { return edit(p, `"sha256": "`, `"sha256": "0`) },
		"format":    func(p string) error { return edit(p, `"format": 1`, `"format": 0`) },
	}
	for name, hurt := range damage {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			j := mustOpen(t, dir)
			must(t, j.Record("k", "one", 1))
			must(t, j.Record("k", "two", 2))
			must(t, hurt(j.Path()))

			k, err := Open(dir)
			if err != nil {
				t.Fatalf("the generation before is whole: %v", err)
			}
			if k.Recovered() == nil || !slices.Equal(names(k), []string{"k/one"}) {
				t.Fatalf("recovered %v with %v", k.Recovered(), names(k))
			}
			// The next write must not lose it again.
			must(t, k.Record("k", "three", 3))
			if got := mustOpen(t, dir); !slices.Equal(names(got), []string{"k/one", "k/three"}) || got.Recovered() != nil {
				t.Fatalf("after the next write: %v, %v", names(got), got.Recovered())
			}

			must(t, os.WriteFile(j.Path()+prevSuffix, []byte("{"), 0o600))
			must(t, os.WriteFile(j.Path(), []byte("{"), 0o600))
			if _, err := Open(dir); !errors.Is(err, ErrCorrupt) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("both damaged: %v, want one line that is ErrCorrupt", err)
			}
			if _, err := SetAside(dir); err != nil {
				t.Fatal(err)
			}
			if !mustOpen(t, dir).Empty() {
				t.Error("set aside, the journal must be empty")
			}
		})
	}
}

// TestJournalOfLaterVersion: it is no damage, and nobody who does not know the format touches it.
func TestJournalOfLaterVersion(t *testing.T) {
	for name, change := range map[string]func(path string) error{
		"both":      func(p string) error { return errors.Join(later(p), later(p+prevSuffix)) },
		"newest":    later,
		"before it": func(p string) error { return errors.Join(later(p+prevSuffix), os.Remove(p)) },
		"a damaged one behind it": func(p string) error {
			return errors.Join(later(p+prevSuffix), os.WriteFile(p, []byte("{"), 0o600))
		},
		"unlike ours": func(p string) error { return os.WriteFile(p, []byte(`{"format": 3, "body": ["x"]}`), 0o600) },
	} {
		dir := t.TempDir()
		j := mustOpen(t, dir)
		must(t, j.Begin(Header{Version: "v9"}))
		must(t, j.Record("k", "one", 1))
		must(t, j.Record("k", "two", 2))
		must(t, change(j.Path()))
		before := readAll(t, dir)
		_, err := Open(dir)
		if !errors.Is(err, ErrNewer) || errors.Is(err, ErrCorrupt) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want one line that is ErrNewer", name, err)
		}
		if name == "newest" && !strings.Contains(err.Error(), `("v9"): format 2, this version knows 1`) {
			t.Errorf("it does not say which: %v", err)
		}
		if diff := cmp.Diff(before, readAll(t, dir)); diff != "" {
			t.Errorf("%s: it was changed: %s", name, diff)
		}
	}
}

func later(path string) error { return edit(path, `"format": 1`, `"format": 2`) }

func readAll(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, entry := range entries {
		content, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		must(t, err)
		all[entry.Name()] = string(content)
	}
	return all
}

// TestUnrecorded: it works as a journal does, and no file knows.
func TestUnrecorded(t *testing.T) {
	j := Unrecorded()
	must(t, j.Begin(Header{}))
	must(t, j.Record("k", "one", 1))
	must(t, j.Record("k", "two", 2))
	must(t, j.Forget("k", "one"))
	if !slices.Equal(names(j), []string{"k/two"}) || j.Rebooted() {
		t.Errorf("changes %v, rebooted %v", names(j), j.Rebooted())
	}
	must(t, j.Clear())
	if !j.Empty() {
		t.Error("not empty after Clear")
	}
}

func edit(path, old, new string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if !strings.Contains(string(data), old) {
		return fmt.Errorf("%s doesn't contain %s", path, old)
	}
	return os.WriteFile(path, []byte(strings.Replace(string(data), old, new, 1)), 0o600)
}

// TestJournalReformatted: white space that an operator's tool changed is no damage.
func TestJournalReformatted(t *testing.T) {
	j := mustOpen(t, t.TempDir())
	must(t, j.Record("k", "one", "<&>"))
	raw, err := os.ReadFile(j.Path())
	must(t, err)
	var any map[string]json.RawMessage
	must(t, json.Unmarshal(raw, &any))
	flat, err := json.Marshal(any)
	must(t, err)
	must(t, os.WriteFile(j.Path(), flat, 0o600))
	if k := mustOpen(t, filepath.Dir(j.Path())); k.Recovered() != nil || k.Empty() {
		t.Errorf("recovered: %v", k.Recovered())
	}
}

// TestJournalFaults fails, or kills at, every call of a series of writes. The
// journal must stay readable and hold all that was reported as recorded, and
// nothing that was reported as forgotten.
func TestJournalFaults(t *testing.T) {
	series := []struct {
		do   func(*Journal) error
		want []string // after it
	}{
		{func(j *Journal) error { return j.Begin(Header{AttachID: "x"}) }, []string{}},
		{func(j *Journal) error { return j.Record("k", "one", 1) }, []string{"k/one"}},
		{func(j *Journal) error { return j.Record("k", "two", 2) }, []string{"k/one", "k/two"}},
		{func(j *Journal) error { return j.Forget("k", "one") }, []string{"k/two"}},
		{func(j *Journal) error { return j.Clear() }, []string{}},
	}
	points := 0
	for _, mode := range []faultfs.Mode{faultfs.Once, faultfs.After, faultfs.Forever, faultfs.Short, faultfs.KillBefore, faultfs.KillAfter} {
		for at := 1; ; at++ {
			dir := filepath.Join(t.TempDir(), "state")
			ffs := &faultfs.FS{Under: hostfs.OS(), Mode: mode, At: at, Err: syscall.EIO, NoSync: true}
			done, err := 0, error(nil)
			func() {
				defer func() {
					if r := recover(); r != nil {
						if _, ok := r.(faultfs.Killed); !ok {
							panic(r)
						}
					}
				}()
				var j *Journal
				if j, err = OpenFS(ffs, dir); err != nil {
					return
				}
				for _, s := range series {
					if err = s.do(j); err != nil {
						break
					}
					done++
				}
			}()
			if at > len(ffs.Calls()) {
				break
			}
			points++
			for name := range ffs.Dirty() {
				if filepath.Base(name) == FileName || filepath.Base(name) == FileName+prevSuffix {
					if ffs.Dirty()[name] {
						t.Fatalf("%v at %d: %s is under its name and not synced", mode, at, name)
					}
				}
			}
			got, oerr := Open(dir)
			if oerr != nil {
				t.Fatalf("%v at %d (%s): %v", mode, at, ffs.Calls()[at-1], oerr)
			}
			want := []string{}
			if done > 0 {
				want = series[done-1].want
			}
			next := want
			if done < len(series) {
				next = series[done].want
			}
			if n := names(got); !slices.Equal(n, want) && !slices.Equal(n, next) {
				t.Fatalf("%v at %d (%s): journal has %v, want %v or %v", mode, at, ffs.Calls()[at-1], n, want, next)
			}
		}
	}
	t.Logf("journal: %d points covered", points)
}

func TestJournalConcurrent(t *testing.T) {
	dir := t.TempDir()
	j := mustOpen(t, dir)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if err := j.Record("k", fmt.Sprint(i), i); err != nil {
				t.Error(err)
			}
			_ = j.Changes()
			_ = j.Header()
			_ = j.Empty()
		})
	}
	wg.Wait()
	if n := len(mustOpen(t, dir).Changes()); n != 8 {
		t.Errorf("%d changes, want 8", n)
	}
}

// TestLockRemoved: who waits for a lock whose file its holder removes gets one on the file that is there then.
func TestLockRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := TryLock(path)
	must(t, err)
	if pid, held := Holder(path); !held || pid != os.Getpid() {
		t.Errorf("held by %d: %v", pid, held)
	}
	must(t, first.Remove())
	if pid, held := Holder(path); held {
		t.Errorf("removed, and held by %d", pid)
	}
	second, err := TryLock(path)
	must(t, err)
	if pid, held := Holder(path); !held || pid != os.Getpid() {
		t.Errorf("held by %d: %v", pid, held)
	}
	must(t, second.Unlock())
	if _, held := Holder(path); held {
		t.Error("unlocked, and held")
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "lock")
	l, err := TryLock(path)
	must(t, err)
	_, err = TryLock(path)
	if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Fatalf("second lock: %v, want ErrLocked that names the process", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Millisecond)
	defer cancel()
	if _, err := Lock(ctx, path); !errors.Is(err, ErrLocked) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Lock: %v, want ErrLocked and the deadline", err)
	}
	time.AfterFunc(50*time.Millisecond, func() { _ = l.Unlock() })
	l2, err := Lock(t.Context(), path)
	must(t, err)
	must(t, l2.Unlock())
	must(t, l2.Unlock())
}

func TestWriteFile(t *testing.T) {
	narrowUmask(t)
	path := filepath.Join(t.TempDir(), "f")
	must(t, WriteFile(path, []byte("one"), 0o644))
	must(t, os.WriteFile(hostfs.TempName(path), []byte("of a crash"), 0o600))
	must(t, WriteFile(path, []byte("two"), 0o644))
	data, err := os.ReadFile(path)
	must(t, err)
	info, err := os.Stat(path)
	must(t, err)
	if string(data) != "two" || hasModes && info.Mode().Perm() != 0o644 {
		t.Errorf("%q, %v", data, info.Mode())
	}
	if _, err := os.Lstat(hostfs.TempName(path)); !errors.Is(err, fs.ErrNotExist) {
		t.Error("temporary file left")
	}
}
