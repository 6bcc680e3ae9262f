//go:build linux

package datapath

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// TestHealFails: what could not be put back is still missed, and comes back once it can.
func TestHealFails(t *testing.T) {
	needTCX(t)
	pinDir := newNamespace(t)
	eth := addInterface(t, "eth0")
	d := inUse(t, pinDir, eth)
	d.options.TrafficControl = refusing{} // which would take what a kernel without TCX is given
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	var foreign link.Link
	for name, c := range map[string]struct {
		a             Attachment
		hinder, allow func() error
		err           error
	}{
		"another XDP program": {
			Attachment{IngressFilter, "eth0", eth, false},
			func() (err error) {
				foreign, err = link.AttachXDP(link.XDPOptions{Interface: eth, Program: foreignXDP(t)})
				return err
			},
			func() error { return foreign.Close() },
			unix.EBUSY,
		},
		"no descriptors": {
			Attachment{FromHost, "lo", loIfindex, true},
			func() error { return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: limit.Max}) }, // all are in use
			func() error { return unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) },
			unix.EMFILE,
		},
	} {
		// No subtest: this thread has the namespaces.
		detachLink(t, d, c.a)
		if err := c.hinder(); err != nil {
			t.Fatal(err)
		}
		err := d.Heal()
		wrong := strings.Join(d.Verify(), "; ")
		again := d.Heal()
		if err2 := c.allow(); err2 != nil {
			t.Fatal(err2)
		}
		if err == nil || again == nil || !errors.Is(err, c.err) {
			t.Errorf("%s: healed: %v, %v", name, err, again)
		}
		if len(d.filters) != 0 {
			t.Errorf("%s: filters on a kernel with TCX: %v", name, d.filters)
		}
		if !strings.Contains(wrong, c.a.String()) {
			t.Errorf("%s: after a heal that failed Verify says %q", name, wrong)
		}
		if err := d.Heal(); err != nil {
			t.Error(err)
		}
		if wrong := d.Verify(); len(wrong) != 0 || d.links[c.a] == nil {
			t.Errorf("%s: after all: %q, link %v", name, wrong, d.links[c.a])
		}
	}
}
