//go:build linux

package host

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

func TestUndoSysctl(t *testing.T) {
	newNamespace(t)
	for _, name := range plan.LoopbackSysctls() {
		ours := sysctlChange{Old: "0", New: "1"}
		setSysctl(t, name, "1")
		line, err := undoSysctl(name, ours)
		if err != nil || !strings.Contains(line, name) || !strings.Contains(line, "0 again") {
			t.Errorf("undo of %s: %q, %v", name, line, err)
		}
		wantSysctl(t, name, "0")

		// A second time there is nothing to do, and nothing is said to have been done.
		if line, err := undoSysctl(name, ours); line != "" || err != nil {
			t.Errorf("undo of %s again: %q, %v", name, line, err)
		}
		wantSysctl(t, name, "0")

		// What it was set to since, by somebody else, stays.
		setSysctl(t, name, "1")
		if line, err := undoSysctl(name, sysctlChange{Old: "0", New: "2"}); line != "" || err != nil {
			t.Errorf("undo of another's %s: %q, %v", name, line, err)
		}
		wantSysctl(t, name, "1")
	}
	if line, err := undoSysctl("net.ipv4.conf.nowhere.route_localnet", sysctlChange{Old: "0", New: "1"}); err == nil || line != "" {
		t.Errorf("undo without the interface: %q, %v", line, err)
	}
}

// TestUndoAfterReboot: what was changed in a kernel that is gone is forgotten: the same is another's now.
func TestUndoAfterReboot(t *testing.T) {
	newNamespace(t)
	name := plan.LoopbackSysctls()[0]
	setSysctl(t, name, "1")
	if err := netdev.AddClsact(1); err != nil {
		t.Fatal(err)
	}
	c := config.Default()
	dir := t.TempDir()
	c.StateDir, c.RunDir, c.ResolvConf = dir+"/state", dir+"/run", dir+"/resolv.conf"
	if err := os.WriteFile(c.ResolvConf, []byte("nameserver 192.0.2.53\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	journal, err := state.Open(c.StateDir)
	if err == nil {
		err = errors.Join(journal.Begin(state.Header{BootID: "00000000-0000-4000-8000-000000000000", Network: netdev.Namespace()}),
			journal.Record(changeSysctl, name, sysctlChange{Old: "0", New: "1"}), journal.Record(changeQdisc, "1", qdiscChange{Ifindex: 1}))
	}
	if err != nil {
		t.Fatal(err)
	}
	if same, err := SameNetwork(journal); same || err != nil {
		t.Errorf("a kernel that is gone goes on: %v, %v", same, err)
	}
	done, err := Undo(c, journal, zap.NewNop())
	if err != nil || len(done) != 0 || !journal.Empty() {
		t.Errorf("%q, %v, changes %v", done, err, journal.Changes())
	}
	wantSysctl(t, name, "1")
	if has, err := netdev.HasClsact(1); err != nil || !has {
		t.Errorf("the qdisc of another is gone: %v, %v", has, err)
	}
}

// The journal's entry is what undo reads: through it, and a damaged one is named.
func TestUndoChange(t *testing.T) {
	newNamespace(t)
	name := plan.LoopbackSysctls()[0]
	setSysctl(t, name, "1")
	data, err := json.Marshal(sysctlChange{Old: "0", New: "1"})
	if err != nil {
		t.Fatal(err)
	}
	if line, err := undoChange(state.Change{Kind: changeSysctl, Name: name, Data: data}); err != nil || line == "" {
		t.Errorf("undoChange returned %q, %v", line, err)
	}
	wantSysctl(t, name, "0")
	for _, kind := range []string{changeSysctl, changeFilter} {
		_, err := undoChange(state.Change{Kind: kind, Name: name, Data: json.RawMessage("{")})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("damaged %s: %v", kind, err)
		}
	}
	if _, err := undoChange(state.Change{Kind: "moon", Name: "full"}); err == nil || !strings.Contains(err.Error(), "moon") {
		t.Errorf("unknown kind: %v", err)
	}
}

func setSysctl(t *testing.T, name, value string) {
	t.Helper()
	if err := netdev.SetSysctl(name, value); err != nil {
		t.Fatal(err)
	}
}

func wantSysctl(t *testing.T, name, want string) {
	t.Helper()
	got, err := netdev.Sysctl(name)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("sysctl %s is %s, want %s", name, got, want)
	}
}

// newNamespace gives the test a network namespace of its own: the thread that is in it ends with the test.
func newNamespace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" || os.Getenv("K2S_LAB_REQUIRED") != "" {
			t.Fatal("this run must not skip the kernel tests: run as root")
		}
		t.Skip("making a network namespace needs root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("unshare: %v", err)
	}
}

// TestMountedNamespace: a namespace without a process is there for as long as it is mounted anywhere.
func TestMountedNamespace(t *testing.T) {
	newNamespace(t)
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "blue")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("/proc/thread-self/ns/net", file, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(file, unix.MNT_DETACH) })
	mounted := netdev.Namespace()
	newNamespace(t)
	if got := netdev.FindNamespace(mounted); got != file {
		t.Errorf("%s is at %q, want %q", mounted, got, file)
	}
}

// TestSameNetwork: what was done in another namespace can't be undone here, unless that one is gone.
func TestSameNetwork(t *testing.T) {
	newNamespace(t)
	other := make(chan string)
	end := make(chan struct{})
	var apart sync.WaitGroup
	apart.Go(func() { // on a thread of its own, which ends with it
		newNamespace(t)
		other <- netdev.Namespace()
		<-end
	})
	living := <-other
	here := netdev.Namespace()
	for then, want := range map[string]struct {
		same bool
		err  error
	}{
		"": {true, nil}, here: {true, nil}, living: {false, ErrOtherNetwork}, "net:[1] 7": {false, nil},
		// The number of a namespace that is gone was given to this one.
		strings.Fields(here)[0] + " 1": {false, nil},
	} {
		journal := state.Unrecorded()
		if err := journal.Begin(state.Header{Network: then}); err != nil {
			t.Fatal(err)
		}
		if same, err := SameNetwork(journal); same != want.same || !errors.Is(err, want.err) {
			t.Errorf("made in %q, here is %q: %v, %v", then, here, same, err)
		}
	}
	close(end)
	apart.Wait()
}
