package e2e

import (
	"encoding/json"
	"os"
	"slices"
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
		"CAP_PERFMON":               {[]string{"setpriv", "--bounding-set=-perfmon,-sys_admin"}, []string{"CAP_PERFMON", "--no-bpf"}},
		"CAP_BPF":                   {[]string{"setpriv", "--bounding-set=-bpf,-sys_admin"}, []string{"CAP_BPF", "--no-bpf"}},
		"CAP_NET_ADMIN":             {[]string{"setpriv", "--bounding-set=-net_admin"}, []string{"CAP_NET_ADMIN", "--no-bpf"}},
		"CAP_NET_BIND_SERVICE":      {[]string{"setpriv", "--bounding-set=-net_bind_service"}, []string{"CAP_NET_BIND_SERVICE"}},
		"every capability":          {[]string{"setpriv", "--bounding-set=-all"}, []string{"CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_NET_BIND_SERVICE"}},
		"descriptors":               {[]string{"prlimit", "--nofile=48"}, []string{"limit of open files is 48", "LimitNOFILE"}},
		"almost all of them":        {[]string{"prlimit", "--nofile=16"}, []string{"limit of open files is 16", "LimitNOFILE"}},
		"the host's user namespace": {[]string{"unshare", "-U", "-r"}, []string{"user namespace"}},
		"bpf(2)":                    {[]string{"sandbox"}, []string{"a filter of system calls", "--no-bpf"}},
		"settings":                  {[]string{"unshare", "-m", "sh", "-c", `mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys; exec "$@"`, "sh"}, []string{"/proc/sys is read-only"}},
		"a BPF file system":         {[]string{"unshare", "-m", "sh", "-c", `umount /sys/fs/bpf; exec "$@"`, "sh"}, []string{"mount -t bpf", "--no-bpf"}},
		"one of its own":            {[]string{"sh", "-c", `chown 65534 /sys/fs/bpf; setpriv --bounding-set=-dac_override "$@"; status=$?; chown 0 /sys/fs/bpf; exit $status`, "sh"}, []string{"CAP_DAC_OVERRIDE", "--bpffs"}},
		"one to write to":           {[]string{"unshare", "-m", "sh", "-c", `mount -o remount,bind,ro /sys/fs/bpf; exec "$@"`, "sh"}, []string{"read-only file system", "--bpffs"}},
	} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			before := h.snapshot()
			if c.prefix[0] == "sandbox" {
				// Whoever takes bpf(2) out of the unit's list, as a container runtime's own list does.
				_, unit := unitFile(t, "k2s-dnsbpf.service")
				limits, err := json.Marshal(sandboxOf(t, strings.Replace(unit, "@system-service bpf ", "@system-service ", 1)))
				if err != nil {
					t.Fatal(err)
				}
				self, err := os.Executable()
				if err != nil {
					t.Fatal(err)
				}
				c.prefix = []string{"env", sandboxVariable + "=" + string(limits), self}
			}
			// doctor sees it beforehand.
			h.wantFinding(h.doctor(c.prefix...), "kernel", "fail", c.says...)
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

// TestLeastPrivilege: the documented capabilities are enough, from attach to detach.
func TestLeastPrivilege(t *testing.T) {
	for name, c := range map[string]struct {
		capabilities string
		args         []string
		before       string
	}{
		"BPF":    {"-all,+bpf,+perfmon,+net_admin,+net_bind_service", nil, ""},
		"no BPF": {"-all,+net_bind_service", []string{"--no-bpf"}, ""},
		// What is set already needs no /proc/sys to write to.
		"settings made before": {"+all", nil, `sysctl -qw net.ipv4.conf.lo.route_localnet=1 net.ipv4.conf.lo.accept_local=1
			mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys`},
	} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			sh(t, h.Host(), c.before)
			before := h.snapshot()
			least := []string{"setpriv", "--bounding-set=" + c.capabilities, h.binary}
			must(t, h.Host(), slices.Concat(least, attachArgs(c.args...))...)
			h.healthy()
			h.works()
			must(t, h.Host(), append(least, "detach", "--linger", "0")...)
			h.unchangedBut(before, kubeletFile, "/var/lib/k2s-dnsbpf")
		})
	}
}
