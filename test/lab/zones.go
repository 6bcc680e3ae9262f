package lab

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// zone is one zone file.
type zone struct {
	origin  string
	records []string
}

func zonePath(origin string) string { return "/run/lab/" + origin + "zone" }

// Names and addresses of the cluster, shaped as the Kubernetes DNS specification 1.1.0 asks for.
const (
	Zone          = "cluster.local."
	Backend       = "backend.default.svc.cluster.local."
	Backend4      = "172.21.0.20"
	Backend6      = "fd00:21::20"
	Kubernetes    = "kubernetes.default.svc.cluster.local."
	Kubernetes4   = "172.21.0.1"
	KubeDNS       = "kube-dns.kube-system.svc.cluster.local."
	Headless      = "headless.default.svc.cluster.local." // Headless4, one host name h<i> for each
	Big           = "big.default.svc.cluster.local."      // BigCount addresses: too long for 512 and for 1232 bytes
	BigCount      = 90
	External      = "external.default.svc.cluster.local." // a CNAME to www.example.com.
	WWW           = "www.example.com."                    // outside
	WWW4          = "203.0.113.80"
	WWW6          = "2001:db8:ff::80"
	BigExternal   = "big.example.com." // TXT, over 4 KiB
	OutsideAnswer = "198.51.100.1"     // what the outside says to any other name
)

// Headless4 are the addresses behind Headless, in the order of the host names h0, h1, h2.
var Headless4 = []string{"172.20.1.10", "172.20.1.11", "172.20.1.12"}

// clusterZones makes the zones that CoreDNS serves: what its kubernetes plugin would answer for a small cluster, with
// the TTL of 5 seconds that it gives. There is no NS record, since that plugin adds none to its answers either.
func clusterZones() []zone {
	cluster := zone{origin: Zone}
	reverse := map[string]*zone{}
	var order []*zone
	for _, origin := range []string{
		"21.172.in-addr.arpa.", "20.172.in-addr.arpa.", "1.2.0.0.0.0.d.f.ip6.arpa.", "0.2.0.0.0.0.d.f.ip6.arpa.",
	} {
		z := &zone{origin: origin}
		reverse[origin] = z
		order = append(order, z)
	}
	add := func(name, rdata string) { cluster.records = append(cluster.records, name+" 5 IN "+rdata) }
	host := func(name, addr string) {
		kind := "A"
		if netip.MustParseAddr(addr).Is6() {
			kind = "AAAA"
		}
		add(name, kind+" "+addr)
		ptr, err := dns.ReverseAddr(addr)
		if err != nil {
			panic(err) // the addresses are the constants of this file
		}
		for origin, z := range reverse {
			if dns.IsSubDomain(origin, ptr) {
				z.records = append(z.records, ptr+" 5 IN PTR "+name)
			}
		}
	}
	service := func(name string, ports map[string]int, addrs ...string) {
		for _, a := range addrs {
			host(name, a)
		}
		for port, number := range ports {
			add(port+"."+name, fmt.Sprintf("SRV 0 100 %d %s", number, name))
		}
	}
	add("dns-version."+Zone, `TXT "1.1.0"`)
	service(Kubernetes, map[string]int{"_https._tcp": 443}, Kubernetes4)
	service(KubeDNS, map[string]int{"_dns._udp": 53, "_dns-tcp._tcp": 53}, KubeDNS4, KubeDNS6)
	service(Backend, map[string]int{"_http._tcp": 80}, Backend4, Backend6)
	for i, a := range Headless4 {
		add(Headless, "A "+a)
		instance := fmt.Sprintf("h%d.%s", i, Headless)
		host(instance, a)
		add("_http._tcp."+Headless, "SRV 0 33 8080 "+instance)
	}
	for i := range BigCount {
		add(Big, fmt.Sprintf("A 172.20.2.%d", i+1))
	}
	add(External, "CNAME "+WWW)

	zones := []zone{cluster}
	for _, z := range order {
		zones = append(zones, *z)
	}
	return zones
}

// writeZones writes zone files with the time as their serial number, so that a later version is a newer one.
func writeZones(zones []zone) error {
	serial := uint32(time.Now().UnixMilli())
	for _, z := range zones {
		text := fmt.Sprintf("%s 5 IN SOA ns.dns.%s hostmaster.%s %d 7200 1800 86400 5\n%s\n",
			z.origin, z.origin, z.origin, serial, strings.Join(z.records, "\n"))
		if err := os.WriteFile(zonePath(z.origin), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// SetClusterRecords replaces what was added to the zone cluster.local of this CoreDNS before, and returns once it
// serves the new records, in zone file form with full names: "new.default.svc.cluster.local. 5 IN A 172.21.0.99".
func (s *Server) SetClusterRecords(ctx context.Context, records ...string) error {
	ask := func() (uint32, error) {
		reply, err := s.node.Query(ctx, "udp", s.Addr4(), Zone, dns.TypeSOA)
		if err != nil {
			return 0, err
		}
		for _, rr := range reply.Answer {
			if soa, ok := rr.(*dns.SOA); ok {
				return soa.Serial, nil
			}
		}
		return 0, fmt.Errorf("no SOA record in the reply of %s", s.name)
	}
	before, err := ask()
	if err != nil {
		return err
	}
	cluster := clusterZones()[0]
	cluster.records = append(cluster.records, records...)
	if err := s.node.Do(func() error { return writeZones([]zone{cluster}) }); err != nil {
		return err
	}
	// CoreDNS looks at the file at an interval and tells nobody when it has read it.
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for {
		now, err := ask()
		if err != nil || now != before {
			return err
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("wait until %s serves the new records: %w (is one of them malformed?): %s", s.name, ctx.Err(), s.Log())
		}
	}
}
