package e2e

import (
	"strings"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestTwoOfUs: an attach that does not find the daemon where it looks undoes nothing of what that one did, and a detach finds
// and ends it.
func TestTwoOfUs(t *testing.T) {
	for name, c := range map[string]struct {
		script string // that hides the daemon
		args   []string
		extra  []string // of attach
	}{
		"another run directory":           {"true", nil, []string{"--run-dir", "/run/other"}},
		"the run directory is gone":       {"rm -rf /run/k2s-dnsbpf", nil, nil},
		"gone, and nothing in the kernel": {"rm -rf /run/k2s-dnsbpf", []string{"--no-bpf"}, []string{"--no-bpf"}},
		"both are gone":                   {"rm -rf /run/k2s-dnsbpf /var/lib/k2s-dnsbpf/lock", nil, nil},
		"gone, in transparent mode":       {"rm -rf /run/k2s-dnsbpf", transparent, transparent},
	} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			if c.args != nil && c.args[0] == transparent[0] {
				h.startDnsmasq("127.0.0.1")
			}
			before := h.snapshot()
			h.attach(endpoints, ranges, c.args)
			pid := h.healthy().PID
			sh(t, h.Host(), c.script)
			for range 2 {
				r := h.run(attachArgs(c.extra...)...)
				if r.code != 1 || !strings.Contains(r.stderr, "another daemon is attached") || !strings.Contains(r.stderr, "detach") {
					t.Errorf("%v", r)
				}
				h.works()
			}
			if r := h.run("status"); c.script != "true" && (r.code != 3 || !strings.Contains(r.stdout, "can't be asked")) {
				t.Errorf("%v", r)
			}
			if r := h.run("restore"); c.args == nil && r.code == 0 && !strings.Contains(c.script, "true") {
				t.Errorf("%v", r)
			}
			h.works()
			h.detach()
			h.ended(pid)
			h.unchanged(before)
		})
	}
}

// TestOtherNamespace: a daemon in another network namespace that has the same directories is not ours to change.
func TestOtherNamespace(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	h.healthy()
	r := command(t, h.Host(), "unshare", "-n", h.binary, "attach", "--dns-endpoint", lab.CoreDNS0v4)
	if r.code != 1 || !strings.Contains(r.stderr, "another network namespace") {
		t.Errorf("%v", r)
	}
	h.healthy()
	h.works()
}

// TestOtherInstance: a detach with directories of its own leaves the programs of a living daemon alone.
func TestOtherInstance(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	h.healthy()
	n := len(h.dataplane().Datapath.Programs)
	r := h.run("detach", "--run-dir", "/run/other", "--state-dir", "/var/lib/other", "--resolv-conf", "/etc/other.conf", "--bpffs", "/sys/fs/bpf/other")
	if d := h.dataplane(); len(d.Datapath.Programs) != n || len(d.report.Datapath.Events) != 0 {
		t.Errorf("%v: %d programs, were %d; events %v", r, len(d.Datapath.Programs), n, d.report.Datapath.Events)
	}
	h.healthy()
}

// TestNoRoomInRun: a run directory that is full, or whose owner can't write down who it is.
func TestNoRoomInRun(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	sh(t, h.Host(), "mkdir -p /run/k2s-dnsbpf; mount -t tmpfs -o size=4k,nr_inodes=64 none /run/k2s-dnsbpf; head -c 8192 /dev/zero >/run/k2s-dnsbpf/fill || true")
	if r := h.run(attachArgs()...); r.code != 0 {
		t.Logf("refused: %v", r)
	} else {
		h.healthy()
		h.works()
		h.detach()
	}
	sh(t, h.Host(), "umount /run/k2s-dnsbpf; rm -rf /run/k2s-dnsbpf")
	h.unchangedBut(before, kubeletFile, "/var/lib/k2s-dnsbpf", "/run/mount")
}

// TestProgramOfAnotherName: a daemon is known by what it holds, not by the name of its file.
func TestProgramOfAnotherName(t *testing.T) {
	h := raise(t, lab.Options{})
	sh(t, h.Host(), "mkdir -p /run/store; cp "+h.binary+" /run/store/.k2s-dnsbpf-wrapped; cp "+h.binary+" /run/store/dns")
	for _, name := range []string{".k2s-dnsbpf-wrapped", "dns"} {
		must(t, h.Host(), append([]string{"/run/store/" + name}, attachArgs()...)...)
		pid := h.healthy().PID
		sh(t, h.Host(), "rm /run/store/"+name) // as a package's upgrade does
		h.wantFinding(h.doctor(), "port53", "ok")
		h.detach()
		h.ended(pid)
	}
}
