package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestPodNetworkGone: when the interface to the pods is gone (k2s stop, a reset), the default route leads to their
// addresses. Whoever has them outside is not asked, and not believed.
func TestPodNetworkGone(t *testing.T) {
	for name, c := range map[string]struct{ away, back string }{
		"down":         {"ip link set cni0 down", "ip link set cni0 up; ip -6 address replace fd00:20::1/64 dev cni0 nodad"},
		"without both": {"ip address flush dev cni0", "ip address add 172.20.0.1/16 dev cni0; ip address add fd00:20::1/64 dev cni0 nodad"},
		"down, with a site's wide route": {"ip link set cni0 down; ip route add 172.16.0.0/12 via " + lab.Outside4,
			"ip route del 172.16.0.0/12; ip link set cni0 up; ip -6 address replace fd00:20::1/64 dev cni0 nodad"},
		"deleted": {"ip link del cni0", "ip link add cni0 address 52:54:00:00:00:02 type bridge; ip link set cni0 up; " +
			"ip address add 172.20.0.1/16 dev cni0; ip address add fd00:20::1/64 dev cni0 nodad; " +
			"for port in vcoredns0 vcoredns1 vapp; do ip link set $port master cni0; done"},
	} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			out := h.Ext()
			sh(t, out, fmt.Sprintf("ip address add %s/32 dev lo; ip -6 address add %s/128 dev lo nodad", lab.CoreDNS0v4, lab.CoreDNS0v6))
			liars := []*responder{
				respond(t, out, lab.CoreDNS0v4+":53", "198.51.100.66"), respond(t, out, "["+lab.CoreDNS0v6+"]:53", "198.51.100.66"),
			}
			h.attach(endpoint(lab.CoreDNS0v4, lab.CoreDNS0v6), ranges, []string{"--wait", "10s"})
			h.works()
			sh(t, h.Host(), c.away)
			eventually(t, "nobody is asked", func() error {
				r := h.dataplane()
				for _, e := range r.Endpoints {
					if e.Healthy || !strings.Contains(e.Note, "only the default route") {
						return fmt.Errorf("endpoint %+v", e)
					}
				}
				if r.Healthy || !strings.Contains(strings.Join(r.Problems, "\n"), "is not asked") {
					return fmt.Errorf("problems: %v", r.Problems)
				}
				return nil
			})
			before := len(liars[0].sees()) + len(liars[1].sees())
			for _, flag := range []string{"+notcp", "+tcp"} {
				r := command(t, h.Host(), "dig", "@127.0.0.1", flag, "+tries=1", "+time=5", "secret."+lab.Zone)
				if !strings.Contains(r.stdout, "SERVFAIL") {
					t.Errorf("%s: %v", flag, r)
				}
			}
			if after := len(liars[0].sees()) + len(liars[1].sees()); after != before {
				t.Errorf("the other host was asked %d times", after-before)
			}
			sh(t, h.Host(), c.back)
			eventually(t, "all is well again", func() error {
				if r := h.status(); !r.Healthy {
					return errors.New(strings.Join(r.Problems, "\n"))
				}
				return nil
			})
			h.works()
		})
	}
}

// TestPodsBehindTheDefaultRoute: where pods never had an interface of their own on this host, the default route is the way.
func TestPodsBehindTheDefaultRoute(t *testing.T) {
	h := raise(t, lab.Options{})
	const far = "10.244.7.10"
	sh(t, h.Ext(), "ip address add "+far+"/32 dev lo")
	r := respond(t, h.Ext(), far+":53", lab.Backend4)
	h.attach(endpoint(far), []string{"--pod-cidr", "10.244.0.0/16"})
	h.healthy()
	h.steers(hostDNS, lab.Backend4)
	if len(r.sees()) == 0 {
		t.Error("the endpoint was not asked")
	}
}

// TestKubeSwitchIsAdded: an address that comes after the attach is served, also if it is named and not there at first, and
// again when its interface was made anew, renamed, or is another.
func TestKubeSwitchIsAdded(t *testing.T) {
	for name, args := range map[string][]string{"default": nil, "named": {"--kubeswitch-address", lab.KubeSwitch4}} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			host := h.Host()
			sh(t, host, "ip link del kubeswitch")
			h.attach(endpoints, ranges, args)
			if r := h.status(); r.Healthy != (args == nil) || args != nil && !strings.Contains(r.Problems[0], lab.KubeSwitch4) {
				t.Errorf("problems: %v", r.Problems)
			}
			pid := h.answered().PID
			served := func(what, iface string) {
				t.Helper()
				eventually(t, what, func() error {
					r := h.status()
					if !r.Healthy || !slices.Contains(r.Forwarder.Listen, switchDNS.String()) {
						return fmt.Errorf("listens on %v, problems %v", r.Forwarder.Listen, r.Problems)
					}
					if programs := strings.Join(h.dataplane().programs(iface), " "); !strings.Contains(programs, "dns_from_client") {
						return fmt.Errorf("on %s: %s", iface, programs)
					}
					return nil
				})
				before := h.dataplane()
				wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend)
				wantAnswer(t, h.Worker(), lab.WWW4, lab.WWW)
				wantAnswer(t, h.Worker(), lab.Backend4, "+tcp", lab.Backend)
				if n := h.dataplane().rose(before, "kubeswitch", "replied"); n != 1 {
					t.Errorf("%s: %d were steered, want 1", what, n)
				}
			}
			const bridge = "ip link add %[1]s address 52:54:00:00:00:01 type bridge; ip link set %[1]s up; ip link set vworker0 master %[1]s; " +
				"ip address add " + lab.KubeSwitch4 + "/24 dev %[1]s"
			sh(t, host, fmt.Sprintf(bridge, "kubeswitch"))
			served("it comes", "kubeswitch")
			sh(t, host, "ip link del kubeswitch; "+fmt.Sprintf(bridge, "kubeswitch"))
			served("it is made anew", "kubeswitch")
			sh(t, host, "ip link set kubeswitch down; ip link set kubeswitch name switch0; ip link set switch0 up")
			served("it is renamed", "switch0")
			sh(t, host, "ip link del switch0; "+fmt.Sprintf(bridge, "br7"))
			served("it moves", "br7")
			if now := h.healthy().PID; now != pid {
				t.Errorf("process %d, was %d", now, pid)
			}
		})
	}
}
