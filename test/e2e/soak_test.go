package e2e

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// soak is how long TestLongRunSoak goes on.
const soak = 10 * time.Minute

// TestLongRunSoak: programs look names up while all that may change on a living host does, in an order that the seed decides.
// No lookup fails, and the daemon has as many descriptors afterwards, and about as much memory.
func TestLongRunSoak(t *testing.T) {
	h := raiseAlone(t, lab.Options{})
	seed, _ := strconv.ParseUint(os.Getenv("K2S_SEED"), 10, 64)
	random := rand.New(rand.NewPCG(seed, 0))
	h.attach()
	pid := h.healthy().PID
	lookers := h.lookers()
	attach := func(more ...string) func() {
		return func() {
			if r := h.run(attachArgs(more...)...); r.code != 0 {
				t.Fatal(r)
			}
		}
	}
	var changed time.Time
	// foreign changes the resolver file, but not so often that it is left to whoever does that.
	foreign := func(script string) func() {
		return func() {
			if time.Since(changed) < 20*time.Second {
				return
			}
			changed = time.Now()
			must(t, h.Host(), "sh", "-ec", script)
			eventually(t, "it is taken over again", func() error {
				if content := h.read(resolvConf); !strings.Contains(content, "127.0.0.1") {
					return errors.New(content)
				}
				return nil
			})
		}
	}
	coreDNS := func(i int) func() {
		return func() {
			server := h.CoreDNS(i)
			if err := server.Pause(); err != nil {
				t.Fatal(err)
			}
			address := server.Addr4().String()
			eventually(t, address+" is known to be dead", func() error {
				if _, _, healthy := h.dataplane().endpoint(address); healthy {
					return errors.New("it counts as healthy")
				}
				return nil
			})
			if err := server.Resume(); err != nil {
				t.Fatal(err)
			}
		}
	}
	actions := []struct {
		name string
		do   func()
	}{
		{"other zones", attach("--zone", "cluster.local", "--zone", "other.test")},
		{"another upstream", attach("--upstream", lab.External1)},
		{"as at first", attach()},
		{"foreign file", foreign("echo nameserver " + lab.External1 + " >/etc/new; mv /etc/new /etc/resolv.conf")},
		{"foreign link", foreign("echo nameserver " + lab.External0 + " >/run/vpn.conf; ln -sf /run/vpn.conf /etc/resolv.conf")},
		{"CoreDNS pauses", coreDNS(random.IntN(2))},
		{"status", func() { h.run("status") }},
		{"doctor", func() { h.run("doctor") }},
	}
	type use struct{ descriptors, resident int }
	used := func() use {
		out := must(t, h.Host(), "sh", "-c", fmt.Sprintf("ls /proc/%d/fd | wc -l", pid))
		descriptors, err := strconv.Atoi(strings.TrimSpace(out))
		if err != nil {
			t.Fatal(err)
		}
		resident, _ := h.resident(pid)
		return use{descriptors, resident}
	}
	round := func() {
		for _, i := range random.Perm(len(actions)) {
			t.Log(actions[i].name)
			actions[i].do()
		}
	}
	round() // what is opened once is open now
	first, rounds := used(), 1
	for end := time.Now().Add(time.Duration(share(t, int(soak)))); time.Now().Before(end); rounds++ {
		round()
	}
	last := used()
	if now := h.healthy().PID; now != pid {
		t.Errorf("the daemon is another: %d, was %d", now, pid)
	}
	sum, failed, longest := endLookers(t, lookers)
	t.Logf("%d rounds, %d lookups, the longest took %s; at first %+v, at last %+v", rounds, sum, longest, first, last)
	if failed > 0 {
		t.Errorf("%d of %d lookups failed", failed, sum)
	}
	// Connections that are under way have descriptors too.
	if last.descriptors > first.descriptors+20 {
		t.Errorf("%d descriptors became %d", first.descriptors, last.descriptors)
	}
	if last.resident > first.resident+first.resident/2 {
		t.Errorf("%d KiB resident became %d", first.resident, last.resident)
	}
	h.detach()
}
