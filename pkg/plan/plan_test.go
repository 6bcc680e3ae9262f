package plan

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

var (
	endpointA = netip.MustParseAddrPort("172.20.0.10:53")
	endpointB = netip.MustParseAddrPort("172.20.0.11:53")
	endpointC = netip.MustParseAddrPort("[fd00:20::10]:5353")

	onBridge  = Way{Interface: "cni0", Ifindex: 5, Source: netip.MustParseAddr("172.20.0.1")}
	onVXLAN   = Way{Interface: "vxlan0", Ifindex: 7, Source: netip.MustParseAddr("172.20.0.2")}
	onUplink  = Way{Interface: "eth0", Ifindex: 2, Source: netip.MustParseAddr("192.0.2.9")}
	onBridge6 = Way{Interface: "cni0", Ifindex: 5, Source: netip.MustParseAddr("fd00:20::1")}
)

// endpointState is what a test says of an endpoint.
type endpointState int

const (
	living endpointState = iota
	dead
	noted       // the kernel can't steer to it
	notedOrDead // both
	severed     // what is steered to it is lost
)

func makeEndpoint(address netip.AddrPort, way Way, state endpointState) Endpoint {
	e := Endpoint{Endpoint: cluster.Endpoint{Address: address, Source: "test"}, Way: way}
	e.Dead = state == dead || state == notedOrDead
	e.Severed = state == severed
	if state == noted || state == notedOrDead {
		e.Note = "on this host"
	}
	return e
}

// Dead endpoints are out of rotation, and so are those that can't be steered to. Without any the forwarder is asked.
func TestBackends(t *testing.T) {
	addresses := []netip.AddrPort{endpointA, endpointB, endpointC}
	routes := []Way{onBridge, onVXLAN, onBridge6}
	for _, c := range []struct {
		name   string
		states []endpointState
		want   []int
	}{
		{"none", nil, nil},
		{"all live", []endpointState{living, living, living}, []int{0, 1, 2}},
		{"one dead", []endpointState{living, dead, living}, []int{0, 2}},
		{"one left", []endpointState{dead, dead, living}, []int{2}},
		{"all dead", []endpointState{dead, dead, dead}, nil},
		{"the only one dead", []endpointState{dead}, nil},
		{"a family dead", []endpointState{dead, dead, living}, []int{2}},
		{"a way severed", []endpointState{severed, living, dead}, []int{1}},
		{"all ways severed", []endpointState{severed, severed}, nil},
		{"one can't be steered to", []endpointState{noted, living, living}, []int{1, 2}},
		{"none can be steered to", []endpointState{noted, notedOrDead}, nil},
		// The forwarder asks the one that lives.
		{"those that can are dead", []endpointState{noted, dead, dead}, nil},
		{"all dead, one out of reach", []endpointState{notedOrDead, dead, dead}, nil},
		{"dead and out of reach", []endpointState{notedOrDead, dead, living}, []int{2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var endpoints []Endpoint
			for i, state := range c.states {
				endpoints = append(endpoints, makeEndpoint(addresses[i], routes[i], state))
			}
			var want []Backend
			for _, i := range c.want {
				want = append(want, Backend{Address: addresses[i], NATAddress: routes[i].Source, Ifindex: uint32(routes[i].Ifindex)})
			}
			if got := backends(endpoints); !slices.Equal(got, want) {
				t.Errorf("backends %+v, want %+v", got, want)
			}
		})
	}
}

func TestHooks(t *testing.T) {
	fromHost := Hook{FromHost, "lo", 1}
	backend := func(way Way) Hook { return Hook{FromBackend, way.Interface, way.Ifindex} }
	client := func(i Interface) Hook { return Hook{FromClient, i.Name, i.Index} }
	kubeSwitch := Interface{Name: "kubeswitch", Index: 3}
	bridge := Interface{Name: "cni0", Index: 5}
	veths := []Interface{{Name: "veth1", Index: 21, Bridge: 5}, {Name: "veth2", Index: 22, Bridge: 5}}
	for _, c := range []struct {
		name string
		d    Desired
		pods []Interface
		want []Hook
	}{
		{"nothing", Desired{}, nil, []Hook{fromHost}},
		{"one bridge for three", Desired{Endpoints: []Endpoint{
			makeEndpoint(endpointA, onBridge, living), makeEndpoint(endpointB, onBridge, living), makeEndpoint(endpointC, onBridge6, living),
		}}, nil, []Hook{backend(onBridge), fromHost}},
		// Its replies may be on their way, and it may come back.
		{"dead", Desired{Endpoints: []Endpoint{makeEndpoint(endpointA, onBridge, dead)}}, nil, []Hook{backend(onBridge), fromHost}},
		{"not steered to", Desired{Endpoints: []Endpoint{makeEndpoint(endpointA, onBridge, noted)}}, nil, []Hook{fromHost}},
		{"upstreams", Desired{
			Endpoints: []Endpoint{makeEndpoint(endpointA, onBridge, living)},
			Fallback:  []Endpoint{makeEndpoint(endpointB, onUplink, living), makeEndpoint(endpointC, onBridge6, living)},
		}, nil, []Hook{backend(onBridge), backend(onUplink), fromHost}},
		{"KubeSwitch", Desired{Endpoints: []Endpoint{makeEndpoint(endpointA, onBridge, living)}, KubeSwitch: kubeSwitch}, nil,
			[]Hook{backend(onBridge), fromHost, client(kubeSwitch)}},
		{"pods", Desired{Endpoints: []Endpoint{makeEndpoint(endpointA, onBridge, living), makeEndpoint(endpointB, onVXLAN, living)}}, veths,
			[]Hook{backend(onBridge), backend(onVXLAN), fromHost, client(veths[0]), client(veths[1])}},
		// An interface may have both: endpoints and clients behind it.
		{"bridge of both", Desired{Endpoints: []Endpoint{makeEndpoint(endpointA, onBridge, living)}, KubeSwitch: kubeSwitch}, []Interface{bridge},
			[]Hook{backend(onBridge), fromHost, client(kubeSwitch), client(bridge)}},
		{"pods' pattern has the KubeSwitch", Desired{KubeSwitch: kubeSwitch}, []Interface{kubeSwitch, veths[0], veths[0]},
			[]Hook{fromHost, client(kubeSwitch), client(veths[0])}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := Input{Facts: Facts{Pods: c.pods}}.hooks(c.d)
			if !slices.Equal(got, c.want) {
				t.Errorf("hooks\ngot  %v\nwant %v", got, c.want)
			}
		})
	}
}

func TestReplyViaOfPods(t *testing.T) {
	pods := []Interface{
		{Name: "veth1", Index: 21, Bridge: 5}, {Name: "cali1", Index: 22}, {Name: "veth2", Index: 23, Bridge: 6}, {Name: "cni0", Index: 5},
	}
	if got, want := replyVia(pods), map[uint32]uint32{21: 5, 23: 6}; !maps.Equal(got, want) {
		t.Errorf("replies leave through %v, want %v", got, want)
	}
	if got := replyVia(nil); len(got) != 0 {
		t.Errorf("without pods: %v", got)
	}
}

// facts are those of a host with a KubeSwitch and resolvers on loopback.
func facts() Facts {
	return Facts{
		Loopback6:  true,
		KubeSwitch: KubeSwitch{Interface: Interface{Name: "kubeswitch", Index: 3}, Subnets: []netip.Prefix{netip.MustParsePrefix("172.19.1.0/24")}},
		Resolver:   Resolver{Loopback: []netip.Addr{Loopback6, netip.MustParseAddr("127.0.0.53")}},
	}
}

func TestListeners(t *testing.T) {
	loopback, kubeSwitch := netip.MustParseAddrPort("127.0.0.1:53"), netip.MustParseAddrPort("172.19.1.1:53")
	loopback6, stub := netip.MustParseAddrPort("[::1]:53"), netip.MustParseAddrPort("127.0.0.53:53")
	service := netip.MustParseAddrPort("172.21.0.10:53")
	for name, c := range map[string]struct {
		change func(*Input)
		listen []netip.AddrPort
		kernel []Listener
	}{
		"host": {func(in *Input) { in.Facts.KubeSwitch = KubeSwitch{}; in.Facts.Loopback6 = false }, []netip.AddrPort{loopback},
			[]Listener{{loopback, ScopeHost}}},
		"all": {func(in *Input) {
			in.Facts.Pods = []Interface{{Name: "cni0", Index: 5}}
			in.Snapshot.ServiceIPs = []netip.Addr{service.Addr()}
		}, []netip.AddrPort{loopback, loopback6, kubeSwitch},
			[]Listener{{loopback, ScopeHost}, {loopback6, ScopeHost}, {kubeSwitch, ScopeKubeSwitch}, {service, ScopePod}}},
		"no KubeSwitch wanted": {func(in *Input) { in.Settings.NoKubeSwitch = true; in.Facts.KubeSwitch = KubeSwitch{} }, []netip.AddrPort{loopback, loopback6},
			[]Listener{{loopback, ScopeHost}, {loopback6, ScopeHost}}},
		"transparent": {func(in *Input) { in.Settings.Resolver = config.ResolverTransparent }, []netip.AddrPort{kubeSwitch},
			[]Listener{{kubeSwitch, ScopeKubeSwitch}, {loopback6, ScopeTransparent}, {stub, ScopeTransparent}}},
		"another server at the KubeSwitch address": {func(in *Input) { in.Facts.KubeSwitch.Holder = "dnsmasq" }, []netip.AddrPort{loopback, loopback6},
			[]Listener{{loopback, ScopeHost}, {loopback6, ScopeHost}, {kubeSwitch, ScopeShared}}},
		"its replies would go past IPsec": {func(in *Input) { in.Facts.KubeSwitch.Not = "IPsec" }, []netip.AddrPort{loopback, loopback6, kubeSwitch},
			[]Listener{{loopback, ScopeHost}, {loopback6, ScopeHost}}},
	} {
		t.Run(name, func(t *testing.T) {
			in := Input{Settings: config.Default(), Facts: facts()}
			c.change(&in)
			d, err := Make(in)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(d.Listen, c.listen) {
				t.Errorf("the forwarder listens on %v, want %v", d.Listen, c.listen)
			}
			if !slices.Equal(d.Kernel.Listeners, c.kernel) {
				t.Errorf("listeners %v, want %v", d.Kernel.Listeners, c.kernel)
			}
			if ours := slices.Contains(d.Listen, kubeSwitch); ours != (d.Kernel.IngressFilter.Index != 0) {
				t.Errorf("ingress filter on %v", d.Kernel.IngressFilter)
			}
		})
	}
}

// An address of the cluster's data that is intercepted for others, or is none, keeps its scope; the rest is followed.
func TestCollidingServiceAddresses(t *testing.T) {
	in := Input{Settings: config.Default(), Facts: facts()}
	in.Settings.Resolver = config.ResolverTransparent
	in.Facts.Pods = []Interface{{Name: "cni0", Index: 5}}
	for _, text := range []string{"127.0.0.1", "::1", "172.19.1.1", "127.0.0.53", "127.0.0.9", "0.0.0.0", "224.0.0.1", "fe80::1", "172.21.0.10", "fd00:21::a"} {
		in.Snapshot.ServiceIPs = append(in.Snapshot.ServiceIPs, netip.MustParseAddr(text))
	}
	left, notes := in.clusterDNS()
	if want := in.Snapshot.ServiceIPs[8:]; !slices.Equal(left, want) || len(notes) != 8 {
		t.Errorf("intercepted at %v, want %v; notes %q", left, want, notes)
	}
}

// What the cluster names and this host can't or must not ask is left out by itself.
func TestUnfitEndpoints(t *testing.T) {
	in := Input{Settings: config.Default(), Facts: facts()}
	in.Facts.Resolver.Upstreams = []netip.Addr{netip.MustParseAddr("192.0.2.53")}
	for address, want := range map[string]bool{
		"172.20.0.10:53": false, "172.19.1.1:53": true, "172.19.1.1:5353": false, "192.0.2.53:53": true, "192.0.2.54:53": false,
	} {
		e := makeEndpoint(netip.MustParseAddrPort(address), onBridge, living)
		if why := in.unfit(e); (why != "") != want {
			t.Errorf("%s: %q", address, why)
		}
		e.Source = cluster.SourceStatic
		if why := in.unfit(e); why != "" {
			t.Errorf("%s, which the user has named: %q", address, why)
		}
	}
	if e := makeEndpoint(endpointA, Way{Group: true}, noted); in.unfit(e) == "" {
		t.Error("a broadcast address is asked")
	}
}

// An endpoint that is astray is neither steered to nor asked, and status tells.
func TestAstray(t *testing.T) {
	in := Input{Settings: config.Default(), Snapshot: cluster.Snapshot{Endpoints: []cluster.Endpoint{{Address: endpointA}, {Address: endpointB}}}}
	astray := onUplink
	astray.Astray = "its network is gone"
	in.Facts.Ways = map[netip.Addr]Way{endpointA.Addr(): astray, endpointB.Addr(): onBridge}
	d, err := Make(in)
	if err != nil {
		t.Fatal(err)
	}
	only := []netip.AddrPort{endpointB}
	if !slices.Equal(d.Forward.Zones[config.DefaultZone], only) || !slices.Equal(d.Addresses(Endpoint.Asked), only) {
		t.Errorf("asked: %v by clients, %v by probes", d.Forward.Zones, d.Addresses(Endpoint.Asked))
	}
	if len(d.Kernel.Backends) != 1 || d.Kernel.Backends[0].Address != endpointB || slices.Contains(d.Kernel.Hooks, Hook{FromBackend, "eth0", 2}) {
		t.Errorf("steered to %v, hooks %v", d.Kernel.Backends, d.Kernel.Hooks)
	}
	if len(d.Problems) != 1 || d.Problems[0].Kind != ProblemWay {
		t.Errorf("problems %v", d.Problems)
	}
}

// The forwarder asks the host's resolver in transparent mode, unless it was told whom to ask; what leads outside without it
// is for the time that the daemon is dead.
func TestTransparentUpstreams(t *testing.T) {
	in := Input{Settings: config.Default(), Facts: facts()}
	in.Settings.Resolver = config.ResolverTransparent
	in.Facts.Resolver.Upstreams = []netip.Addr{endpointA.Addr()}
	upstreams := func() []netip.AddrPort {
		t.Helper()
		d, err := Make(in)
		if err != nil {
			t.Fatal(err)
		}
		if len(d.Fallback) != 1 || d.Fallback[0].Address != endpointA {
			t.Errorf("fallback %v", d.Fallback)
		}
		return d.Forward.Upstreams
	}
	if got, want := upstreams(), OnDNSPort(in.Facts.Resolver.Loopback); !slices.Equal(got, want) {
		t.Errorf("upstreams %v, want %v", got, want)
	}
	in.Settings.Upstreams = []netip.AddrPort{endpointA}
	if got := upstreams(); !slices.Equal(got, in.Settings.Upstreams) {
		t.Errorf("upstreams %v, and %v were given", got, in.Settings.Upstreams)
	}
	in.Settings.Upstreams, in.Settings.Resolver = nil, config.ResolverTakeover
	if got := upstreams(); !slices.Equal(got, []netip.AddrPort{endpointA}) {
		t.Errorf("upstreams in another mode %v", got)
	}
}

func TestLoopbackOf(t *testing.T) {
	for _, c := range []struct{ servers, want []string }{
		{[]string{"127.0.0.53"}, []string{"127.0.0.53"}},
		{[]string{"::1", "127.0.0.1"}, []string{"::1", "127.0.0.1"}}, // in order
		{[]string{"192.0.2.53", "127.255.255.254", "2001:db8::53"}, []string{"127.255.255.254"}},
		{[]string{"127.0.0.1", "127.0.0.1", "::ffff:127.0.0.1"}, []string{"127.0.0.1"}},
		// What is sent to the unspecified address arrives on loopback.
		{[]string{"0.0.0.0", "::"}, []string{"127.0.0.1", "::1"}},
		{[]string{"192.0.2.53", "fe80::1%eth0"}, nil},
		{nil, nil},
	} {
		var servers, want []netip.Addr
		for _, text := range c.servers {
			servers = append(servers, netip.MustParseAddr(text))
		}
		for _, text := range c.want {
			want = append(want, netip.MustParseAddr(text))
		}
		if got := LoopbackOf(servers); !slices.Equal(got, want) {
			t.Errorf("of %v: %v, want %v", servers, got, want)
		}
	}
}
