package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// discovered are the arguments of an attach that finds its endpoints in the lab's cluster.
var discovered = []string{"--kubeconfig", cluster.HostKubeconfig}

// TestKubernetesPodsBesideKubeProxy is TestPods with the rules of a real kube-proxy, and the addresses of a real apiserver.
func TestKubernetesPodsBesideKubeProxy(t *testing.T) {
	t.Parallel()
	for _, mode := range []cluster.ProxyMode{cluster.ProxyNFTables, cluster.ProxyIPTables} {
		t.Run(string(mode), func(t *testing.T) {
			h := raise(t, lab.Options{})
			c := cluster.Start(t, h.Lab, cluster.Options{Proxy: mode})
			if err := c.CreateDNS(t.Context()); err != nil {
				t.Fatal(err)
			}
			h.awaitServiceAddress()
			for _, pattern := range []string{"cni0", "v*"} {
				for _, bridged := range []string{"0", "1"} {
					t.Run(fmt.Sprintf("%s bridged=%s", pattern, bridged), func(t *testing.T) {
						h := h.in(t)
						if err := h.Host().SetSysctl(callIPTables, bridged); errors.Is(err, os.ErrNotExist) {
							t.Skip("no br_netfilter in this kernel")
						} else if err != nil {
							t.Fatal(err)
						}
						// Client and endpoint are on one bridge, and kube-proxy doesn't masquerade between Pods: without br_netfilter
						// the endpoint's answer goes past the translation, with us or without. Only what is steered works there.
						whole := bridged == "1"
						if _, err := h.Pod("app").Query(t.Context(), "tcp", clusterDNS, lab.Backend, dns.TypeA); (err == nil) != whole {
							t.Fatalf("before the attach: %v", err)
						}
						before := h.snapshot()
						sh(t, h.Host(), "conntrack -F 2>&1") // of what asked before
						h.attach(discovered, ranges, []string{"--pods", pattern})
						h.podQueries(pattern == "cni0" && bridged == "1", true, whole)
						resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
						resolve(t, h.Host(), clusterDNS, lab.Backend, lab.Backend4) // by kube-proxy, as before
						h.detach()
						h.unchanged(before)
					})
				}
			}
		})
	}
}

// awaitServiceAddress waits until kube-proxy has programmed the address of kube-dns, which it announces nowhere.
func (h *host) awaitServiceAddress() {
	h.t.Helper()
	eventually(h.t, "kube-proxy serves "+lab.KubeDNS4+" and "+lab.KubeDNS6, func() error {
		for _, address := range []string{lab.KubeDNS4, lab.KubeDNS6} {
			server := netip.AddrPortFrom(netip.MustParseAddr(address), 53)
			if _, err := h.Host().Query(context.Background(), "tcp", server, lab.Backend, dns.TypeA); err != nil {
				return err
			}
		}
		return nil
	})
}
