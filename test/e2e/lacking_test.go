package e2e

import (
	"strings"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestLacking: what an attach lacks is named in one line, with what to do, and nothing is changed.
func TestLacking(t *testing.T) {
	for name, c := range map[string]struct {
		prefix []string
		says   []string
	}{
		"CAP_PERFMON":   {[]string{"setpriv", "--bounding-set=-perfmon,-sys_admin"}, []string{"CAP_PERFMON", "--no-bpf"}},
		"CAP_BPF":       {[]string{"setpriv", "--bounding-set=-bpf,-sys_admin"}, []string{"CAP_BPF", "--no-bpf"}},
		"a file system": {[]string{"unshare", "-m", "sh", "-c", `mount -o remount,bind,ro /proc/sys 2>/dev/null || mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys; exec "$@"`, "sh"}, []string{"/proc/sys is read-only"}},
	} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			before := h.snapshot()
			r := command(t, h.Host(), append(append(c.prefix, h.binary), attachArgs()...)...)
			if r.code != 1 || strings.Count(r.stderr, "\n") != 1 || strings.Contains(r.stderr, "report this") {
				t.Errorf("%v", r)
			}
			for _, text := range c.says {
				if !strings.Contains(r.stderr, text) {
					t.Errorf("no %q: %v", text, r)
				}
			}
			h.unchangedBut(before, "/run/mount") // what mount(8) has made
		})
	}
}

// TestWithoutSysAdmin: the kernel's lists of programs are closed to a daemon without CAP_SYS_ADMIN. It works, and shows what is pinned.
func TestWithoutSysAdmin(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	must(t, h.Host(), append([]string{"setpriv", "--bounding-set=-sys_admin", h.binary}, attachArgs()...)...)
	if programs := h.dataplane().Datapath.Programs; len(programs) == 0 {
		t.Errorf("status shows no programs: %v", h.run("status"))
	}
	h.works()
	sees := func(argv ...string) {
		t.Helper()
		if r := command(t, h.Host(), append(argv, h.binary, "status")...); !strings.Contains(r.stdout, "can't be seen") || !strings.Contains(r.stdout, "CAP_SYS_ADMIN") {
			t.Errorf("status does not say what it can't see: %v", r)
		}
	}
	sees()
	h.killBoth()
	// Without a daemon, pins and journal status has nothing to show, and does not know that there is nothing.
	sh(t, h.Host(), "rm -rf /var/lib/k2s-dnsbpf /run/k2s-dnsbpf && mount -t bpf bpf /sys/fs/bpf")
	confined := []string{"setpriv", "--bounding-set=-sys_admin"}
	sees(confined...)
	r := command(t, h.Host(), append(confined, h.binary, "detach")...)
	if !strings.Contains(r.stdout, "no journal knows of stay") || !strings.Contains(r.stdout, "CAP_SYS_ADMIN") {
		t.Errorf("detach does not say what it can't see: %v", r)
	}
	// Who may see programs, but not who holds them, takes nobody's away.
	r = command(t, h.Host(), "setpriv", "--bounding-set=-sys_ptrace", h.binary, "detach")
	if !strings.Contains(r.stdout, "no journal knows of stay") || len(h.dataplane().Datapath.Programs) == 0 {
		t.Errorf("detach took what may be another's: %v", r)
	}
	h.run("detach", "--linger", "0")
	if programs := h.dataplane().Datapath.Programs; len(programs) != 0 {
		t.Errorf("left: %v", programs)
	}
	sh(t, h.Host(), "umount /sys/fs/bpf && rm -r /sys/fs/bpf/k2s-dnsbpf; rm -rf /run/mount; sysctl -qw net.ipv4.conf.lo.route_localnet=0 net.ipv4.conf.lo.accept_local=0")
	h.unchanged(before)
}
