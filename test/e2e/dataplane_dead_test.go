package e2e

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestDeadDaemon: the host keeps resolving, over UDP, while its daemon is stopped or killed.
func TestDeadDaemon(t *testing.T) {
	t.Parallel()
	for _, signal := range []string{"STOP", "KILL"} {
		t.Run(signal, func(t *testing.T) {
			h := raise(t, lab.Options{})
			h.attach(endpoints, ranges, pods("cni0"))
			before := h.dataplane()
			for range 5 {
				resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
			}
			if n := h.dataplane().rose(before, "host", "steered_fallback"); n != 0 {
				t.Fatalf("steered_fallback rose by %d beside a living daemon", n)
			}
			pid := h.healthy().PID
			cluster := startLoad(t, h.Host(), hostDNS, lab.Backend, lab.Backend4, 5*time.Millisecond)
			h.signal(signal, pid)
			begin := time.Now()
			eventually(t, "an external name resolves without the daemon", func() error {
				raw, err := ask(h.Host(), hostDNS, pack(t, 5, lab.WWW, dns.TypeA), silence)
				if err != nil { // the forwarder's socket is closed when it is killed
					return err
				}
				return isAddress(raw, lab.WWW4)
			})
			t.Logf("external names resolve again %s after SIG%s", time.Since(begin).Round(time.Millisecond), signal)
			before = h.dataplane()
			outside := queries(t, h.outside()...)
			const rounds = 20
			for range rounds {
				resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
				resolve(t, h.Worker(), switchDNS, lab.WWW, lab.WWW4)
			}
			after := h.dataplane()
			for _, scope := range []string{"host", "kubeswitch"} {
				if n := after.rose(before, scope, "steered_fallback"); n != rounds {
					t.Errorf("%s: steered_fallback rose by %d, want %d", scope, n, rounds)
				}
			}
			if n := queries(t, h.outside()...) - outside; n != 2*rounds {
				t.Errorf("the former upstreams saw %d queries, want %d", n, 2*rounds)
			}
			if after.Healthy || len(after.Problems) == 0 {
				t.Errorf("status calls a dead daemon healthy")
			}
			// An answer that does not fit is told so; nothing serves the retry over TCP. So the documentation says.
			m := new(dns.Msg).SetQuestion(lab.BigExternal, dns.TypeTXT)
			m.SetEdns0(4096, false)
			if reply, err := h.Host().Exchange(t.Context(), "udp", hostDNS, m); err != nil || !reply.Truncated {
				t.Errorf("want TC=1, got %v %v", reply, err)
			}
			if reply, err := h.Host().Query(t.Context(), "tcp", hostDNS, lab.WWW, dns.TypeA); err == nil {
				t.Errorf("TCP has been answered: by whom? %v", reply)
			}
			cluster.more(t, 50)
			if _, lost, failed := cluster.finish(); len(lost) > 0 || failed > 0 {
				t.Errorf("cluster names: %d lost, %d wrong", len(lost), failed)
			}
			// A name in a zone never goes outside, dead daemon or not.
			outside = queries(t, h.outside()...)
			for range 20 {
				raw, err := ask(h.Host(), hostDNS, pack(t, 5, "missing.cluster.local.", dns.TypeA), patience)
				var reply dns.Msg
				if err := errors.Join(err, reply.Unpack(raw)); err != nil || reply.Rcode != dns.RcodeNameError {
					t.Errorf("want NXDOMAIN, got %v %v", &reply, err)
				}
			}
			if n := queries(t, h.outside()...) - outside; n != 0 {
				t.Errorf("the former upstreams saw %d queries for cluster names", n)
			}

			begin = time.Now()
			if signal == "STOP" {
				h.signal("CONT", pid)
			} else {
				h.attach(endpoints, ranges, pods("cni0"))
			}
			eventually(t, "the forwarder has external names again", func() error {
				before := h.dataplane()
				resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
				if n := h.dataplane().rose(before, "host", "steered_fallback"); n > 0 {
					return fmt.Errorf("steered_fallback rose by %d", n)
				}
				return nil
			})
			t.Logf("the fallback has ended %s after the daemon was back", time.Since(begin).Round(time.Millisecond))
			h.ours() // a stopped one is without its resolver file, after some time
			if m, err := h.Host().Query(t.Context(), "tcp", hostDNS, lab.WWW, dns.TypeA); err != nil || len(m.Answer) != 1 {
				t.Errorf("TCP: %v %v", m, err)
			}
		})
	}
}

// TestDeadDaemonOneUpstream: of two former upstreams one is dead too. A client that tries again gets its answer.
func TestDeadDaemonOneUpstream(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	if err := h.External(0).Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	pid := h.healthy().PID
	h.signal("STOP", pid)
	t.Cleanup(func() { h.signal("CONT", pid) })
	eventually(t, "an external name resolves", func() error {
		raw, err := ask(h.Host(), hostDNS, pack(t, 5, lab.WWW, dns.TypeA), silence)
		if err != nil {
			return err
		}
		return isAddress(raw, lab.WWW4)
	})
}
