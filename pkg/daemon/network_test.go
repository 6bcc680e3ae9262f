//go:build linux

package daemon

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
)

var (
	onBridge  = netdev.Route{Interface: "cni0", Ifindex: 5, Source: netip.MustParseAddr("172.20.0.1"), Ethernet: true}
	onVXLAN   = netdev.Route{Interface: "vxlan0", Ifindex: 7, Source: netip.MustParseAddr("172.20.0.2"), Ethernet: true}
	onUplink  = netdev.Route{Interface: "eth0", Ifindex: 2, Source: netip.MustParseAddr("192.0.2.9"), Ethernet: true}
	onBridge6 = netdev.Route{Interface: "cni0", Ifindex: 5, Source: netip.MustParseAddr("fd00:20::1"), Ethernet: true}
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

func makeEndpoint(address netip.AddrPort, route netdev.Route, state endpointState) endpoint {
	e := endpoint{Endpoint: discovery.Endpoint{Address: address, Source: "test"}, route: route}
	e.dead = state == dead || state == notedOrDead
	e.severed = state == severed
	if state == noted || state == notedOrDead {
		e.note = "on this host"
	}
	return e
}

// Dead endpoints are out of rotation, and so are those that can't be steered to. Without any the forwarder is asked.
func TestBackends(t *testing.T) {
	addresses := []netip.AddrPort{endpointA, endpointB, endpointC}
	routes := []netdev.Route{onBridge, onVXLAN, onBridge6}
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
			var endpoints []endpoint
			for i, state := range c.states {
				endpoints = append(endpoints, makeEndpoint(addresses[i], routes[i], state))
			}
			var want []datapath.Backend
			for _, i := range c.want {
				want = append(want, datapath.Backend{Address: addresses[i], NATAddress: routes[i].Source, Ifindex: uint32(routes[i].Ifindex)})
			}
			if got := backends(endpoints); !slices.Equal(got, want) {
				t.Errorf("backends %+v, want %+v", got, want)
			}
		})
	}
}

func TestAttachments(t *testing.T) {
	fromHost := datapath.Attachment{Program: datapath.FromHost, Interface: "lo", Ifindex: 1, Egress: true}
	backend := func(route netdev.Route) datapath.Attachment {
		return datapath.Attachment{Program: datapath.FromBackend, Interface: route.Interface, Ifindex: route.Ifindex}
	}
	client := func(i netdev.Interface) datapath.Attachment {
		return datapath.Attachment{Program: datapath.FromClient, Interface: i.Name, Ifindex: i.Index}
	}
	kubeSwitch := netdev.Interface{Name: "kubeswitch", Index: 3}
	bridge := netdev.Interface{Name: "cni0", Index: 5}
	veths := []netdev.Interface{{Name: "veth1", Index: 21, Bridge: 5}, {Name: "veth2", Index: 22, Bridge: 5}}
	for _, c := range []struct {
		name string
		n    network
		want []datapath.Attachment
	}{
		{"nothing", network{}, []datapath.Attachment{fromHost}},
		{"one bridge for three", network{endpoints: []endpoint{
			makeEndpoint(endpointA, onBridge, living), makeEndpoint(endpointB, onBridge, living), makeEndpoint(endpointC, onBridge6, living),
		}}, []datapath.Attachment{backend(onBridge), fromHost}},
		// Its replies may be on their way, and it may come back.
		{"dead", network{endpoints: []endpoint{makeEndpoint(endpointA, onBridge, dead)}}, []datapath.Attachment{backend(onBridge), fromHost}},
		{"not steered to", network{endpoints: []endpoint{makeEndpoint(endpointA, onBridge, noted)}}, []datapath.Attachment{fromHost}},
		{"former servers", network{
			endpoints: []endpoint{makeEndpoint(endpointA, onBridge, living)},
			fallback:  []endpoint{makeEndpoint(endpointB, onUplink, living), makeEndpoint(endpointC, onBridge6, living)},
		}, []datapath.Attachment{backend(onBridge), backend(onUplink), fromHost}},
		{"KubeSwitch", network{endpoints: []endpoint{makeEndpoint(endpointA, onBridge, living)}, clients: kubeSwitch},
			[]datapath.Attachment{backend(onBridge), fromHost, client(kubeSwitch)}},
		{"pods", network{endpoints: []endpoint{makeEndpoint(endpointA, onBridge, living), makeEndpoint(endpointB, onVXLAN, living)}, pods: veths},
			[]datapath.Attachment{backend(onBridge), backend(onVXLAN), fromHost, client(veths[0]), client(veths[1])}},
		// An interface may have both: endpoints and clients behind it.
		{"bridge of both", network{endpoints: []endpoint{makeEndpoint(endpointA, onBridge, living)}, clients: kubeSwitch, pods: []netdev.Interface{bridge}},
			[]datapath.Attachment{backend(onBridge), fromHost, client(kubeSwitch), client(bridge)}},
		{"pods' pattern has the KubeSwitch", network{clients: kubeSwitch, pods: []netdev.Interface{kubeSwitch, veths[0], veths[0]}},
			[]datapath.Attachment{fromHost, client(kubeSwitch), client(veths[0])}},
	} {
		t.Run(c.name, func(t *testing.T) {
			pods := slices.Clone(c.n.pods)
			got := c.n.attachments()
			if !slices.Equal(got, c.want) {
				t.Errorf("attachments\ngot  %v\nwant %v", got, c.want)
			}
			if !slices.Equal(c.n.pods, pods) {
				t.Errorf("the network's pods became %v", c.n.pods)
			}
			// Whatever the case: replies first, and nothing twice.
			seen := make(map[datapath.Attachment]bool)
			queries := false
			for _, attachment := range got {
				if seen[attachment] {
					t.Errorf("%s twice", attachment)
				}
				seen[attachment] = true
				if attachment.Program == datapath.FromBackend && queries {
					t.Errorf("%s after a program that steers", attachment)
				}
				queries = queries || attachment.Program != datapath.FromBackend
			}
		})
	}
}

func TestUnion(t *testing.T) {
	of := func(indexes ...int) (attachments []datapath.Attachment) {
		for _, index := range indexes {
			attachments = append(attachments, datapath.Attachment{Program: datapath.FromBackend, Interface: "x", Ifindex: index})
		}
		return attachments
	}
	for _, c := range []struct{ a, b, want []datapath.Attachment }{
		{nil, nil, nil},
		{of(1, 2), nil, of(1, 2)},
		{nil, of(1, 2), of(1, 2)},
		{of(3, 1), of(2, 1), of(3, 1, 2)},
		{of(1), of(1, 1), of(1)},
		{of(2), of(1, 1), of(2, 1)},
	} {
		if got := union(c.a, c.b); !slices.Equal(got, c.want) {
			t.Errorf("union of %v and %v is %v, want %v", c.a, c.b, got, c.want)
		}
	}
	// The same interface, but another program, hook or name, is another attachment.
	base := of(1)[0]
	other, egress, renamed := base, base, base
	other.Program, egress.Egress, renamed.Interface = datapath.FromClient, true, "y"
	all := []datapath.Attachment{base, other, egress, renamed}
	if got := union(all[:1], all); !slices.Equal(got, all) {
		t.Errorf("union is %v, want %v", got, all)
	}
	// Neither list is written to, though there is room.
	room := append(make([]datapath.Attachment, 0, 8), of(1, 2)...)
	union(room, of(3))
	if extra := room[:3][2]; extra != (datapath.Attachment{}) {
		t.Errorf("union wrote %v behind its first list", extra)
	}
}

func TestReplyViaOfPods(t *testing.T) {
	n := network{
		clients: netdev.Interface{Name: "kubeswitch", Index: 3, Bridge: 9},
		pods: []netdev.Interface{
			{Name: "veth1", Index: 21, Bridge: 5}, {Name: "cali1", Index: 22}, {Name: "veth2", Index: 23, Bridge: 6}, {Name: "cni0", Index: 5},
		},
	}
	if got, want := n.replyVia(), map[uint32]uint32{21: 5, 23: 6}; !maps.Equal(got, want) {
		t.Errorf("replies leave through %v, want %v", got, want)
	}
	if got := (network{}).replyVia(); len(got) != 0 {
		t.Errorf("without pods: %v", got)
	}
}

func TestKernelListeners(t *testing.T) {
	loopback, kubeSwitch := netip.MustParseAddrPort("127.0.0.1:53"), netip.MustParseAddrPort("172.19.1.1:53")
	stub := netip.MustParseAddr("127.0.0.53")
	loopback6v, service := netip.MustParseAddrPort("[::1]:53"), netip.MustParseAddr("172.21.0.10")
	for _, c := range []struct {
		name   string
		listen []netip.AddrPort
		shared bool
		n      network
		want   []datapath.Listener
	}{
		{"host", []netip.AddrPort{loopback, loopback6v}, false, network{}, []datapath.Listener{
			{Address: loopback, Scope: datapath.ScopeHost}, {Address: loopback6v, Scope: datapath.ScopeHost},
		}},
		{"all", []netip.AddrPort{loopback, kubeSwitch}, false, network{clusterDNS: []netip.Addr{service}}, []datapath.Listener{
			{Address: loopback, Scope: datapath.ScopeHost}, {Address: kubeSwitch, Scope: datapath.ScopeKubeSwitch},
			{Address: netip.AddrPortFrom(service, 53), Scope: datapath.ScopePod},
		}},
		{"transparent", []netip.AddrPort{kubeSwitch}, false, network{resolvers: []netip.Addr{loopback6, stub}}, []datapath.Listener{
			{Address: kubeSwitch, Scope: datapath.ScopeKubeSwitch},
			{Address: loopback6v, Scope: datapath.ScopeTransparent},
			{Address: netip.AddrPortFrom(stub, 53), Scope: datapath.ScopeTransparent},
		}},
		{"another server at the KubeSwitch address", []netip.AddrPort{loopback}, true, network{clients: netdev.Interface{Index: 3}}, []datapath.Listener{
			{Address: loopback, Scope: datapath.ScopeHost}, {Address: kubeSwitch, Scope: datapath.ScopeShared},
		}},
		{"the KubeSwitch address on another host", []netip.AddrPort{loopback}, true, network{}, []datapath.Listener{
			{Address: loopback, Scope: datapath.ScopeHost},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := New(config.Default(), "", zap.NewNop())
			d.listen = c.listen
			if c.shared || slices.Contains(c.listen, kubeSwitch) {
				d.kubeSwitch = kubeSwitch.Addr()
			}
			if got := d.kernelListeners(c.n); !slices.Equal(got, c.want) {
				t.Errorf("listeners %v, want %v", got, c.want)
			}
			if got := d.sharesKubeSwitch(); got != c.shared {
				t.Errorf("shared: %v, want %v", got, c.shared)
			}
		})
	}
}

// An address of the cluster's data that is intercepted for others, or is none, keeps its scope; the rest is followed.
func TestCollidingServiceAddresses(t *testing.T) {
	d := New(config.Default(), "", zap.NewNop())
	d.config.BPF, d.config.Pods = false, []string{"*"}
	d.listen = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53"), netip.MustParseAddrPort("[::1]:53")}
	d.kubeSwitch = netip.MustParseAddr("172.19.1.1")
	d.resolvers = []netip.Addr{netip.MustParseAddr("127.0.0.53")}
	var addresses []netip.Addr
	for _, text := range []string{"127.0.0.1", "::1", "172.19.1.1", "127.0.0.53", "127.0.0.9", "0.0.0.0", "224.0.0.1", "fe80::1", "172.21.0.10", "fd00:21::a"} {
		addresses = append(addresses, netip.MustParseAddr(text))
	}
	for _, address := range addresses {
		if left := d.collides(address) != ""; left != (address.String() != "172.21.0.10" && address.String() != "fd00:21::a") {
			t.Errorf("%s: %q", address, d.collides(address))
		}
	}
}

// What the cluster names and this host can't or must not ask is left out by itself.
func TestUnfitEndpoints(t *testing.T) {
	d := New(config.Default(), "", zap.NewNop())
	d.listen = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53"), netip.MustParseAddrPort("172.19.1.1:53")}
	d.kubeSwitch = netip.MustParseAddr("172.19.1.1")
	d.routing.upstreams = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}
	for address, want := range map[string]bool{
		"172.20.0.10:53": false, "172.19.1.1:53": true, "172.19.1.1:5353": false, "192.0.2.53:53": true, "192.0.2.54:53": false,
	} {
		e := makeEndpoint(netip.MustParseAddrPort(address), onBridge, living)
		if why := d.unfit(e); (why != "") != want {
			t.Errorf("%s: %q", address, why)
		}
		e.Source = discovery.SourceStatic
		if why := d.unfit(e); why != "" {
			t.Errorf("%s, which the user has named: %q", address, why)
		}
	}
	if e := makeEndpoint(endpointA, netdev.Route{Group: true}, noted); d.unfit(e) == "" {
		t.Error("a broadcast address is asked")
	}
}
