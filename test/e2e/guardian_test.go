package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const resolvConf = "/etc/resolv.conf"

// identity is all that tells a file from another: type, content or link text, mode, owner, inode and time.
func identity(path string) (string, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	what := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		what, err = os.Readlink(path)
	} else {
		var content []byte
		content, err = os.ReadFile(path)
		what = string(content)
	}
	stat := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%s %d:%d inode %d, %s: %q", info.Mode(), stat.Uid, stat.Gid, stat.Ino, info.ModTime().UTC(), what), err
}

func (h *host) resolvConf() (id string) {
	h.t.Helper()
	if err := h.Host().Do(func() (err error) {
		id, err = identity(resolvConf)
		return err
	}); err != nil {
		h.t.Fatal(err)
	}
	return id
}

// isStill fails the test if the resolver file is not what it was, see resolvConf.
func (h *host) isStill(before string) {
	h.t.Helper()
	if now := h.resolvConf(); now != before {
		h.t.Errorf("resolv.conf is %s\nwas %s", now, before)
	}
}

// back waits until the resolver file is the one from before, and returns how long that took. It must not be missing at
// any time.
func (h *host) back(before string) time.Duration {
	h.t.Helper()
	begin := time.Now()
	err := h.Host().Do(func() error {
		for time.Since(begin) < patience {
			now, err := identity(resolvConf)
			if err != nil || now == before {
				return err
			}
			time.Sleep(time.Millisecond)
		}
		return fmt.Errorf("waited %s until it is restored", patience)
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return time.Since(begin)
}

// ours waits until the host is attached and well again.
func (h *host) ours() {
	h.t.Helper()
	eventually(h.t, "the file is taken over", func() error {
		if r := h.status(); !r.Healthy || r.Resolver.State != "ours" {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
}

// guardians waits until this many guardians run.
func (h *host) guardians(want int) {
	h.t.Helper()
	eventually(h.t, fmt.Sprintf("%d guardians run", want), func() error {
		list := command(h.t, h.Host(), "pgrep", "-x", "k2s-guardian").stdout
		if n := strings.Count(list, "\n"); n != want {
			return fmt.Errorf("%d do: %q", n, list)
		}
		return nil
	})
}

// problem fails the test unless status tells of it.
func (h *host) problem(text string) {
	h.t.Helper()
	if r := h.status(); r.Healthy || !slices.ContainsFunc(r.Problems, func(p string) bool { return strings.Contains(p, text) }) {
		h.t.Errorf("status does not say %q: %+v", text, r)
	}
}

// TestGuardian: whatever kills the daemon, the file is what it was, and soon.
func TestGuardian(t *testing.T) {
	t.Parallel()
	for _, original := range []int{0, 3} {
		t.Run(originals[original].name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			must(t, h.Host(), "sh", "-ec", ":\n"+originals[original].script)
			before, id := h.snapshot(), h.resolvConf()
			for _, how := range []string{"-KILL %d", "-SEGV %d", "-ABRT %d", "-BUS %d", "-KILL -%d"} {
				h.attach()
				r := h.healthy()
				if r.Guardian.PID == 0 {
					t.Fatalf("no guardian: %+v", r)
				}
				must(t, h.Host(), "sh", "-c", "kill "+fmt.Sprintf(how, r.PID))
				t.Logf("kill %s: restored within %s", fmt.Sprintf(how, r.PID), h.back(id).Round(time.Millisecond))
				h.guardians(0)
				h.problem("daemon dead; resolver restored by the guardian at ")
				must(t, h.Host(), "getent", "ahostsv4", lab.WWW)
			}
			// The kernel goes on steering, and an attach takes over from there.
			resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
			h.attach()
			h.healthy()
			h.works()
			h.detach()
			h.guardians(0)
			h.unchanged(before)
			h.isStill(id)
		})
	}
}

// TestGuardianIsSmall: it is there for good, beside a daemon that uses more.
func TestGuardianIsSmall(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	defer h.detach()
	pid := h.healthy().Guardian.PID
	memory := must(t, h.Host(), "sh", "-c", fmt.Sprintf("grep -E '^(Rss|Pss|Private_Dirty|Pss_File):' /proc/%d/smaps_rollup | tr -s ' \n' ' '", pid))
	t.Log(memory)
	var anonymous int
	if _, err := fmt.Sscan(must(t, h.Host(), "sh", "-c", fmt.Sprintf("grep RssAnon /proc/%d/status | tr -dc 0-9", pid)), &anonymous); err != nil {
		t.Fatal(err)
	}
	const most = 12 << 10 // kB
	if anonymous > most {
		t.Errorf("%d kB of memory of its own, want at most %d", anonymous, most)
	}
	if session := strings.Fields(must(t, h.Host(), "ps", "-o", "sid=", "-p", fmt.Sprint(pid))); session[0] != fmt.Sprint(pid) {
		t.Errorf("it is in the session %v", session)
	}
	// As low as this host allows.
	allowed := "0"
	if command(t, h.Host(), "sh", "-c", "echo -1000 2>/dev/null >/proc/self/oom_score_adj").code == 0 {
		allowed = "-1000"
	}
	if got := strings.TrimSpace(must(t, h.Host(), "cat", fmt.Sprintf("/proc/%d/oom_score_adj", pid))); got != allowed {
		t.Errorf("oom_score_adj is %s, want %s", got, allowed)
	}
}

// TestGuardianHang: a daemon that is stopped is as good as dead for the file, and takes it over again when it runs.
func TestGuardianHang(t *testing.T) {
	h := raise(t, lab.Options{})
	before, id := h.snapshot(), h.resolvConf()
	h.attach()
	pid := h.healthy().PID
	for range 2 {
		h.signal("STOP", pid)
		t.Logf("SIGSTOP: restored after %s", h.back(id).Round(time.Millisecond))
		h.problem("daemon hangs; resolver restored by the guardian at ")
		must(t, h.Host(), "getent", "ahostsv4", lab.WWW)
		if r := h.run("restore"); r.code != 0 || !strings.Contains(r.stdout, "nothing to do") {
			t.Errorf("restore beside it: %v", r)
		}
		h.signal("CONT", pid)
		h.ours()
		h.works()
	}
	h.signal("STOP", pid)
	h.back(id)
	h.detach() // it continues the daemon
	h.unchanged(before)

	h.attach()
	pid = h.healthy().PID
	h.signal("STOP", pid)
	h.back(id)
	h.signal("KILL", pid)
	h.guardians(0)
	h.problem("daemon dead")
	h.isStill(id)
	h.detach()
	h.unchanged(before)
}

// TestRestoreBesideHang: nobody has to wait for the guardian.
func TestRestoreBesideHang(t *testing.T) {
	h := raise(t, lab.Options{})
	before, id := h.snapshot(), h.resolvConf()
	h.attach()
	r := h.healthy()
	h.signal("STOP", r.PID, r.Guardian.PID)
	if r := h.run("restore"); r.code != 0 || !strings.Contains(r.stdout, "restored") {
		t.Errorf("restore: %v", r)
	}
	h.isStill(id)
	h.detach()
	h.unchanged(before)
}

// TestGuardianDies: the daemon notices and starts another, which works.
func TestGuardianDies(t *testing.T) {
	h := raise(t, lab.Options{})
	before, id := h.snapshot(), h.resolvConf()
	h.attach()
	first := h.healthy()
	for _, name := range []string{"HUP", "INT", "TERM", "PIPE", "USR1", "USR2", "ALRM"} {
		h.signal(name, first.Guardian.PID)
	}
	restarts := 0
	for _, name := range []string{"KILL", "SEGV", "ABRT", "BUS", "QUIT", "STOP"} {
		now := h.healthy()
		if now.Guardian.Restarts != restarts {
			t.Fatalf("before SIG%s: %+v", name, now)
		}
		h.signal(name, now.Guardian.PID)
		begin := time.Now()
		eventually(t, "another guardian runs", func() error {
			if r := h.status(); !r.Healthy || r.Guardian.Restarts != restarts+1 || r.Guardian.PID == now.Guardian.PID {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
		t.Logf("SIG%s: another after %s", name, time.Since(begin).Round(time.Millisecond))
		restarts++
	}
	h.guardians(1)
	h.signal("KILL", first.PID)
	h.back(id)
	h.guardians(0)
	h.detach()
	h.unchanged(before)
}

// TestGuardianForeign: what is somebody else's by now stays.
func TestGuardianForeign(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	pid := h.healthy().PID
	const foreign = "nameserver 192.0.2.54\n"
	must(t, h.Host(), "sh", "-ec", fmt.Sprintf("kill -STOP %d; printf '%s' >/etc/x; mv /etc/x /etc/resolv.conf; kill -KILL %d",
		pid, strings.ReplaceAll(foreign, "\n", `\n`), pid))
	h.guardians(0)
	if content, err := h.Host().ReadFile(resolvConf); err != nil || string(content) != foreign {
		t.Errorf("resolv.conf is %q %v", content, err)
	}
	h.problem("somebody else's")
	must(t, h.Host(), "getent", "ahostsv4", lab.WWW)
	h.detach()
	if content, err := h.Host().ReadFile(resolvConf); err != nil || string(content) != foreign {
		t.Errorf("after the detach resolv.conf is %q %v", content, err)
	}
}

// TestBothDie: with daemon and guardian killed at once, the next command puts everything back.
func TestBothDie(t *testing.T) {
	h := raise(t, lab.Options{})
	before, id := h.snapshot(), h.resolvConf()
	ends := map[string]func(){
		"restore": func() {
			if r := h.run("restore"); r.code != 0 || !strings.Contains(r.stdout, "restored: regular file") {
				t.Errorf("restore: %v", r)
			}
			h.isStill(id)
			after := h.snapshot()
			if r := h.run("restore"); r.code != 0 || !strings.Contains(r.stdout, "nothing to do") {
				t.Errorf("second restore: %v", r)
			}
			if diff := lab.Diff(after, h.snapshot()); diff != "" {
				t.Errorf("the second restore changed:\n%s", diff)
			}
		},
		"attach": func() {
			h.attach()
			h.healthy()
			h.works()
		},
		"detach": func() {},
	}
	for name, end := range ends {
		h.attach()
		h.killBoth()
		if r := h.status(); r.Resolver.State != "ours" {
			t.Fatalf("before %s: %+v", name, r)
		}
		end()
		h.detach()
		h.unchanged(before)
	}
}

// TestGuardianAndAttach: an attach and a restore come at the moment of the death.
func TestGuardianAndAttach(t *testing.T) {
	h := raise(t, lab.Options{})
	before, id := h.snapshot(), h.resolvConf()
	h.attach()
	for i := range 8 {
		pid := h.healthy().PID
		var all sync.WaitGroup
		all.Go(func() {
			if r := h.run(attachArgs()...); r.code != 0 {
				t.Errorf("attach: %v", r)
			}
		})
		if i%2 == 1 {
			all.Go(func() { h.run("restore") })
		}
		// Sometimes before the attach has begun, sometimes while it looks for the lock.
		time.Sleep(time.Duration(i) * 5 * time.Millisecond)
		h.signal("KILL", pid)
		all.Wait()
		// The attach may have found the old daemon alive, and nothing to do.
		if r := h.status(); r.PID == 0 {
			h.attach()
		}
		h.ours()
		h.guardians(1)
		h.works()
	}
	h.detach()
	h.guardians(0)
	h.unchanged(before)
	h.isStill(id)
}

// TestCrashLoop: attached and killed again and again, the file is always the original, or ours with a record.
func TestCrashLoop(t *testing.T) {
	h := raise(t, lab.Options{})
	before, id := h.snapshot(), h.resolvConf()
	for range 20 {
		h.attach()
		h.signal("KILL", h.healthy().PID)
		if now := h.resolvConf(); now != id {
			must(t, h.Host(), "sh", "-ec", "grep -q k2s-dnsbpf /etc/resolv.conf && grep -q resolv.conf /var/lib/k2s-dnsbpf/journal.json || cmp /etc/resolv.conf "+
				"/etc/.resolv.conf.k2s-dnsbpf-original || test ! -e /etc/.resolv.conf.k2s-dnsbpf-original")
		}
	}
	h.back(id)
	h.guardians(0)
	h.detach()
	h.unchanged(before)
}

// watchFiles counts the file-system events of a node's directories, and calls at when there have been n of them. It
// returns how many there were when stop was called.
func (h *host) watchFiles(n int, at func()) (stop func() int) {
	h.t.Helper()
	var fd int
	if err := h.Host().Do(func() (err error) {
		if fd, err = unix.InotifyInit1(unix.IN_CLOEXEC); err != nil {
			return err
		}
		for _, dir := range []string{"/etc", "/var/lib/k2s-dnsbpf", "/run/k2s-dnsbpf"} {
			const events = unix.IN_CREATE | unix.IN_CLOSE_WRITE | unix.IN_MOVED_TO | unix.IN_DELETE
			if _, err := unix.InotifyAddWatch(fd, dir, events); err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
		return nil
	}); err != nil {
		h.t.Fatal(err)
	}
	seen, ended := 0, make(chan struct{})
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		h.t.Fatal(err)
	}
	go func() {
		defer close(ended)
		buffer := make([]byte, 64<<10)
		for {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
			if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
				return
			}
			if fds[0].Revents == 0 {
				if fds[1].Revents != 0 {
					return
				}
				continue
			}
			length, err := unix.Read(fd, buffer)
			if err != nil {
				return
			}
			for offset := 0; offset < length; {
				event := (*unix.InotifyEvent)(unsafe.Pointer(&buffer[offset]))
				offset += unix.SizeofInotifyEvent + int(event.Len)
				if seen++; seen == n {
					at()
				}
			}
		}
	}()
	return func() int {
		_, _ = unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		<-ended
		_ = unix.Close(fd)
		_ = unix.Close(wake)
		return seen
	}
}

// TestKilledAtManySteps kills the daemon at every second file-system event of an attach, and of a detach. The file is
// restored without anybody's help, the next attach takes over whatever there is, and the last detach leaves nothing. The
// named steps are in pkg/resolvconf's TestKillAtSteps, to the call.
func TestKilledAtManySteps(t *testing.T) {
	h := raise(t, lab.Options{})
	must(t, h.Host(), "mkdir", "-p", "/var/lib/k2s-dnsbpf", "/run/k2s-dnsbpf") // to be watched from the start
	id := h.resolvConf()
	last := func(kill func(n int) (seen int)) int {
		t.Helper()
		for n := 1; ; n += 2 {
			seen := kill(n)
			h.back(id)
			h.guardians(0)
			if seen < n {
				return seen
			}
		}
	}
	attaches := last(func(n int) int {
		daemon := h.Host().Command(t.Context(), h.binary, attachArgs("--foreground")...)
		daemon.Dir, daemon.Env = "/", environment
		started := make(chan struct{})
		stop := h.watchFiles(n, func() {
			<-started
			_ = daemon.Process.Kill()
		})
		if err := daemon.Start(); err != nil {
			t.Fatal(err)
		}
		close(started)
		killed := make(chan error, 1)
		go func() { killed <- daemon.Wait() }()
		for deadline := time.Now().Add(patience); ; {
			select {
			case <-killed:
				return stop()
			default:
			}
			if h.run("status").code == 0 {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("killed at event %d: neither attached nor dead", n)
			}
		}
		seen := stop()
		_ = daemon.Process.Kill()
		<-killed
		return seen
	})
	detaches := last(func(n int) int {
		h.attach()
		pid := h.healthy().PID
		stop := h.watchFiles(n, func() { command(t, h.Host(), "kill", "-KILL", fmt.Sprint(pid)) })
		h.signal("TERM", pid)
		h.ended(pid)
		return stop()
	})
	t.Logf("killed at every second of %d events of an attach and %d of a detach", attaches, detaches)
	before := h.snapshot()
	h.attach()
	h.works()
	h.detach()
	h.unchanged(before)
	h.isStill(id)
}

// TestRestoreAnywhere: what restore can do without.
func TestRestoreAnywhere(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ name, fault, before, end string }{
		{"network and cluster", "", "unshare --net ", ""},
		{"read-only state directory", "mount --bind /var/lib /var/lib; mount -o remount,ro,bind /var/lib", "", "umount /var/lib"},
		{"journal", "for f in /var/lib/k2s-dnsbpf/journal*; do echo damaged >$f; done", "", "rm /var/lib/k2s-dnsbpf/*.damaged"},
		{"state directory", "mount -t tmpfs none /var/lib", "", "umount /var/lib"},
		{"run directory", "rm -r /run/k2s-dnsbpf", "", ""},
		{"writable run directory", "rm -r /run/k2s-dnsbpf; mount --bind /run /run; mount -o remount,ro,bind /run", "", "umount /run"},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			id := h.resolvConf()
			if r := h.run("restore"); r.code != 0 || !strings.Contains(r.stdout, "nothing to do") {
				t.Errorf("on a host that was never attached: %v", r)
			}
			h.attach()
			if r := h.run("restore"); r.code != 1 || !strings.Contains(r.stderr, "k2s-dnsbpf detach") {
				t.Errorf("beside a daemon that works: %v", r)
			}
			h.healthy()
			h.killBoth()
			must(t, h.Host(), "sh", "-ec", ":\n"+test.fault)
			for _, says := range []string{"restored", "nothing to do"} {
				if r := command(t, h.Host(), "sh", "-c", test.before+h.binary+" restore"); r.code != 0 || !strings.Contains(r.stdout, says) {
					t.Errorf("want %q: %v", says, r)
				}
				h.isStill(id)
			}
			must(t, h.Host(), "sh", "-ec", ":\n"+test.end)
			h.detach()
			if now := h.resolvConf(); now != id {
				t.Errorf("after the detach resolv.conf is %s\nwas %s", now, id)
			}
		})
	}
}

// unitFile is one of the units that are to be installed.
func unitFile(t *testing.T, name string) (path, content string) {
	t.Helper()
	root, err := lab.Root()
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(root, "scripts", "systemd", name)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return path, string(raw)
}

// setting is a unit's value of a key that it has once.
func setting(t *testing.T, unit, key string) string {
	t.Helper()
	value := ""
	for line := range strings.Lines(unit) {
		if rest, ok := strings.CutPrefix(line, key+"="); ok {
			if value != "" {
				t.Fatalf("%s is there twice", key)
			}
			value = strings.TrimSpace(rest)
		}
	}
	if value == "" {
		t.Fatalf("there is no %s", key)
	}
	return value
}

// install puts the program where the units expect it, on this host alone.
func (h *host) install() {
	h.t.Helper()
	must(h.t, h.Host(), "sh", "-ec", "mount -t tmpfs none /usr/local/sbin; cp "+h.binary+" /usr/local/sbin/k2s-dnsbpf")
}

// TestUnits has systemd read the units.
func TestUnits(t *testing.T) {
	h := raise(t, lab.Options{NoServers: true})
	h.install()
	var paths []string
	for _, name := range []string{"k2s-dnsbpf.service", "k2s-dnsbpf-restore.service", "k2s-dnsbpf-token.service", "k2s-dnsbpf-token.timer"} {
		path, _ := unitFile(t, name)
		paths = append(paths, path)
	}
	r := command(t, h.Host(), append([]string{"systemd-analyze", "verify", "--man=no"}, paths...)...)
	if r.code != 0 || strings.Contains(r.stderr, "k2s-dnsbpf") {
		t.Errorf("%v", r)
	}
	// SIGPIPE is a good end to systemd, and a cluster may come late.
	_, unit := unitFile(t, "k2s-dnsbpf.service")
	for key, want := range map[string]string{"Restart": "always", "StartLimitIntervalSec": "0"} {
		if got := setting(t, unit, key); got != want {
			t.Errorf("%s=%s, want %s", key, got, want)
		}
	}
	// What is left to the daemon is what it does; without mounts of its own no less is possible.
	for i, most := range []string{"46", "30"} {
		if r := command(t, h.Host(), "systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold="+most, paths[i]); r.code != 0 {
			t.Errorf("exposed by more than %s tenths: %v", most, r)
		}
	}
}

// TestBoot plays a host that goes down attached: at boot /run is empty, the kernel is a new one, and the unit runs.
func TestBoot(t *testing.T) {
	h := raise(t, lab.Options{})
	h.install()
	_, unit := unitFile(t, "k2s-dnsbpf-restore.service")
	before, id := h.snapshot(), h.resolvConf()
	h.attach()
	h.killBoth()
	must(t, h.Host(), "sh", "-ec", `
		rm -rf /run/k2s-dnsbpf /sys/fs/bpf/k2s-dnsbpf
		sysctl -qw net.ipv4.conf.lo.route_localnet=0 net.ipv4.conf.lo.accept_local=0
		echo 00000000-0000-4000-8000-000000000000 >/run/boot_id
		mount --bind /run/boot_id /proc/sys/kernel/random/boot_id`)
	for range 2 {
		must(t, h.Host(), strings.Fields(setting(t, unit, "ExecStart"))...)
		h.isStill(id)
		if r := h.status(); r.Attached {
			t.Errorf("after the boot: %+v", r)
		}
	}
	must(t, h.Host(), "sh", "-ec", "umount /proc/sys/kernel/random/boot_id; rm /run/boot_id")
	h.unchangedBut(before, kubeletFile, "/var/lib/k2s-dnsbpf", "/var/lib/k2s-dnsbpf/lock", "/run/mount") // that of the killed
	h.attach()
	h.works()
	h.detach()
}

// unitCapabilities are what a unit leaves of the capabilities, as setpriv wants it.
func unitCapabilities(t *testing.T, unit string) string {
	t.Helper()
	bounding := "-all"
	for _, name := range strings.Fields(setting(t, unit, "CapabilityBoundingSet")) {
		bounding += ",+" + strings.ToLower(strings.TrimPrefix(name, "CAP_"))
	}
	return bounding
}

// serviceManager listens at /run/notify as systemd does, and returns what waits for as many messages as it is given beginnings. The
// messages have to begin so, in whatever order: they may be of two processes.
func (h *host) serviceManager() (told func(beginnings ...string)) {
	t := h.t
	t.Helper()
	var manager int
	if err := h.Host().Do(func() (err error) {
		if manager, err = unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Bind(manager, &unix.SockaddrUnix{Name: "/run/notify"})
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(manager) })
	if err := unix.SetsockoptTimeval(manager, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(patience / time.Second)}); err != nil {
		t.Fatal(err)
	}
	return func(beginnings ...string) {
		t.Helper()
		for want := slices.Clone(beginnings); len(want) > 0; {
			message := make([]byte, 64)
			n, _, err := unix.Recvfrom(manager, message, 0)
			for errors.Is(err, unix.EINTR) { // by Go's own signals
				n, _, err = unix.Recvfrom(manager, message, 0)
			}
			text := string(message[:max(0, n)])
			i := slices.IndexFunc(want, func(beginning string) bool { return strings.HasPrefix(text, beginning) })
			if i < 0 {
				t.Fatalf("the manager was told %q: %v, want one of %q", text, err, want)
			}
			want = slices.Delete(want, i, i+1)
		}
	}
}

// TestService runs the daemon as its unit does: with its capabilities only, and a manager that waits to be told.
func TestService(t *testing.T) {
	h := raise(t, lab.Options{})
	h.install()
	_, unit := unitFile(t, "k2s-dnsbpf.service")
	before, id := h.snapshot(), h.resolvConf()
	told := h.serviceManager()
	bounding := unitCapabilities(t, unit)
	start := func() *lab.Cmd {
		argv := slices.Concat([]string{"--no-new-privs", "--bounding-set", bounding}, strings.Fields(setting(t, unit, "ExecStart")), endpoints, ranges)
		cmd := h.Host().Command(t.Context(), "setpriv", argv...)
		cmd.Dir, cmd.Env = "/", append(slices.Clone(environment), "NOTIFY_SOCKET=/run/notify")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		told("READY=1")
		h.healthy()
		h.works()
		return cmd
	}
	stopPost := strings.Fields(setting(t, unit, "ExecStopPost"))

	// A stop: SIGTERM for both, as for all of a control group.
	cmd := start()
	r := h.healthy()
	must(t, h.Host(), "sh", "-c", strings.ReplaceAll(setting(t, unit, "ExecReload"), "$MAINPID", strconv.Itoa(r.PID)))
	told("RELOADING=1\nMONOTONIC_USEC=")
	told("READY=1")
	h.works()
	must(t, h.Host(), "sh", "-c", fmt.Sprintf("kill -TERM %d %d", r.Guardian.PID, r.PID))
	if err := cmd.Wait(); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	must(t, h.Host(), stopPost...)
	must(t, h.Host(), "rm", "/run/notify")
	h.unchangedBut(before, kubeletFile, "/var/lib/k2s-dnsbpf", "/run/mount")

	// A manager that kills all that is left: the line behind it restores.
	h.attach()
	h.killBoth()
	must(t, h.Host(), stopPost...)
	h.isStill(id)
	h.detach()
}
