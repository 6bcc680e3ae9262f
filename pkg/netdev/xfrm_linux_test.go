package netdev

import (
	"context"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
)

// ip runs ip(8) in the test's namespace: the thread is its own.
func ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// All that decides whether a policy is about a flow.
func TestIPsec(t *testing.T) {
	newNamespace(t)
	up(t, "lo")
	index := addInterface(t, "eth0", "172.20.0.1/24", "fd00:20::1/64")
	flow := func(from, to string) Flow {
		return Flow{
			From: netip.MustParsePrefix(from), To: netip.MustParsePrefix(to), FromPorts: PortRange{1024, 17407}, ToPorts: PortRange{53, 53}, Ifindex: index,
		}
	}
	four, six := flow("172.20.0.1/32", "172.20.0.10/32"), flow("fd00:20::1/128", "fd00:20::10/128")
	clients := Flow{
		From: four.From, To: netip.MustParsePrefix("172.20.0.0/24"), FromPorts: PortRange{53, 53}, ToPorts: PortRange{1, 65535}, Ifindex: index,
	}
	const esp = " tmpl proto esp mode transport"
	for _, c := range []struct {
		name     string
		policies []string // of ip xfrm policy
		flow     Flow
		sends    string
		accepts  string
	}{
		{"none", nil, four, "", ""},
		{"host to host", []string{"add src 172.20.0.1 dst 172.20.0.10 dir out" + esp}, four, "under an IPsec policy", ""},
		{"subnets", []string{"add src 0.0.0.0/0 dst 172.20.0.0/16 dir out" + esp}, four, "under an IPsec policy", ""},
		{"tunnel", []string{"add dst 172.20.0.0/16 dir out tmpl src 172.20.0.1 dst 192.0.2.1 proto esp mode tunnel"}, four, "under an IPsec policy", ""},
		{"IPv6", []string{"add src ::/0 dst fd00:20::/64 dir out" + esp}, six, "under an IPsec policy", ""},
		{"of the other family", []string{"add src ::/0 dst ::/0 dir out" + esp}, four, "", ""},
		{"other destination", []string{"add dst 172.20.0.11 dir out" + esp}, four, "", ""},
		{"other source", []string{"add src 172.20.0.2 dst 172.20.0.10 dir out" + esp}, four, "", ""},
		{"only replies", []string{"add src 172.20.0.10 dst 172.20.0.1 dir in" + esp}, four, "", "under an IPsec policy"},
		{"replies in the clear too", []string{"add src 172.20.0.10 dst 172.20.0.1 dir in" + esp + " level use"}, four, "", ""},
		{"forwarded", []string{"add dst 172.20.0.10 dir fwd" + esp}, four, "", ""},
		{"UDP", []string{"add dst 172.20.0.10 proto udp dir out" + esp}, four, "under an IPsec policy", ""},
		{"TCP", []string{"add dst 172.20.0.10 proto tcp dir out" + esp}, four, "", ""},
		{"port 53", []string{"add dst 172.20.0.10 proto udp dport 53 dir out" + esp}, four, "under an IPsec policy", ""},
		{"port 54", []string{"add dst 172.20.0.10 proto udp dport 54 dir out" + esp}, four, "", ""},
		{"a NAT port", []string{"add dst 172.20.0.10 proto udp sport 2000 dir out" + esp}, four, "under an IPsec policy", ""},
		{"no NAT port", []string{"add dst 172.20.0.10 proto udp sport 500 dir out" + esp}, four, "", ""},
		{"interface", []string{"add dst 172.20.0.10 dev eth0 dir out" + esp}, four, "under an IPsec policy", ""},
		{"other interface", []string{"add dst 172.20.0.10 dev lo dir out" + esp}, four, "", ""},
		{"mark", []string{"add dst 172.20.0.10 dir out mark 5 mask 0xff" + esp}, four, "", ""},
		{"mark zero", []string{"add dst 172.20.0.10 dir out mark 0 mask 0xff" + esp}, four, "under an IPsec policy", ""},
		{"xfrm interface", []string{"add dst 172.20.0.10 dir out if_id 7" + esp}, four, "", ""},
		{"exempt", []string{"add dst 0.0.0.0/0 dir out priority 200" + esp, "add dst 172.20.0.0/16 dir out priority 100"}, four, "", ""},
		{"exempt too late", []string{"add dst 0.0.0.0/0 dir out priority 100" + esp, "add dst 172.20.0.0/16 dir out priority 200"}, four, "under an IPsec policy", ""},
		{"blocked", []string{"add dst 172.20.0.10 dir out action block"}, four, "blocked by an IPsec policy", ""},
		{"replies blocked", []string{"add src 172.20.0.10 dir in action block"}, four, "", "blocked by an IPsec policy"},
		{"default", []string{"setdefault out block in block"}, four, "blocked by the default IPsec policy", "blocked by the default IPsec policy"},
		{"default, exempt", []string{"setdefault out block in block", "add dst 172.20.0.10 dir out", "add src 172.20.0.10 dir in"}, four, "", ""},
		{"one of many clients", []string{"add dst 172.20.0.77 dir out" + esp}, clients, "under an IPsec policy", ""},
		{"one exempt of all", []string{"add dst 172.20.0.77 dir out priority 1", "add dst 172.20.0.0/16 dir out priority 2" + esp}, clients, "under an IPsec policy", ""},
		{"all exempt", []string{"add dst 172.20.0.0/16 dir out priority 1", "add dst 0.0.0.0/0 dir out priority 2" + esp}, clients, "", ""},
		{"a port exempt", []string{"add dst 172.20.0.0/16 proto udp dport 9 dir out priority 1", "add dst 0.0.0.0/0 dir out priority 2" + esp}, clients, "under an IPsec policy", ""},
	} {
		// No subtests: they would run on other threads than the one that is in the namespace.
		ip(t, "xfrm", "policy", "flush")
		ip(t, "xfrm", "policy", "setdefault", "in", "accept", "fwd", "accept", "out", "accept")
		for _, policy := range c.policies {
			ip(t, append([]string{"xfrm", "policy"}, strings.Fields(policy)...)...)
		}
		db, err := LookUpIPsec()
		if err != nil {
			t.Fatal(err)
		}
		if got := db.Sends(c.flow); got != c.sends {
			t.Errorf("%s: sends: %q, want %q", c.name, got, c.sends)
		}
		if got := db.Accepts(c.flow.Reverse()); got != c.accepts {
			t.Errorf("%s: accepts: %q, want %q", c.name, got, c.accepts)
		}
	}
}

// What the stack does on a route and a redirect would not.
func TestRouteBypass(t *testing.T) {
	newNamespace(t)
	up(t, "lo")
	addInterface(t, "eth0", "172.20.0.1/24", "fd00:20::1/64")
	addInterface(t, "eth1", "172.30.0.1/24")
	wants := map[string]string{"172.20.0.10": "", "fd00:20::10": "", "172.32.0.10": "encapsulation", "fd00:32::10": "encapsulation"}
	if err := exec.Command("ip", "link", "add", "red", "up", "type", "vrf", "table", "7").Run(); err != nil {
		t.Logf("this kernel has no VRF: %v", err)
	} else {
		ip(t, "address", "add", "172.30.0.2/32", "dev", "red")
		ip(t, "route", "add", "172.31.0.0/24", "dev", "red")
		wants["172.31.0.10"] = "VRF"
	}
	ip(t, "route", "add", "172.32.0.0/24", "encap", "ip", "id", "7", "dst", "172.20.0.9", "via", "172.20.0.9", "dev", "eth0")
	ip(t, "route", "add", "fd00:32::/64", "encap", "ip6", "id", "7", "dst", "fd00:20::9", "via", "fd00:20::9", "dev", "eth0")
	for to, want := range wants {
		if route, err := RouteTo(netip.MustParseAddr(to)); err != nil || want == "" && route.Bypass != "" || !strings.Contains(route.Bypass, want) {
			t.Errorf("RouteTo(%s) = %+v, %v; want %q", to, route, err, want)
		}
	}
}

// A link-local address has its way in its zone.
func TestRouteToZone(t *testing.T) {
	newNamespace(t)
	up(t, "lo")
	addInterface(t, "eth0", "fe80::1/64")
	index := addInterface(t, "eth1", "fe80::2/64")
	want := Route{Interface: "eth1", Ifindex: index, Source: netip.MustParseAddr("fe80::2"), Ethernet: true}
	route, err := RouteTo(netip.MustParseAddr("fe80::10%eth1"))
	addresses, _ := PrefixesOf("eth1")
	if err != nil || route.Ifindex != want.Ifindex || route.Interface != "eth1" || !strings.Contains(join(addresses), route.Source.String()) {
		t.Errorf("RouteTo = %+v, %v; want %+v", route, err, want)
	}
	if _, err := RouteTo(netip.MustParseAddr("fe80::10%eth9")); err == nil {
		t.Error("a route by way of an interface that is not there")
	}
}

func join(prefixes []netip.Prefix) (text string) {
	for _, p := range prefixes {
		text += p.Addr().String() + " "
	}
	return text
}

// Policies come and go with events.
func TestIPsecChanges(t *testing.T) {
	newNamespace(t)
	up(t, "lo")
	ctx, cancel := context.WithCancel(t.Context())
	changes, err := Changes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range []string{
		"add dst 172.20.0.10 dir out tmpl proto esp", "update dst 172.20.0.10 dir out", "delete dst 172.20.0.10 dir out",
		"setdefault out block", "add dst 172.20.0.11 dir out", "flush",
	} {
		ip(t, append([]string{"xfrm", "policy"}, strings.Fields(change)...)...)
		if _, open := <-changes; !open {
			t.Fatal("the channel ended before its context")
		}
	}
	cancel()
	for range changes {
		// what was told before the end
	}
}
