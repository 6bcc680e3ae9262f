package lab_test

import (
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
	"github.com/miekg/dns"
)

func TestResolves(t *testing.T) {
	l := lab.Start(t, lab.Options{})
	for _, from := range []*lab.Node{l.Host(), l.Worker(), l.Pod("app")} {
		for _, network := range []string{"udp", "tcp"} {
			for _, server := range []*lab.Server{l.CoreDNS(0), l.CoreDNS(1)} {
				reply, err := from.Query(t.Context(), network, server.Addr4(), lab.Backend, dns.TypeA)
				if err != nil {
					t.Fatal(err)
				}
				t.Log(from.Name(), reply)
			}
		}
	}
}
