package e2e

import (
	"errors"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// lingerPatience bounds the wait for the end of a daemon that lingers by default, and is not asked on and on.
const lingerPatience = 40 * time.Second

// lingered waits until a daemon that lingers has ended by itself.
func (h *host) lingered() {
	h.t.Helper()
	eventuallyIn(h.t, lingerPatience, "the daemon has lingered", func() error {
		if h.status().Lingering != nil {
			return errors.New("it lingers")
		}
		return nil
	})
	h.gone()
}

// lingers fails the test if no daemon lingers and answers all that it answered before, and returns its process.
func (h *host) lingers() (pid int) {
	h.t.Helper()
	r := h.status()
	if r.Attached || r.Lingering == nil || r.Lingering.PID == 0 || len(r.Lingering.Listen) != 3 || r.Lingering.Until.IsZero() {
		h.t.Fatalf("no daemon lingers: %+v", r)
	}
	for _, from := range []struct {
		node   *lab.Node
		server netip.AddrPort
	}{{h.Host(), hostDNS}, {h.Host(), hostDNS6}, {h.Worker(), switchDNS}} {
		resolve(h.t, from.node, from.server, lab.Backend, lab.Backend4)
		resolve(h.t, from.node, from.server, lab.WWW, lab.WWW4)
	}
	return r.Lingering.PID
}

// leave detaches and leaves the daemon lingering, for a minute or what the arguments say.
func (h *host) leave(args ...string) {
	h.t.Helper()
	if args == nil {
		args = []string{"--linger", "1m"}
	}
	if r := h.run(append([]string{"detach"}, args...)...); r.code != 0 || r.stderr != "" ||
		!strings.Contains(r.stdout, " detached\n") || !strings.Contains(r.stdout, "lingers: it keeps answering on 127.0.0.1:53") {
		h.t.Fatal(r)
	}
}

// TestLinger: after a detach all is put back but the listeners; they end by themselves, or with a second detach.
func TestLinger(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	h.leave("--linger", "10s")
	pid := h.lingers()
	for line := range strings.Lines(lab.Diff(before, h.snapshot())) {
		allowed := false
		for _, part := range []string{" | ss -Hlntu | ", " | process | ", " /run/k2s-dnsbpf ", " /run/k2s-dnsbpf/linger.sock ", " /var/lib/k2s-dnsbpf", kubeletFile} {
			allowed = allowed || strings.Contains(line, part)
		}
		if !allowed {
			t.Errorf("lingering, the host is not as before: %s", line)
		}
	}
	if r := h.run("status"); r.code != 3 || !strings.Contains(r.stdout, "not attached, lingering until") {
		t.Errorf("status: %v", r)
	}
	if r := h.run("detach", "--linger", "1h"); r.code != 0 || strings.Count(r.stdout, "\n") != 1 || !strings.Contains(r.stdout, "lingers: it keeps answering") {
		t.Errorf("second detach: %v", r)
	}
	if now := h.lingers(); now != pid {
		t.Errorf("process %d lingers, it was %d", now, pid)
	}
	h.lingered()
	h.unchanged(before)

	h.attach()
	h.leave()
	h.lingers()
	if r := h.run("detach", "--linger", "0", "--dry-run"); r.code != 0 || !strings.Contains(r.stdout, "end process "+strconv.Itoa(h.lingers())) {
		t.Errorf("the plan of detach --linger 0: %v", r)
	}
	if r := h.run("detach", "--linger", "0"); r.code != 0 || !strings.Contains(r.stdout, "no longer lingers") {
		t.Errorf("detach --linger 0: %v", r)
	}
	h.unchanged(before)
}

// TestLingerSettings: the file sets the time, and what can't be is refused. Where no program was pointed at us, there
// is nobody to linger for.
func TestLingerSettings(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	must(t, h.Host(), "sh", "-c", "echo 'linger: 0s' >/run/c.yaml")
	h.attach()
	if r := h.run("detach", "--config", "/run/c.yaml"); r.code != 0 || strings.Contains(r.stdout, "linger") {
		t.Errorf("linger: 0s: %v", r)
	}
	must(t, h.Host(), "rm", "/run/c.yaml")
	h.unchanged(before)
	h.attach(endpoints, []string{"--resolver", "none"})
	if r := h.run("detach"); r.code != 0 || strings.Contains(r.stdout, "linger") {
		t.Errorf("--resolver none: %v", r)
	}
	h.unchanged(before)
	if r := h.run("detach", "--linger", "-1s"); r.code != 2 || !strings.Contains(r.stderr, "linger -1s") {
		t.Errorf("--linger -1s: %v", r)
	}
}

// TestSignalDoesNotLinger: who sends one, a supervisor or a shutdown, waits for the end.
func TestSignalDoesNotLinger(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	h.signal("TERM", h.healthy().PID)
	h.gone()
	h.unchanged(before)

	h.attach()
	h.leave()
	h.signal("TERM", h.lingers())
	h.gone()
	h.unchanged(before)
}

// TestAttachWhileLingering: the new daemon takes the sockets over, whatever its settings are; the old one ends.
func TestAttachWhileLingering(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	h.leave()
	old := h.lingers()

	// One that fails leaves everything as it is, and has not come between.
	attached := h.snapshot()
	if r := h.run(attachArgs("--dry-run")...); r.code != 0 || !strings.Contains(r.stdout, "listen on 127.0.0.1:53") {
		t.Errorf("the plan: %v", r)
	}
	if r := h.run("attach", "--dns-endpoint", "172.20.0.77", "--wait", "2s"); r.code != 1 || !strings.Contains(r.stderr, "self-test") {
		t.Errorf("attach to nothing: %v", r)
	}
	if d := lab.Diff(attached, h.snapshot()); d != "" {
		t.Errorf("the attach that failed has changed:\n%s", d)
	}
	if now := h.lingers(); now != old {
		t.Fatalf("process %d lingers, it was %d", now, old)
	}

	h.attach(endpoints, ranges, []string{"--no-bpf"})
	if now := h.healthy(); now.PID == old || now.Lingering != nil || len(now.Forwarder.Listen) != 3 {
		t.Errorf("after the attach: %+v", now)
	}
	eventually(t, "the old daemon has ended", func() error {
		if r := command(t, h.Host(), "sh", "-c", "kill -0 "+strconv.Itoa(old)); r.code == 0 {
			return errors.New("it runs")
		}
		return nil
	})
	h.works()
	h.leave()
	h.lingers()
	h.attach()
	h.works()
	h.detach()
	h.unchanged(before)
}

// TestLingererKilled: what a daemon leaves that is killed while it lingers is in nobody's way.
func TestLingererKilled(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	killed := func() {
		t.Helper()
		h.attach()
		h.leave()
		h.signal("KILL", h.lingers())
		eventually(t, "it does not linger", func() error {
			if h.status().Lingering != nil {
				return errors.New("it does")
			}
			return nil
		})
	}
	killed()
	if r := h.run("detach"); r.code != 0 || !strings.Contains(r.stdout, "not attached") {
		t.Errorf("detach: %v", r)
	}
	h.unchanged(before)
	killed()
	if r := h.run("attach", "--dns-endpoint", "172.20.0.77", "--wait", "1s"); r.code != 1 {
		t.Errorf("attach to nothing: %v", r)
	}
	h.unchanged(before)
	killed()
	h.attach()
	h.works()
	h.detach()
	h.unchanged(before)
}

// TestLingererStopped: one that can't answer is reported, and can be ended.
func TestLingererStopped(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	h.leave()
	h.signal("STOP", h.lingers())
	for _, args := range [][]string{attachArgs(), {"detach"}} {
		if r := h.run(args...); r.code != 1 || !strings.Contains(r.stderr, "detach --linger 0") {
			t.Errorf("%s: %v", args[0], r)
		}
	}
	if r := h.run("status"); r.code != 3 || !strings.Contains(r.stdout, "lingers and does not answer") {
		t.Errorf("status: %v", r)
	}
	if r := h.run("detach", "--linger", "0"); r.code != 0 || !strings.Contains(r.stdout, "no longer lingers") {
		t.Errorf("detach --linger 0: %v", r)
	}
	h.unchanged(before)
}
