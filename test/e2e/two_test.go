package e2e

import (
	"fmt"
	"strings"
	"sync"
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
	r := h.run("detach", "--linger", "0", "--run-dir", "/run/other", "--state-dir", "/var/lib/other", "--resolv-conf", "/etc/other.conf", "--bpffs", "/sys/fs/bpf/other")
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
	h.attach()
	h.healthy()
	h.works()
	h.detach()
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

// TestDeadInOtherNamespace: what a dead daemon did in its network namespace is not undone in another one, except for the resolver
// file, which is the host's.
func TestDeadInOtherNamespace(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	h.healthy()
	h.killBoth()
	for _, args := range [][]string{{"detach"}, attachArgs(), append(attachArgs(), "--dry-run"), attachArgs("--run-dir", "/run/other")} {
		r := command(t, h.Host(), append([]string{"unshare", "-n", h.binary}, args...)...)
		if r.code != 1 || !strings.Contains(r.stderr, "another network namespace") || !strings.Contains(r.stderr, "nsenter --net=/") {
			t.Errorf("%v", r)
		}
	}
	if programs := h.dataplane().Datapath.Programs; len(programs) == 0 {
		t.Error("its programs are gone")
	}
	if r := command(t, h.Host(), "unshare", "-n", h.binary, "restore"); r.code != 0 || !strings.Contains(r.stdout, "restored") {
		t.Errorf("%v", r)
	}
	h.detach()
	h.unchanged(before)
}

// TestManyRunDirectories: of many attaches at one moment, each with a run directory of its own and one state directory, one wins.
func TestManyRunDirectories(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	const many = 8
	results := make([]result, many)
	var attaches sync.WaitGroup
	for i := range many {
		attaches.Go(func() { results[i] = h.run(attachArgs("--run-dir", fmt.Sprintf("/run/k%d", i))...) })
	}
	attaches.Wait()
	won := -1
	for i, r := range results {
		switch {
		case r.code == 0 && won < 0:
			won = i
		case r.code != 1 || !strings.Contains(r.stderr, "another daemon is attached"):
			t.Errorf("%v", r)
		}
	}
	if won < 0 {
		t.Fatal("nobody won")
	}
	h.works()
	if r := h.run("detach", "--linger", "0", "--run-dir", fmt.Sprintf("/run/k%d", won)); r.code != 0 {
		t.Errorf("%v", r)
	}
	h.unchanged(before)
}

// TestGuardianBesideAnother: a dead daemon's guardian leaves the journal to a daemon that has come with another run directory.
func TestGuardianBesideAnother(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	r := h.healthy()
	h.signal("STOP", r.Guardian.PID)
	h.signal("KILL", r.PID)
	h.ended(r.PID)
	must(t, h.Host(), append([]string{h.binary}, attachArgs("--run-dir", "/run/other")...)...)
	journal := must(t, h.Host(), "cat", "/var/lib/k2s-dnsbpf/journal.json")
	h.signal("CONT", r.Guardian.PID)
	// It has looked when it has found a lock held: while it waits it is asleep, and has nothing open there.
	eventually(t, "the guardian waits", func() error {
		if state := command(t, h.Host(), "ps", "-o", "state=", "-p", fmt.Sprint(r.Guardian.PID)).stdout; strings.TrimSpace(state) != "S" {
			return fmt.Errorf("it is %q", state)
		}
		return nil
	})
	h.works()
	if now := must(t, h.Host(), "cat", "/var/lib/k2s-dnsbpf/journal.json"); now != journal {
		t.Errorf("the journal was changed:\n%s\n%s", journal, now)
	}
	if out := h.run("detach", "--linger", "0", "--run-dir", "/run/other"); out.code != 0 {
		t.Errorf("%v", out)
	}
	h.ended(r.Guardian.PID)
	sh(t, h.Host(), "rm -rf /run/k2s-dnsbpf")
	h.unchanged(before)
}

// TestLaterJournal: the journal of a later version is refused by name and left as it is; what is parked is put back.
func TestLaterJournal(t *testing.T) {
	h := raise(t, lab.Options{})
	_, inode := h.stamp("/etc/resolv.conf")
	h.attach()
	h.killBoth()
	sh(t, h.Host(), `sed -i 's/"format": 1/"format": 7/' /var/lib/k2s-dnsbpf/journal.json*`)
	const sum = "sha256sum /var/lib/k2s-dnsbpf/journal*"
	before := must(t, h.Host(), "sh", "-c", sum)
	for _, args := range [][]string{{"detach"}, {"detach", "--dry-run"}, attachArgs(), append(attachArgs(), "--dry-run")} {
		if r := h.run(args...); r.code != 1 || !strings.Contains(r.stderr, "later version") || !strings.Contains(r.stderr, "format 7, this version knows 1") {
			t.Errorf("%v", r)
		}
	}
	if r := h.run("status"); r.code != 3 || !strings.Contains(r.stdout, "later version") {
		t.Errorf("%v", r)
	}
	h.wantFinding(h.doctor(), "journal", "fail", "later version")
	if r := h.run("restore"); r.code != 0 || !strings.Contains(r.stdout, "restored") {
		t.Errorf("%v", r)
	}
	if _, now := h.stamp("/etc/resolv.conf"); now != inode {
		t.Error("resolv.conf was made anew")
	}
	if r := h.run("restore"); r.code != 0 || !strings.Contains(r.stdout, "nothing to do") {
		t.Errorf("%v", r)
	}
	if after := must(t, h.Host(), "sh", "-c", sum); after != before {
		t.Errorf("the journal was changed:\n%s%s", before, after)
	}
	sh(t, h.Host(), `sed -i 's/"format": 7/"format": 1/' /var/lib/k2s-dnsbpf/journal.json*`)
	h.detach()
}
