package discovery

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// slice builds an EndpointSlice of kube-dns with the ports of a real one.
func slice(name string, eps ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: DefaultNamespace,
			Name:      name,
			Labels:    map[string]string{discoveryv1.LabelServiceName: DefaultService},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{
			{Name: new("metrics"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(9153))},
			{Name: new("dns-tcp"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(5353))},
			{Name: new("dns"), Protocol: new(corev1.ProtocolUDP), Port: new(int32(53))},
		},
		Endpoints: eps,
	}
}

// with returns s after f.
func with(s *discoveryv1.EndpointSlice, f func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
	f(s)
	return s
}

func withType(t discoveryv1.AddressType, s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	s.AddressType = t
	return s
}

func withPorts(s *discoveryv1.EndpointSlice, ports ...discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	s.Ports = ports
	return s
}

// The states an endpoint goes through, as the endpoint slice controller sets them.
func ready(addrs ...string) discoveryv1.Endpoint {
	return condition(addrs, new(true), new(true), new(false))
}
func unready(addrs ...string) discoveryv1.Endpoint {
	return condition(addrs, new(false), new(false), new(false))
}
func draining(addrs ...string) discoveryv1.Endpoint {
	return condition(addrs, new(false), new(true), new(true))
}
func gone(addrs ...string) discoveryv1.Endpoint {
	return condition(addrs, new(false), new(false), new(true))
}
func unset(addrs ...string) discoveryv1.Endpoint { return condition(addrs, nil, nil, nil) }

func condition(addrs []string, ready, serving, terminating *bool) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses:  addrs,
		Conditions: discoveryv1.EndpointConditions{Ready: ready, Serving: serving, Terminating: terminating},
	}
}

// One bad address is left out with a note, and never the whole set.
func TestLeftOut(t *testing.T) {
	bad := []string{
		"0.0.0.0", "0.0.0.1", "127.0.0.1", "169.254.20.10", "224.0.0.1", "240.0.0.1", "255.255.255.255",
		"::", "::1", "fe80::1", "fe80::1%eth0", "ff02::1", "::ffff:127.0.0.1", "::ffff:240.0.0.1",
	}
	for _, address := range bad {
		family := discoveryv1.AddressTypeIPv4
		if strings.Contains(address, ":") {
			family = discoveryv1.AddressTypeIPv6
		}
		all := []*discoveryv1.EndpointSlice{slice("good", ready("172.20.0.2")), withType(family, slice("bad", ready(address)))}
		got := merge(all, DefaultNamespace, DefaultService, dnsPortsOf(kubeDNS()), placement{})
		if len(got) != 1 || got[0].Address.String() != "172.20.0.2:53" {
			t.Errorf("%s: endpoints %v", address, got)
		}
		notes := leftOut(all, DefaultNamespace, DefaultService)
		if len(notes) != 1 || !strings.Contains(notes[0], "of kube-system/bad is left out: it is") {
			t.Errorf("%s: notes %q", address, notes)
		}
	}
	var all []*discoveryv1.EndpointSlice
	for i := range 100 {
		all = append(all, slice(fmt.Sprint("s", i), ready("127.0.0.1")))
	}
	if notes := leftOut(all, DefaultNamespace, DefaultService); len(notes) != maxLeftOut+1 || !strings.HasPrefix(notes[maxLeftOut], "95 more") {
		t.Errorf("notes %q", notes)
	}
	if notes := leftOut([]*discoveryv1.EndpointSlice{slice("a", ready("172.20.0.2", "127.0.0.1"), ready(), ready("name"))}, DefaultNamespace, DefaultService); notes != nil {
		t.Errorf("notes %q of usable endpoints", notes)
	}
}

func TestMerge(t *testing.T) {
	udp, tcp := corev1.ProtocolUDP, corev1.ProtocolTCP
	tests := []struct {
		name   string
		slices []*discoveryv1.EndpointSlice
		want   []string
	}{
		{"no slice", nil, nil},
		{"sorted", []*discoveryv1.EndpointSlice{slice("a", ready("172.20.0.9"), ready("172.20.0.10"), ready("172.20.0.2"))},
			[]string{"172.20.0.2:53", "172.20.0.9:53", "172.20.0.10:53"}},
		{"several slices, one endpoint in both", []*discoveryv1.EndpointSlice{
			slice("b", ready("172.20.0.3"), ready("172.20.0.2")), slice("a", ready("172.20.0.2"))},
			[]string{"172.20.0.2:53", "172.20.0.3:53"}},
		{"dual stack", []*discoveryv1.EndpointSlice{
			withType(discoveryv1.AddressTypeIPv6, slice("b", ready("fd00::2"))), slice("a", ready("172.20.0.2"))},
			[]string{"172.20.0.2:53", "[fd00::2]:53"}},
		{"FQDN slices are ignored", []*discoveryv1.EndpointSlice{withType(discoveryv1.AddressTypeFQDN, slice("a", ready("dns.example.org"), ready("192.0.2.1")))}, nil},
		{"nil Ready means ready", []*discoveryv1.EndpointSlice{slice("a", unset("172.20.0.2"), unready("172.20.0.3"))}, []string{"172.20.0.2:53"}},
		{"ready ones beat draining ones", []*discoveryv1.EndpointSlice{slice("a", draining("172.20.0.2")), slice("b", ready("172.20.0.3"))}, []string{"172.20.0.3:53"}},
		{"none ready: draining ones are the least bad", []*discoveryv1.EndpointSlice{slice("a", draining("172.20.0.2"), gone("172.20.0.4"), unready("172.20.0.3"))}, []string{"172.20.0.2:53"}},
		{"a rollout seen in one family first", []*discoveryv1.EndpointSlice{
			slice("a", draining("172.20.0.2")),
			withType(discoveryv1.AddressTypeIPv6, slice("b", draining("fd00::2"), ready("fd00::3")))},
			[]string{"172.20.0.2:53", "[fd00::3]:53"}},
		{"nil Serving follows Ready", []*discoveryv1.EndpointSlice{slice("a", condition([]string{"172.20.0.2"}, new(false), nil, nil))}, nil},
		{"ready in one slice, unready in another", []*discoveryv1.EndpointSlice{slice("a", unready("172.20.0.2")), slice("b", ready("172.20.0.2"))}, []string{"172.20.0.2:53"}},
		{"only the first address counts", []*discoveryv1.EndpointSlice{slice("a", ready("172.20.0.2", "172.20.0.3"))}, []string{"172.20.0.2:53"}},
		{"addresses that can't be", []*discoveryv1.EndpointSlice{slice("a", ready(), ready(""), ready("x"), ready("fd00::1"), ready("0.0.0.0"), ready("127.0.0.1"), ready("224.0.0.1"), ready("172.20.0.2"))},
			[]string{"172.20.0.2:53"}},
		{"IPv6 addresses that can't be", []*discoveryv1.EndpointSlice{withType(discoveryv1.AddressTypeIPv6,
			slice("a", ready("172.20.0.2"), ready("fe80::1%eth0"), ready("::1"), ready("::"), ready("ff02::1"), ready("::ffff:10.0.0.1"), ready("fd00::3")))}, []string{"[fd00::3]:53"}},
		{"another port number", []*discoveryv1.EndpointSlice{withPorts(slice("a", ready("172.20.0.2")), discoveryv1.EndpointPort{Name: new("dns"), Protocol: &udp, Port: new(int32(1053))})}, []string{"172.20.0.2:1053"}},
		{"a port per slice", []*discoveryv1.EndpointSlice{
			slice("a", ready("172.20.0.2")),
			withPorts(slice("b", ready("172.20.0.2")), discoveryv1.EndpointPort{Name: new("dns"), Protocol: &udp, Port: new(int32(1053))})},
			[]string{"172.20.0.2:53", "172.20.0.2:1053"}},
		{"no port named dns", []*discoveryv1.EndpointSlice{withPorts(slice("a", ready("172.20.0.2")), discoveryv1.EndpointPort{Name: new("udp-53"), Protocol: &udp, Port: new(int32(53))})}, nil},
		{"dns is TCP", []*discoveryv1.EndpointSlice{withPorts(slice("a", ready("172.20.0.2")), discoveryv1.EndpointPort{Name: new("dns"), Protocol: &tcp, Port: new(int32(53))})}, nil},
		{"dns twice, TCP first", []*discoveryv1.EndpointSlice{withPorts(slice("a", ready("172.20.0.2")),
			discoveryv1.EndpointPort{Name: new("dns"), Protocol: &tcp, Port: new(int32(54))},
			discoveryv1.EndpointPort{Name: new("dns"), Protocol: &udp, Port: new(int32(53))})}, []string{"172.20.0.2:53"}},
		{"no ports, no name, no number", []*discoveryv1.EndpointSlice{
			withPorts(slice("a", ready("172.20.0.2"))),
			withPorts(slice("b", ready("172.20.0.2")), discoveryv1.EndpointPort{Protocol: &udp, Port: new(int32(53))}),
			withPorts(slice("c", ready("172.20.0.2")), discoveryv1.EndpointPort{Name: new("dns"), Protocol: &udp}),
			withPorts(slice("d", ready("172.20.0.2")), discoveryv1.EndpointPort{Name: new("dns"), Protocol: &udp, Port: new(int32(70000))})}, nil},
		{"slices of other Services", []*discoveryv1.EndpointSlice{
			with(slice("a", ready("172.20.0.2")), func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelServiceName] = "other" }),
			with(slice("b", ready("172.20.0.3")), func(s *discoveryv1.EndpointSlice) { s.Labels = nil }),
			with(slice("c", ready("172.20.0.4")), func(s *discoveryv1.EndpointSlice) { s.Namespace = "default" })}, nil},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			// Whatever the order of slices, and with what trim leaves of them.
			for range 2 {
				var in []*discoveryv1.EndpointSlice
				for _, s := range tc.slices {
					obj, err := trim(s)
					if err != nil {
						t.Fatal(err)
					}
					in = append(in, obj.(*discoveryv1.EndpointSlice))
				}
				got := Snapshot{Endpoints: merge(in, DefaultNamespace, DefaultService, dnsPortsOf(kubeDNS()), placement{})}
				if !slices.Equal(addresses(got), tc.want) {
					t.Errorf("got %v, want %v", addresses(got), tc.want)
				}
				slices.Reverse(tc.slices)
			}
		})
	}
}

// TestPortsByName: as kube-proxy does, a slice's port is the one that is called as the Service's.
func TestPortsByName(t *testing.T) {
	const udp, tcp = corev1.ProtocolUDP, corev1.ProtocolTCP
	service := func(name string, protocol corev1.Protocol, port int32) corev1.ServicePort {
		return corev1.ServicePort{Name: name, Protocol: protocol, Port: port}
	}
	at := func(name string, protocol corev1.Protocol, port int32) discoveryv1.EndpointPort {
		return discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &port}
	}
	type in = []discoveryv1.EndpointPort
	type of = []corev1.ServicePort
	for name, tc := range map[string]struct {
		service of
		slices  []in
		want    string // address, then the TCP port
	}{
		"kubeadm": {servicePorts("dns", "dns-tcp"), []in{{at("dns", udp, 53), at("dns-tcp", tcp, 53), at("metrics", tcp, 9153)}}, "172.20.0.2:53 53"},
		"CoreDNS's Helm chart, RKE2": {of{service("udp-53", udp, 53), service("tcp-53", tcp, 53)},
			[]in{{at("udp-53", udp, 53), at("tcp-53", tcp, 53)}}, "172.20.0.2:53 53"},
		"OpenShift":     {servicePorts("dns", "dns-tcp"), []in{{at("dns-tcp", tcp, 5353), at("dns", udp, 5353)}}, "172.20.0.2:5353 5353"},
		"TCP elsewhere": {servicePorts("dns", "dns-tcp"), []in{{at("dns", udp, 53), at("dns-tcp", tcp, 5353)}}, "172.20.0.2:53 5353"},
		"no name":       {of{service("", udp, 53)}, []in{{at("", udp, 1053)}}, "172.20.0.2:1053 0"},
		"no name, a slice without one": {of{service("", udp, 53)},
			[]in{{discoveryv1.EndpointPort{Protocol: new(udp), Port: new(int32(53))}}}, "172.20.0.2:53 0"},
		"the only UDP port":        {of{service("query", udp, 5300), service("query-tcp", tcp, 5300), service("x", tcp, 53)}, []in{{at("query", udp, 53), at("query-tcp", tcp, 54), at("x", tcp, 55)}}, "172.20.0.2:53 54"},
		"53 of several":            {of{service("dns", udp, 5300), service("real", udp, 53)}, []in{{at("dns", udp, 1), at("real", udp, 2)}}, "172.20.0.2:2 0"},
		"called dns among several": {of{service("other", udp, 5301), service("dns", udp, 5300)}, []in{{at("dns", udp, 1), at("other", udp, 2)}}, "172.20.0.2:1 0"},
		"none of several":          {of{service("a", udp, 5301), service("b", udp, 5300)}, []in{{at("a", udp, 1), at("b", udp, 2)}}, ""},
		"TCP only":                 {of{service("dns", tcp, 53)}, []in{{at("dns", tcp, 53)}}, ""},
		"slices by hand":           {of{service("u", udp, 53), service("t", tcp, 53)}, []in{{at("t", tcp, 54)}, {at("u", udp, 53)}}, "172.20.0.2:53 54"},
		"a protocol by default":    {of{service("u", udp, 53), service("t", "", 53)}, []in{{at("u", udp, 53), {Name: new("t"), Port: new(int32(54))}}}, "172.20.0.2:53 54"},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubeDNS()
			s.Spec.Ports = tc.service
			var all []*discoveryv1.EndpointSlice
			for i, ports := range tc.slices {
				all = append(all, withPorts(slice(fmt.Sprint(i), ready("172.20.0.2")), ports...))
			}
			got := ""
			for _, e := range merge(all, DefaultNamespace, DefaultService, dnsPortsOf(s), placement{}) {
				got += fmt.Sprint(e.Address, " ", e.TCPPort)
			}
			if got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestMergeDetails(t *testing.T) {
	e := draining("172.20.0.2")
	e.NodeName, e.Zone = new("node1"), new("z1")
	got := merge([]*discoveryv1.EndpointSlice{slice("kube-dns-b", e), slice("kube-dns-a", e)}, DefaultNamespace, DefaultService, dnsPortsOf(kubeDNS()), placement{})
	want := []Endpoint{{
		Address: netip.MustParseAddrPort("172.20.0.2:53"), Source: "kube-system/kube-dns-a",
		TCPPort: 5353, Node: "node1", Zone: "z1", Terminating: true,
	}}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

func TestServiceIPs(t *testing.T) {
	tests := []struct {
		name string
		spec corev1.ServiceSpec
		want []string
	}{
		{"dual stack, primary first", corev1.ServiceSpec{ClusterIP: "fd00:21::a", ClusterIPs: []string{"fd00:21::a", "172.21.0.10"}}, []string{"fd00:21::a", "172.21.0.10"}},
		{"from before dual stack", corev1.ServiceSpec{ClusterIP: "172.21.0.10"}, []string{"172.21.0.10"}},
		{"headless", corev1.ServiceSpec{ClusterIP: "None", ClusterIPs: []string{"None"}}, nil},
		{"not allocated", corev1.ServiceSpec{}, nil},
		{"twice", corev1.ServiceSpec{ClusterIPs: []string{"172.21.0.10", "172.21.0.10"}}, []string{"172.21.0.10"}},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			var got []string
			for _, ip := range serviceIPs(&corev1.Service{Spec: tc.spec}) {
				got = append(got, ip.String())
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

func TestSnapshotEqual(t *testing.T) {
	base := func() Snapshot {
		return Snapshot{
			Endpoints:  []Endpoint{{Address: netip.MustParseAddrPort("172.20.0.2:53"), Source: "kube-system/a"}},
			ServiceIPs: []netip.Addr{netip.MustParseAddr("172.21.0.10")},
		}
	}
	a, b := base(), base()
	b.Updated = time.Now()
	if !a.Equal(b) {
		t.Error("differ by Updated only, must be equal")
	}
	if !(Snapshot{Endpoints: []Endpoint{}}).Equal(Snapshot{}) {
		t.Error("nil and empty must be equal")
	}
	for name, change := range map[string]func(*Snapshot){
		"address":  func(s *Snapshot) { s.Endpoints[0].Address = netip.MustParseAddrPort("172.20.0.2:54") },
		"source":   func(s *Snapshot) { s.Endpoints[0].Source = "kube-system/b" },
		"fewer":    func(s *Snapshot) { s.Endpoints = nil },
		"service":  func(s *Snapshot) { s.ServiceIPs[0] = netip.MustParseAddr("172.21.0.11") },
		"staled":   func(s *Snapshot) { s.Stale = true },
		"reason":   func(s *Snapshot) { s.Reason = "x" },
		"draining": func(s *Snapshot) { s.Endpoints[0].Terminating = true },
	} {
		c := base()
		change(&c)
		if a.Equal(c) {
			t.Errorf("%s: must differ", name)
		}
	}
}

// FuzzMerge: whatever slices say, the endpoints are addresses that can be asked, each once, in order, and no more than
// the slices name: the cost is linear in them but for sorting.
func FuzzMerge(f *testing.F) {
	f.Add([]byte("172.20.0.2\x00fd00::2\x00\xff127.0.0.1\x01"), uint8(0))
	f.Add([]byte("0.0.0.0\x00::ffff:10.0.0.1\x00fe80::1%eth0\x00"), uint8(7))
	f.Fuzz(func(t *testing.T, data []byte, flags uint8) {
		service := kubeDNS()
		var all []*discoveryv1.EndpointSlice
		named := 0
		for i, part := range bytes.Split(data, []byte{0xff}) {
			s := slice(fmt.Sprint(i % 3))
			if flags>>(i%8)&1 == 1 {
				s.AddressType = discoveryv1.AddressTypeIPv6
				s.Ports = s.Ports[i%len(s.Ports):]
			}
			for j, address := range bytes.Split(part, []byte{0}) {
				make := []func(...string) discoveryv1.Endpoint{ready, unready, draining, gone, unset}[(j+int(flags))%5]
				s.Endpoints = append(s.Endpoints, make(string(address)))
				named++
			}
			all = append(all, s)
		}
		got := merge(all, DefaultNamespace, DefaultService, dnsPortsOf(service), placement{})
		if len(got) > named {
			t.Errorf("%d endpoints of %d", len(got), named)
		}
		for i, e := range got {
			a := e.Address.Addr()
			if !e.Address.IsValid() || e.Address.Port() == 0 || a.Is4In6() || a.IsLoopback() || a.IsMulticast() || a.IsUnspecified() || a.Zone() != "" {
				t.Errorf("endpoint %v", e)
			}
			if i > 0 && got[i-1].Address.Compare(e.Address) >= 0 {
				t.Errorf("%v before %v", got[i-1].Address, e.Address)
			}
		}
		slices.Reverse(all)
		if again := merge(all, DefaultNamespace, DefaultService, dnsPortsOf(service), placement{}); !slices.EqualFunc(got, again, func(a, b Endpoint) bool { return a.Address == b.Address }) {
			t.Errorf("%v in another order %v", got, again)
		}
	})
}

// TestManyEndpoints: more than a host should ask are a note.
func TestManyEndpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := slice("a")
		for i := range 2000 {
			s.Endpoints = append(s.Endpoints, ready(fmt.Sprintf("10.1.%d.%d", i/250, i%250+1)))
		}
		got := run(t, newCluster(t, kubeDNS("172.21.0.10"), s, configMap(DefaultConfigMap, kubeadmCorefile))).next(t)
		if len(got.Endpoints) != maxEndpoints || got.Endpoints[0].Address.String() != "10.1.0.1:53" {
			t.Errorf("%d endpoints from %v", len(got.Endpoints), got.Endpoints[0])
		}
		wantNotes(t, got, "has 2000 endpoints: the first 256")
	})
}
