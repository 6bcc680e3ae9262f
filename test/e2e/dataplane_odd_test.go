package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestFragmentedQuery: a query in pieces is put together by the stack and served by user space, which asks who sent it.
func TestFragmentedQuery(t *testing.T) {
	h := raise(t, lab.Options{})
	h.straySubnet()
	h.attach()
	sh(t, h.Worker(), "ip route add "+lab.KubeSwitch4+"/32 dev eth0 mtu lock 200")
	long := plain(lab.Backend, dns.TypeA, edns(1232, &dns.EDNS0_PADDING{Padding: make([]byte, 350)}))
	fragments := h.fragments()
	before := h.dataplane()
	raw, err := askAs(h.Worker(), lab.Worker4, switchDNS, long, patience)
	if err := errors.Join(err, isAddress(raw, lab.Backend4)); err != nil {
		t.Errorf("in three fragments: %v", err)
	}
	h.echo(lab.KubeSwitch4 + ":9999")
	for _, local := range []string{lab.Worker4, strayed} {
		raw, err := askAs(h.Worker(), local, netip.MustParseAddrPort(lab.KubeSwitch4+":9999"), long, patience)
		if err != nil || len(raw) != len(long) {
			t.Errorf("in fragments to another service from %s: %d bytes, %v", local, len(raw), err)
		}
	}
	if h.fragments() == fragments {
		t.Error("the query was not fragmented: this shows nothing")
	}
	if raw, err := askAs(h.Worker(), strayed, switchDNS, long, noReply); raw != nil || err != nil {
		t.Errorf("in fragments from outside the allowed prefixes: want no reply, got %s, %v", text(raw), err)
	}
	after := h.dataplane()
	if n := after.rose(before, "kubeswitch", "passed_fragment"); n < 3 {
		t.Errorf("passed_fragment rose by %d", n)
	}
	if n := after.rose(before, "kubeswitch", "steered"); n != 0 {
		t.Errorf("steered rose by %d", n)
	}
}

// TestIPOptions is the same for a header that is longer than usual.
func TestIPOptions(t *testing.T) {
	h := raise(t, lab.Options{})
	h.straySubnet()
	h.attach()
	with := func(local string) ([]byte, error) {
		conn, err := listenUDP(h.Worker(), local+":0")
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		control, err := conn.SyscallConn()
		if err != nil {
			return nil, err
		}
		var failed error
		if err := control.Control(func(fd uintptr) {
			failed = unix.SetsockoptString(int(fd), unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x00") // no operation
		}); err != nil || failed != nil {
			return nil, errors.Join(err, failed)
		}
		if _, err := conn.WriteToUDPAddrPort(pack(t, 1, lab.Backend, dns.TypeA), switchDNS); err != nil {
			return nil, err
		}
		m, err := receive(conn, switchDNS, noReply)
		if err != nil {
			return nil, err
		}
		return m.Pack()
	}
	before := h.dataplane()
	raw, err := with(lab.Worker4)
	if err := errors.Join(err, isAddress(raw, lab.Backend4)); err != nil {
		t.Errorf("with options: %v", err)
	}
	if raw, err := with(strayed); err == nil {
		t.Errorf("with options from outside the allowed prefixes: want no reply, got %s", text(raw))
	}
	if n := h.dataplane().rose(before, "kubeswitch", "steered"); n != 0 {
		t.Errorf("steered rose by %d", n)
	}
}

// TestPodsIPv6 is TestPods with the other IP version.
func TestPodsIPv6(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"cni0", "v*"} {
		t.Run(pattern, func(t *testing.T) {
			h := raise(t, lab.Options{})
			h.attach(endpoints, endpoints6, ranges, ranges6, []string{"--pods", pattern, "--cluster-dns", lab.KubeDNS6, "--cluster-dns", lab.KubeDNS4})
			before := h.dataplane()
			const rounds = 20
			for range rounds {
				resolve(t, h.Pod("app"), netip.AddrPortFrom(netip.MustParseAddr(lab.KubeDNS6), 53), lab.Backend, lab.Backend4)
				resolve(t, h.Pod("app"), clusterDNS, lab.Backend, lab.Backend4)
			}
			if n := h.dataplane().rose(before, "pod", "replied"); n != 2*rounds {
				t.Errorf("replied rose by %d, want %d", n, 2*rounds)
			}
		})
	}
}

// TestBridgesComeAndGo: the bridges of pods and workers are made anew while attached, as by a network that is restarted.
func TestBridgesComeAndGo(t *testing.T) {
	h := raise(t, lab.Options{})
	h.straySubnet()
	h.attach(endpoints, ranges, pods("cni0"))
	outside := queries(t, h.outside()...)
	sh(t, h.Host(), "ip link delete cni0; ip link delete kubeswitch")
	eventually(t, "the bridges are gone from status", func() error {
		if d := h.dataplane(); len(d.programs("cni0"))+len(d.programs("kubeswitch")) > 0 {
			return fmt.Errorf("%v %v", d.programs("cni0"), d.programs("kubeswitch"))
		}
		return nil
	})
	resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
	// Nothing answers; nothing may leak to the upstreams either.
	if raw, _ := ask(h.Host(), hostDNS, pack(t, 4, lab.Backend, dns.TypeA), noReply); isAddress(raw, lab.OutsideAnswer) == nil {
		t.Error("a cluster name was answered outside")
	}
	if n := queries(t, h.outside()...) - outside; n != 1 {
		t.Errorf("the external servers saw %d queries, want the one for %s", n, lab.WWW)
	}
	sh(t, h.Host(), `ip link add cni0 type bridge; ip address add `+lab.PodGateway4+`/16 dev cni0; ip link set cni0 up
		for port in vcoredns0 vcoredns1 vapp; do ip link set $port master cni0; done
		ip link add kubeswitch type bridge; ip address add `+lab.KubeSwitch4+`/24 dev kubeswitch; ip link set kubeswitch up
		ip link set vworker0 master kubeswitch
		ip route add 10.77.0.0/24 via `+lab.Worker4+` dev kubeswitch`)
	for _, from := range []struct {
		node   *lab.Node
		server netip.AddrPort
		scope  string
	}{{h.Host(), hostDNS, "host"}, {h.Worker(), switchDNS, "kubeswitch"}, {h.Pod("app"), clusterDNS, "pod"}} {
		eventually(t, "queries are steered again in scope "+from.scope, func() error {
			before := h.dataplane()
			raw, err := ask(from.node, from.server, pack(t, 4, lab.Backend, dns.TypeA), noReply)
			if err := errors.Join(err, isAddress(raw, lab.Backend4)); err != nil {
				return err
			}
			if n := h.dataplane().rose(before, from.scope, "replied"); n != 1 {
				return fmt.Errorf("replied rose by %d", n)
			}
			return nil
		})
	}
	eventually(t, "all is well", func() error {
		if d := h.dataplane(); !d.Healthy || !slices.Contains(d.programs("kubeswitch"), "dns_filter xdp/generic") {
			return fmt.Errorf("%q %v", d.Problems, d.programs("kubeswitch"))
		}
		return nil
	})
	h.refusedEverywhere(switchDNS)
	resolve(t, h.Worker(), switchDNS, lab.WWW, lab.WWW4)
}

// TestRetryOnTheOtherEndpoint: of two endpoints one hangs and is not known to. A client that repeats its query, from the
// same port and under the same ID as resolvers do, must get to the other one soon.
func TestRetryOnTheOtherEndpoint(t *testing.T) {
	h := raise(t, lab.Options{})
	var servers []*responder
	for i := range 2 {
		address := fmt.Sprintf("172.20.0.%d", 30+i)
		sh(t, h.Pod("app"), "ip address add "+address+"/16 dev eth0")
		servers = append(servers, respond(t, h.Pod("app"), address+":53", "172.21.0.86"))
	}
	h.attach(endpoint("172.20.0.30", "172.20.0.31"), ranges)
	servers[0].setHold(true) // and yet it answers probes, so it stays in rotation
	conn, err := listenUDP(h.Host(), "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const rounds = 100
	second := 0
	for id := uint16(1); id <= rounds; id++ {
		before := [2]int{len(servers[0].sees()), len(servers[1].sees())}
		for try := range 2 {
			if _, err := conn.WriteToUDPAddrPort(pack(t, id, lab.Backend, dns.TypeA), hostDNS); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the query has arrived", func() error {
				if n := len(servers[0].sees()) + len(servers[1].sees()) - before[0] - before[1]; n != try+1 {
					return fmt.Errorf("%d of %d", n, try+1)
				}
				return nil
			})
		}
		if len(servers[0].sees()) > before[0] && len(servers[1].sees()) > before[1] {
			second++
		}
	}
	if second != rounds {
		t.Errorf("of %d repeated queries %d went to the other endpoint", rounds, second)
	}
}

// TestAskersMark: a mark, which routes the packets of the asker's socket or of an endpoint's port, is not for the way on.
// Rules that steer marked packets elsewhere would lose a query, and a reply.
func TestAskersMark(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoints, endpoints6, ranges)
	sh(t, h.Host(), `
		ip rule add fwmark 7 lookup 100
		ip route add default via 172.20.0.99 dev cni0 table 100
		ip route add 172.19.1.0/24 via 172.19.1.99 dev kubeswitch table 100
		ip -6 rule add fwmark 7 lookup 100
		ip -6 route add default via fd00:20::99 dev cni0 table 100
		nft 'add table netdev marks'
		for port in vcoredns0 vcoredns1; do
			nft "add chain netdev marks $port { type filter hook ingress device $port priority 0; meta mark set 7; }"
		done`)
	before := h.dataplane()
	const rounds = 5
	for range rounds {
		for _, server := range []netip.AddrPort{hostDNS, hostDNS6} {
			raw, err := askMarked(h.Host(), server, 7, pack(t, 1, lab.Backend, dns.TypeA))
			if err := errors.Join(err, isAddress(raw, lab.Backend4)); err != nil {
				t.Errorf("a marked query to %s: %v", server, err)
			}
		}
		raw, err := ask(h.Worker(), switchDNS, pack(t, 1, lab.Backend, dns.TypeA), patience)
		if err := errors.Join(err, isAddress(raw, lab.Backend4)); err != nil {
			t.Errorf("a worker's query, of which the reply is marked: %v", err)
		}
	}
	after := h.dataplane()
	if host, worker := after.rose(before, "host", "replied"), after.rose(before, "kubeswitch", "replied"); host != 2*rounds || worker != rounds {
		t.Errorf("%d and %d replies by the kernel's path, want %d and %d", host, worker, 2*rounds, rounds)
	}
}

// askMarked is ask from a socket with a mark.
func askMarked(from *lab.Node, server netip.AddrPort, mark int, payload []byte) ([]byte, error) {
	conn, err := listenUDP(from, netip.AddrPortFrom(server.Addr(), 0).String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	control, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var failed error
	if err := control.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark)
	}); err != nil || failed != nil {
		return nil, errors.Join(err, failed)
	}
	if _, err := conn.WriteToUDPAddrPort(payload, server); err != nil {
		return nil, err
	}
	m, err := receive(conn, server, noReply)
	if err != nil {
		return nil, err
	}
	return m.Pack()
}

// TestSteeredOnlyLost: where CoreDNS can be asked, but what is steered gets lost, attach does not send one to look after
// CoreDNS.
func TestSteeredOnlyLost(t *testing.T) {
	h := raise(t, lab.Options{})
	sh(t, h.Host(), `
		nft 'add table netdev lossy'
		for port in vcoredns0 vcoredns1; do
			nft "add chain netdev lossy $port { type filter hook ingress device $port priority 0; udp sport 53 udp dport < 32768 drop; }"
		done`)
	r := h.run(append(append([]string{"attach", "--wait", "3s"}, endpoints...), ranges...)...)
	if r.code != 1 || !strings.Contains(r.stderr, "answers when it is asked directly") || !strings.Contains(r.stderr, "cni0") {
		t.Errorf("want a reason: %v", r)
	}
}
