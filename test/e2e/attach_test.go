package e2e

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// shell runs a script on host0, in which $K is the program and $EP names the endpoints.
func (h *host) shell(script string) result {
	h.t.Helper()
	return commandEnv(h.t, h.Host(), []string{"K=" + h.binary, "EP=" + strings.Join(endpoints, " ")}, "sh", "-c", script)
}

// TestNoRoomForTheJournal: what can't be recorded is not done, and the attempt ends.
func TestNoRoomForTheJournal(t *testing.T) {
	t.Parallel()
	for name, mount := range map[string]string{
		"full":      "mount -t tmpfs -o size=4k none /var/lib && { dd if=/dev/zero of=/var/lib/x bs=4k count=2 2>/dev/null || true; }",
		"read-only": "mount -t tmpfs -o ro none /var/lib",
	} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			before := h.snapshot()
			if r := h.shell(mount); r.code != 0 {
				t.Fatal(r)
			}
			r := h.shell("$K attach $EP --wait 3s")
			if r.code != 1 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, "--state-dir") {
				t.Errorf("attach: %v", r)
			}
			must(t, h.Host(), "umount", "/var/lib")
			h.unchangedBut(before, "/run/mount") // mount's own
		})
	}
}

// TestRelativePaths are meant from where the command is run, though the daemon leaves that directory.
func TestRelativePaths(t *testing.T) {
	h := raise(t, lab.Options{})
	must(t, h.Host(), "sh", "-ec", "mkdir /run/here; cd /run/here; echo 'zones: [cluster.local, other.test]' >c.yaml; echo bad >kc")
	if r := h.shell("cd /run/here && $K attach $EP --config c.yaml"); r.code != 0 || !strings.Contains(r.stdout, "2 zones") {
		t.Errorf("relative --config: %v", r)
	}
	h.detach()
	for _, script := range []string{"$K attach --kubeconfig kc", "KUBECONFIG=kc $K attach"} {
		if r := h.shell("cd /run/here && " + script); r.code != 1 || !strings.Contains(r.stderr, "kubeconfig /run/here/kc") {
			t.Errorf("%s: %v", script, r)
		}
	}
	if r := h.shell("$K attach $EP --"); r.code != 0 {
		t.Errorf("attach with a -- behind: %v", r)
	}
	h.detach()
}

// TestBrokenConfig: a file that has come to have a fault is no reason not to look, or to leave the host as it is.
func TestBrokenConfig(t *testing.T) {
	t.Parallel()
	const file = "/run/c.yaml"
	for name, script := range map[string]string{
		"no YAML":     "echo 'zones: [' >",
		"unknown key": "printf 'runDir: /run/other\nzonez: [x]\n' >",
		"bad value":   "printf 'runDir: /run/other\nwait: soon\nresolver: ours\n' >",
		"missing":     "true",
		"directory":   "mkdir",
		"FIFO":        "mkfifo",
	} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			before := h.snapshot()
			must(t, h.Host(), "sh", "-ec", "printf 'runDir: /run/other\nlinger: 0s\n' >"+file)
			h.attach(endpoints, []string{"--config", file})
			must(t, h.Host(), "sh", "-ec", "rm "+file+"; "+script+" "+file)
			for _, look := range []string{"status", "doctor", "restore"} { // which refuses beside a daemon that works
				if r := h.run(look, "--config", file); (r.code != 0) != (look == "restore") || !strings.Contains(r.stderr, "warning: ") || !strings.Contains(r.stdout+r.stderr, "attached") {
					t.Errorf("%v", r)
				}
			}
			if r := h.run("attach", "--config", file); r.code == 0 || strings.Contains(r.stderr, "warning: ") {
				t.Errorf("%v", r)
			}
			if r := h.run("detach", "--linger", "0", "--config", file); r.code != 0 || !strings.Contains(r.stderr, "warning: ") {
				t.Errorf("%v", r)
			}
			must(t, h.Host(), "rm", "-rf", file)
			h.unchanged(before)
		})
	}
}

// gone waits until the daemon has put everything back.
func (h *host) gone() {
	h.t.Helper()
	eventually(h.t, "the daemon has ended", func() error {
		return h.Host().Do(func() error {
			if _, err := os.Stat("/run/k2s-dnsbpf"); !errors.Is(err, fs.ErrNotExist) {
				return fs.ErrExist
			}
			return nil
		})
	})
}

// TestAttachesAtOnce: one wins, the others find that there is nothing left to do.
func TestAttachesAtOnce(t *testing.T) {
	h := raise(t, lab.Options{})
	var all sync.WaitGroup
	results := make([]result, 4)
	for i := range results {
		all.Go(func() { results[i] = h.run(attachArgs()...) })
	}
	all.Wait()
	won := 0
	for _, r := range results {
		if r.code != 0 {
			t.Error(r)
		}
		if strings.HasPrefix(r.stdout, "attached: ") {
			won++
		}
	}
	if won != 1 {
		t.Errorf("%d of %d attached: %v", won, len(results), results)
	}
	h.works()
	h.detach()
}

// TestInterruptedAttach: a detach ends an attach that waits for a CoreDNS which is not there, and says so to both.
func TestInterruptedAttach(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	done := make(chan result)
	go func() { done <- h.run("attach", "--dns-endpoint", "172.20.0.77", "--wait", "50s") }()
	eventually(t, "the attach waits", func() error {
		if r := h.run("status"); !strings.Contains(r.stdout, "an attach or detach is in progress") {
			return errors.New(r.String())
		}
		return nil
	})
	h.detach()
	if r := <-done; r.code != 1 || !strings.Contains(r.stderr, "interrupted, all changes undone") {
		t.Errorf("attach: %v", r)
	}
	h.unchanged(before)
}

// TestLiveChange: a second attach goes over to its settings, but for those that can't change.
func TestLiveChange(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	if r := h.run(attachArgs()...); r.code != 0 || r.stdout != "already attached\n" {
		t.Errorf("the same settings: %v", r)
	}
	others := attachArgs("--zone", "cluster.local", "--zone", "other.test", "--upstream", lab.External1)
	if r := h.run(append(others, "--dry-run")...); r.code != 0 || !strings.Contains(r.stdout, "switch to these settings") {
		t.Errorf("the plan: %v", r)
	}
	if r := h.run(others...); r.code != 0 ||
		!strings.Contains(r.stdout, "new settings") {
		t.Errorf("other settings: %v", r)
	}
	now := h.healthy()
	if len(now.Zones) != 4 || len(now.Resolver.Upstreams) != 1 || now.Resolver.Upstreams[0] != lab.External1+":53" {
		t.Errorf("zones %v, upstreams %v", now.Zones, now.Resolver.Upstreams)
	}
	if kubelet := must(t, h.Host(), "cat", kubeletFile); strings.Contains(kubelet, lab.External0) || !strings.Contains(kubelet, lab.External1) {
		t.Errorf("the file for pods has not followed: %s", kubelet)
	}
	if r := h.run(attachArgs("--no-bpf")...); r.code != 1 || !strings.Contains(r.stderr, "detach first") {
		t.Errorf("a setting that can't change: %v", r)
	}
	h.works()
	h.detach()
}
