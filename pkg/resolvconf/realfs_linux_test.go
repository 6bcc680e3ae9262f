package resolvconf

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

// inMountNamespace runs the calling test once more, in a process with mounts
// of its own, and returns true there.
func inMountNamespace(t *testing.T) bool {
	t.Helper()
	root(t)
	const env = "K2S_DNSBPF_TEST_MOUNTS"
	if os.Getenv(env) == t.Name() {
		return true
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), env+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	} else if !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Skipf("in the mount namespace:\n%s", out)
	}
	return false
}

func tmpfs(t *testing.T, dir, options string) {
	t.Helper()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, options))
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

// refusedForeseen: Inspect and TakeOver agree, and nothing was written.
func refusedForeseen(t *testing.T, h host, want error, parts ...string) {
	t.Helper()
	before := identify(t, h.path)
	m := h.manager(t, nil)
	ins, err := m.Inspect()
	must(t, err)
	err = m.TakeOver(ask)
	for _, err := range []error{ins.Refused(), err} {
		if !errors.Is(err, want) || strings.Contains(err.Error(), "\n") {
			t.Fatalf("%v, want one line that is %v", err, want)
		}
		for _, p := range parts {
			if !strings.Contains(err.Error(), p) {
				t.Errorf("%v, want %q in it", err, p)
			}
		}
	}
	out, err := m.Restore()
	if err != nil || out.Result != NothingToDo {
		t.Errorf("restore after a refusal: %+v, %v", out, err)
	}
	if d := before.diff(identify(t, h.path)); d != "" {
		t.Error(d)
	}
	h.clean(t)
	if _, err := os.Stat(h.state); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the state directory was made")
	}
}

func TestBindMount(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	h := newHost(t)
	write(t, h.path, two)
	source := h.root + "/run/container-resolv.conf"
	write(t, source, "nameserver 192.0.2.3\n")
	must(t, unix.Mount(source, h.path, "", unix.MS_BIND, ""))
	defer func() { _ = unix.Unmount(h.path, unix.MNT_DETACH) }()
	ins, err := h.manager(t, nil).Inspect()
	must(t, err)
	if ins.Type != TypeBindMount || ins.Owner != OwnerContainer {
		t.Errorf("%q of %q", ins.Type, ins.Owner)
	}
	refusedForeseen(t, h, ErrBindMount, "container-resolv.conf", "unmount")
}

func TestBindMountRacedIn(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	h := newHost(t)
	write(t, h.path, two)
	before := identify(t, h.path)
	m := h.manager(t, nil)
	m.hook = func(point string) {
		if point == "exchange before" {
			must(t, unix.Mount("/dev/null", h.path, "", unix.MS_BIND, ""))
		}
	}
	if err := m.TakeOver(ask); !errors.Is(err, ErrBindMount) {
		t.Errorf("%v, want ErrBindMount", err)
	}
	must(t, unix.Unmount(h.path, unix.MNT_DETACH))
	m.hook = nil
	_, err := h.manager(t, nil).Restore()
	must(t, err)
	if d := before.diff(identify(t, h.path)); d != "" {
		t.Error(d)
	}
	h.clean(t)
}

func TestReadOnly(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	h := newHost(t)
	tmpfs(t, h.etc, "size=1m")
	write(t, h.path, two)
	before := identify(t, h.path)
	remount := func(flags uintptr) { must(t, unix.Mount("", h.etc, "", unix.MS_REMOUNT|flags, "")) }
	remount(unix.MS_RDONLY)
	refusedForeseen(t, h, ErrReadOnly, h.etc)
	remount(0)

	// Read-only while attached: nothing is lost, and it says why.
	must(t, h.manager(t, nil).TakeOver(ask))
	remount(unix.MS_RDONLY)
	if _, err := h.manager(t, nil).Restore(); !errors.Is(err, ErrReadOnly) {
		t.Errorf("%v, want ErrReadOnly", err)
	}
	remount(0)
	_, err := h.manager(t, nil).Restore()
	must(t, err)
	if d := before.diff(identify(t, h.path)); d != "" {
		t.Error(d)
	}
	h.clean(t)
}

func TestFullDisk(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	fill := func(dir string) {
		f, err := os.Create(dir + "/fill")
		must(t, err)
		for err == nil {
			_, err = f.Write(make([]byte, 4096))
		}
		must(t, f.Close())
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
	}
	for _, which := range []string{"etc", "state"} {
		h := newHost(t)
		dir := map[string]string{"etc": h.etc, "state": h.root + "/var/lib"}[which]
		tmpfs(t, dir, "size=64k")
		write(t, h.path, two)
		before := identify(t, h.path)
		fill(dir)
		if err := h.manager(t, nil).TakeOver(ask); !errors.Is(err, ErrNoSpace) || strings.Contains(err.Error(), "\n") {
			t.Errorf("full %s: %v, want ErrNoSpace", which, err)
		}
		if d := before.diff(identify(t, h.path)); d != "" {
			t.Error(d)
		}
		h.clean(t)

		// Full when it is time to restore: the swap needs no space.
		must(t, os.Remove(dir+"/fill"))
		must(t, h.manager(t, nil).TakeOver(ask))
		fill(dir)
		_, err := h.manager(t, nil).Restore()
		if d := before.diff(identify(t, h.path)); d != "" {
			t.Errorf("full %s: %v\n%s", which, err, d)
		}
		must(t, os.Remove(dir+"/fill"))
		_, err = h.manager(t, nil).Restore()
		must(t, err)
		h.clean(t)
	}
}

func TestAttributes(t *testing.T) {
	root(t)
	osfs := hostfs.OS()
	for flag, bit := range map[string]uint32{"i": hostfs.FlagImmutable, "a": hostfs.FlagAppend} {
		for _, what := range []string{"file", "directory"} {
			t.Run("+"+flag+" "+what, func(t *testing.T) {
				h := newHost(t)
				write(t, h.path, two)
				name := map[string]string{"file": h.path, "directory": h.etc}[what]
				flags, err := osfs.Flags(name)
				must(t, err)
				if err := osfs.SetFlags(name, flags|bit); err != nil {
					t.Skipf("no such attribute here: %v", err)
				}
				defer func() { must(t, osfs.SetFlags(name, flags)) }()
				refusedForeseen(t, h, ErrImmutable, "chattr -"+flag+" "+name)
			})
		}
	}
	t.Run("set while attached", func(t *testing.T) {
		h := newHost(t)
		write(t, h.path, two)
		before := identify(t, h.path)
		must(t, h.manager(t, nil).TakeOver(ask))
		flags, err := osfs.Flags(h.path)
		must(t, err)
		if err := osfs.SetFlags(h.path, flags|hostfs.FlagImmutable); err != nil {
			t.Skipf("no such attribute here: %v", err)
		}
		_, err = h.manager(t, nil).Restore()
		must(t, osfs.SetFlags(h.path, flags))
		if !errors.Is(err, ErrImmutable) || !strings.Contains(err.Error(), "chattr -i "+h.path) {
			t.Errorf("%v, want ErrImmutable with its remedy", err)
		}
		_, err = h.manager(t, nil).Restore()
		must(t, err)
		if d := before.diff(identify(t, h.path)); d != "" {
			t.Error(d)
		}
		h.clean(t)
	})
}

func TestOverlay(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	h := newHost(t)
	tmpfs(t, h.root+"/run", "")
	for _, d := range []string{"lower", "upper", "work"} {
		must(t, os.Mkdir(h.root+"/run/"+d, 0o755))
	}
	write(t, h.root+"/run/lower/resolv.conf", two)
	o := "lowerdir=" + h.root + "/run/lower,upperdir=" + h.root + "/run/upper,workdir=" + h.root + "/run/work"
	if err := unix.Mount("overlay", h.etc, "overlay", 0, o); err != nil {
		t.Skipf("no overlay here: %v", err)
	}
	defer func() { _ = unix.Unmount(h.etc, unix.MNT_DETACH) }()
	before := identify(t, h.path).rebuilt() // The first rename copies it up.
	must(t, h.manager(t, nil).TakeOver(ask))
	checkOurs(t, h)
	_, err := h.manager(t, nil).Restore()
	must(t, err)
	if d := before.diff(identify(t, h.path)); d != "" {
		t.Error(d)
	}
	h.clean(t)
}
