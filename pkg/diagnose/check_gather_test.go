package diagnose

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/miekg/dns"
)

// network stands between a Checker and real sockets on this machine: each address of a test leads to one of them, or
// to an error.
type network struct {
	mu     sync.Mutex
	real   map[string]string  // "udp 172.20.0.10:53" -> the real address
	errors map[string][]error // what the next connections to an address fail with; nil is for one that succeeds
	dialed []string
}

func newNetwork() *network {
	return &network{real: make(map[string]string), errors: make(map[string][]error)}
}

// DialContext implements Dialer. What leads nowhere is refused.
func (n *network) DialContext(ctx context.Context, kind, address string) (net.Conn, error) {
	key := kind + " " + address
	n.mu.Lock()
	n.dialed = append(n.dialed, key)
	to := n.real[key]
	var err error
	if planned := n.errors[key]; len(planned) > 0 {
		err, n.errors[key] = planned[0], planned[1:]
	}
	n.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case to == "":
		return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	}
	return new(net.Dialer).DialContext(ctx, kind, to)
}

func (n *network) dials(key string) (count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, dialed := range n.dialed {
		if dialed == key {
			count++
		}
	}
	return count
}

// listen makes TCP connections to these addresses succeed.
func (n *network) listen(t *testing.T, addresses ...netip.AddrPort) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	for _, address := range addresses {
		n.real["tcp "+address.String()] = listener.Addr().String()
	}
}

// listenBoth listens on a port that is free for UDP and TCP.
func listenBoth(t *testing.T) (net.PacketConn, net.Listener) {
	t.Helper()
	var problem error
	for range 10 {
		packets, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		listener, err := net.Listen("tcp", packets.LocalAddr().String())
		if err == nil {
			return packets, listener
		}
		_ = packets.Close()
		problem = err
	}
	t.Fatal(problem)
	return nil, nil
}

// serve makes a real DNS server answer at an address, by UDP and TCP.
func (n *network) serve(t *testing.T, address netip.AddrPort, answer func(m *dns.Msg, q dns.Question, tcp bool)) {
	t.Helper()
	packets, listener := listenBoth(t)
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
		reply := new(dns.Msg).SetReply(query)
		answer(reply, query.Question[0], w.LocalAddr().Network() == "tcp")
		_ = w.WriteMsg(reply)
	})
	for _, server := range []*dns.Server{{PacketConn: packets, Handler: handler}, {Listener: listener, Handler: handler}} {
		started := make(chan struct{})
		server.NotifyStartedFunc = func() { close(started) }
		go func() { _ = server.ActivateAndServe() }()
		<-started
		t.Cleanup(func() { _ = server.Shutdown() })
	}
	n.real["udp "+address.String()] = packets.LocalAddr().String()
	n.real["tcp "+address.String()] = packets.LocalAddr().String()
}

// cluster is an apiserver's view in a test.
type cluster struct {
	services map[string]Service
	err      error
}

func (c cluster) Source() string { return "apiserver x" }
func (c cluster) Node() string   { return "node-a" }
func (c cluster) Close()         {}

func (c cluster) Service(_ context.Context, namespace, name string) (Service, error) {
	if s, ok := c.services[namespace+"/"+name]; ok {
		return s, c.err
	}
	return Service{}, cmpError(c.err)
}

func (c cluster) ServiceOf(_ context.Context, address netip.Addr) (Service, error) {
	for _, s := range c.services {
		if slices.Contains(s.IPs, address) || slices.ContainsFunc(s.Endpoints, func(e ServiceEndpoint) bool { return e.Address == address }) {
			return s, c.err
		}
	}
	return Service{}, cmpError(c.err)
}

func (c cluster) ServiceNames(context.Context, string) (names []string, err error) {
	for name := range c.services {
		names = append(names, strings.TrimPrefix(name, "default/"))
	}
	return names, c.err
}

func cmpError(err error) error {
	if err != nil {
		return err
	}
	return ErrNoService
}

// kernel is an attached program of a test: it steers these names.
type kernel struct{ steers string }

func (k kernel) Verdict(from, to netip.AddrPort, message []byte) (KernelVerdict, error) {
	m := new(dns.Msg)
	if err := m.Unpack(message); err != nil {
		return KernelVerdict{}, err
	}
	if m.Question[0].Name == k.steers {
		return KernelVerdict{Reason: "steered", Steered: true}, nil
	}
	return KernelVerdict{Reason: "passed_external"}, nil
}

func (k kernel) SteeredTo(netip.AddrPort, uint16) (netip.AddrPort, bool, error) {
	return coreDNS0, true, nil
}

func newChecker(n *network, c cluster) *Checker {
	return &Checker{
		Host:     well().Host,
		Kernel:   kernel{steers: backendName},
		Cluster:  func() (ClusterView, error) { return c, nil },
		Route:    func(netip.Addr) string { return "over cni0" },
		Dialer:   n,
		Patience: 5 * time.Second,
	}
}

// record adds an A record to a reply for its name.
func record(m *dns.Msg, q dns.Question, address netip.Addr) {
	if q.Qtype == dns.TypeA {
		m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}, A: address.AsSlice()})
	}
}

// clusterDNS answers for backend only.
func clusterDNS(m *dns.Msg, q dns.Question, _ bool) {
	if q.Name == backendName {
		record(m, q, backendIP)
	} else {
		m.Rcode = dns.RcodeNameError
	}
}

func gather(t *testing.T, c *Checker, target string) Evidence {
	t.Helper()
	parsed, err := ParseTarget(target)
	if err != nil {
		t.Fatal(err)
	}
	return c.Gather(t.Context(), parsed)
}

func asked(e Evidence) (names []string) {
	for _, q := range e.Queries {
		names = append(names, q.Name)
	}
	return names
}

func TestGather(t *testing.T) {
	n := newNetwork()
	for _, server := range []netip.AddrPort{hostDNS, coreDNS0, coreDNS1} {
		n.serve(t, server, clusterDNS)
	}
	n.listen(t, backend80, netip.AddrPortFrom(pod0, 8080), netip.AddrPortFrom(pod1, 8080))
	c := newChecker(n, cluster{services: map[string]Service{"default/backend": *backend(true, true)}})
	c.Host.Search = []string{"example.com", "default.svc.cluster.local", "never.asked"}

	e := gather(t, c, "backend")
	if diff := cmp.Diff([]string{"backend.example.com.", backendName}, asked(e)); diff != "" || e.Decisive != 1 {
		t.Errorf("decisive %d:\n%s", e.Decisive, diff)
	}
	if e.Queries[0].Path.Carrier != Forwarder || e.Queries[1].Path.Carrier != Kernel || e.Queries[1].Reply.Steered != coreDNS0 {
		t.Errorf("paths %+v", e.Queries)
	}
	report := Conclude(e)
	if want := "DNS is fine; the Service address 172.21.0.20:80 and its 2 endpoints answer"; report.Verdict != want || report.Port != 80 {
		t.Errorf("port %d: %s", report.Port, report.Verdict)
	}
	if len(e.CoreDNS) != 2 || len(e.Upstreams) != 0 || e.Forwarder == nil || !e.Forwarder.helpful() {
		t.Errorf("servers asked besides: %+v, %+v, %+v", e.CoreDNS, e.Upstreams, e.Forwarder)
	}
}

func TestGatherTruncated(t *testing.T) {
	n := newNetwork()
	n.serve(t, hostDNS, func(m *dns.Msg, q dns.Question, tcp bool) {
		if m.Truncated = !tcp; tcp {
			record(m, q, backendIP)
		}
	})
	if e := gather(t, newChecker(n, cluster{}), backendName); len(e.Queries[0].Reply.Addresses) != 1 {
		t.Errorf("%+v", e.Queries[0].Reply)
	}
}

// A resolver asks a second time, and then goes no further in the search list.
func TestGatherNoReply(t *testing.T) {
	n := newNetwork()
	n.errors["tcp "+coreDNS1.String()] = []error{&net.OpError{Op: "dial", Err: syscall.EHOSTUNREACH}}
	n.errors["udp "+coreDNS1.String()] = []error{context.DeadlineExceeded, context.DeadlineExceeded}
	c := newChecker(n, cluster{services: map[string]Service{"default/backend": *backend(true)}})
	c.Host.Search = []string{"default.svc.cluster.local", "example.com"}
	e := gather(t, c, "backend")
	if diff := cmp.Diff([]string{backendName}, asked(e)); diff != "" {
		t.Error(diff)
	}
	if reply := e.Queries[0].Reply; reply.Tries != 2 || reply.Failure == nil || reply.Failure.Kind != Refused {
		t.Errorf("%+v", reply)
	}
	if got := Conclude(e).Verdict; got != "DNS is broken: CoreDNS does not answer; the datapath works to 172.20.0.10:53 (connection refused) and not to 172.20.0.11:53 (no route to host)" {
		t.Error(got)
	}
}

// The Service address sends each connection to a random endpoint: that one connection fails says little if an endpoint
// does not answer.
func TestGatherServiceRetries(t *testing.T) {
	for name, test := range map[string]struct {
		endpoint1 bool
		service   []error
		cause     Cause
		tries     int
	}{
		"met the bad endpoint":       {false, []error{syscall.ECONNREFUSED}, CauseEndpoint, 1 + serviceRetries},
		"never met the good one":     {false, slices.Repeat([]error{syscall.ECONNREFUSED}, 1+serviceRetries), CauseServiceDatapath, 1 + serviceRetries},
		"all endpoints good":         {true, []error{syscall.ECONNREFUSED}, CauseServiceDatapath, 1},
		"met the good endpoint only": {false, nil, CauseEndpoint, 1},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork()
			n.serve(t, hostDNS, clusterDNS)
			n.listen(t, backend80, netip.AddrPortFrom(pod0, 8080))
			if test.endpoint1 {
				n.listen(t, netip.AddrPortFrom(pod1, 8080))
			}
			n.errors["tcp "+backend80.String()] = test.service
			e := gather(t, newChecker(n, cluster{services: map[string]Service{"default/backend": *backend(true, true)}}), backendName+":80")
			if got := n.dials("tcp " + backend80.String()); got != test.tries {
				t.Errorf("%d connections to the Service, want %d", got, test.tries)
			}
			if report := Conclude(e); report.Cause != test.cause {
				t.Errorf("%s: %s", report.Cause, report.Verdict)
			}
		})
	}
}

// placed is a Service for clients beside its endpoints, which are on these Nodes.
func placed(nodes ...string) *Service {
	s := backend(true, true)
	s.LocalOnly = true
	for i, node := range nodes {
		s.Endpoints[i].Node = node
	}
	return s
}

// ends is a Service with an endpoint that is ready or not, and one that ends and may serve on.
func ends(ready, serving bool) *Service {
	s := backend(ready, false)
	s.Endpoints[1].Terminating, s.Endpoints[1].Serving = true, serving
	return s
}

// What a target's port means depends on what the address is.
func TestGatherPorts(t *testing.T) {
	headless := *backend(true, false)
	headless.IPs = nil
	many := *backend()
	for i := range maxConnections + 8 {
		address := netip.MustParseAddr(fmt.Sprintf("172.20.3.%d", i+1))
		many.Endpoints = append(many.Endpoints, ServiceEndpoint{Address: address, Ready: true, Ports: map[string]uint16{"http": 8080}})
	}
	twoPorts := *backend(true)
	twoPorts.Ports = []ServicePort{{"dns", "UDP", 53}, {"dns-tcp", "TCP", 53}, {"http", "TCP", 80}}
	twoPorts.Endpoints[0].Ports = map[string]uint16{"dns": 5353, "dns-tcp": 5354, "http": 8080}
	allReady := *backend(true, true)
	allReady.IPs = nil
	local, elsewhere := *placed("node-b", "node-a"), *placed("node-b", "node-b")
	ending, localEnding := *ends(false, true), *ends(true, true)
	localEnding.LocalOnly, localEnding.Endpoints[1].Node = true, "node-a"
	headlessEnding := *ends(true, true)
	headlessEnding.IPs, headlessEnding.Endpoints[0].Address = nil, pod1
	alias := Service{Namespace: "default", Name: "alias", ExternalName: "backend.default.svc.cluster.local"}
	for name, test := range map[string]struct {
		target  string
		service Service
		reply   netip.Addr
		want    []string
	}{
		"the Service's, given":    {backendName + ":80", *backend(true, true), backendIP, []string{"172.21.0.20:80", "172.20.1.10:8080", "172.20.1.11:8080"}},
		"the Service's, by name":  {backendName, *backend(true), backendIP, []string{"172.21.0.20:80", "172.20.1.10:8080"}},
		"not ready":               {backendName, *backend(false, true), backendIP, []string{"172.21.0.20:80", "172.20.1.11:8080"}},
		"none of the Service's":   {backendName + ":81", *backend(true), backendIP, nil},
		"TCP before UDP":          {backendName + ":53", twoPorts, backendIP, []string{"172.21.0.20:53", "172.20.1.10:5354"}},
		"headless":                {backendName, headless, pod0, []string{"172.20.1.10:8080"}},
		"headless, given":         {backendName + ":9000", headless, pod0, []string{"172.20.1.10:9000"}},
		"Service address":         {"172.21.0.20:80", *backend(true), backendIP, []string{"172.21.0.20:80", "172.20.1.10:8080"}},
		"Pod address":             {"172.20.1.10", *backend(true, true), backendIP, []string{"172.20.1.10:8080"}},
		"Pod address, given":      {"172.20.1.10:9000", *backend(true, true), backendIP, []string{"172.20.1.10:9000"}},
		"Pod's name":              {"172-20-1-10.default.pod.cluster.local.", *backend(true, true), pod0, []string{"172.20.1.10:8080"}},
		"Pod's name, given":       {"172-20-1-10.default.pod.cluster.local.:9000", *backend(true, true), pod0, []string{"172.20.1.10:9000"}},
		"Pod of a Service":        {"172-20-1-10.backend.default.svc.cluster.local.", *backend(true, true), pod0, []string{"172.20.1.10:8080"}},
		"Pod of a headless one":   {"172-20-1-10.backend.default.svc.cluster.local.", allReady, pod0, []string{"172.20.1.10:8080"}},
		"port of a headless one":  {"_http._tcp.backend.default.svc.cluster.local.", allReady, pod0, []string{"172.20.1.10:8080", "172.20.1.11:8080"}},
		"alias":                   {"alias.default.svc.cluster.local.", *backend(true), backendIP, []string{"172.21.0.20:80", "172.20.1.10:8080"}},
		"nobody's address, given": {"192.0.2.1:80", *backend(true), backendIP, []string{"192.0.2.1:80"}},
		"nobody's address":        {"192.0.2.1", *backend(true), backendIP, nil},
		"local":                   {backendName, local, backendIP, []string{"172.21.0.20:80", "172.20.1.11:8080"}},
		"local, none here":        {backendName, elsewhere, backendIP, []string{"172.21.0.20:80"}},
		"local, by a Pod":         {"172.20.1.10", elsewhere, backendIP, []string{"172.20.1.10:8080"}},
		"ending":                  {backendName, ending, backendIP, []string{"172.21.0.20:80", "172.20.1.11:8080"}},
		"ending beside a ready":   {backendName, *ends(true, true), backendIP, []string{"172.21.0.20:80", "172.20.1.10:8080"}},
		"local and ending":        {backendName, localEnding, backendIP, []string{"172.21.0.20:80", "172.20.1.11:8080"}},
		"headless, ending":        {backendName, headlessEnding, pod1, []string{"172.20.1.11:8080"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork()
			n.serve(t, hostDNS, func(m *dns.Msg, q dns.Question, _ bool) { record(m, q, test.reply) })
			e := gather(t, newChecker(n, cluster{services: map[string]Service{"default/backend": test.service, "default/alias": alias}}), test.target)
			var got []string
			for _, c := range e.Connections {
				got = append(got, c.To.String())
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	n := newNetwork()
	n.serve(t, hostDNS, clusterDNS)
	e := gather(t, newChecker(n, cluster{services: map[string]Service{"default/backend": many}}), backendName)
	if len(e.Connections) != maxConnections || e.Untried != 9 { // one of them is to the Service
		t.Errorf("%d connections, %d left out", len(e.Connections), e.Untried)
	}
}

func TestGatherCluster(t *testing.T) {
	forbidden := errors.New("the apiserver forbids the request")
	for name, test := range map[string]struct {
		target  string
		cluster cluster
		want    ClusterAnswer
	}{
		"missing": {
			"backed.default.svc.cluster.local.", cluster{services: map[string]Service{"default/backend": {}}},
			ClusterAnswer{Source: "apiserver x", Node: "node-a", Missing: "default/backed", Others: []string{"backend"}},
		},
		"forbidden": {backendName, cluster{err: forbidden}, ClusterAnswer{Source: "apiserver x", Node: "node-a", Problem: forbidden.Error()}},
		"down":      {backendName, cluster{err: ErrDown}, ClusterAnswer{Source: "apiserver x", Node: "node-a", Problem: ErrDown.Error(), Down: true}},
		"outside":   {"www.example.com.", cluster{err: ErrDown}, ClusterAnswer{}},
		"nobody's":  {"192.0.2.1", cluster{}, ClusterAnswer{Source: "apiserver x", Node: "node-a"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork()
			n.serve(t, hostDNS, clusterDNS)
			if diff := cmp.Diff(test.want, gather(t, newChecker(n, test.cluster), test.target).Cluster); diff != "" {
				t.Error(diff)
			}
		})
	}
	c := newChecker(newNetwork(), cluster{})
	c.Cluster = func() (ClusterView, error) { return nil, fmt.Errorf("%w: name one", ErrNoCluster) }
	if got := gather(t, c, "192.0.2.1").Cluster; got.Problem != "no kubeconfig was found: name one" || got.Down {
		t.Errorf("%+v", got)
	}
}

// Without the right to ask the program, the settings say what to expect, and the step says that it is no more.
func TestGatherPath(t *testing.T) {
	c := newChecker(newNetwork(), cluster{})
	c.Kernel, c.KernelProblem = nil, errors.New("this requires root")
	for name, want := range map[string]Carrier{backendName: Kernel, "www.example.com.": Forwarder} {
		if got := c.path(hostDNS, name); got.Carrier != want || got.Inferred == "" {
			t.Errorf("%s: %+v, want %s", name, got, want)
		}
	}
	c.Host.InKernel = false // --no-bpf
	if got := c.path(hostDNS, backendName); got != (Path{Carrier: Forwarder}) {
		t.Errorf("without programs: %+v", got)
	}
	if got := c.path(oldDNS, backendName); got != (Path{Carrier: Direct}) {
		t.Errorf("another server: %+v", got)
	}
}

func TestReplyAdd(t *testing.T) {
	m := new(dns.Msg).SetQuestion(backendName, dns.TypeA)
	m.Answer = []dns.RR{
		&dns.CNAME{Hdr: dns.RR_Header{Name: backendName, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: 30}, Target: "a."},
		&dns.A{Hdr: dns.RR_Header{Name: "a.", Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 10}, A: backendIP.AsSlice()},
	}
	m.SetEdns0(1232, false)
	m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeNetworkError}}
	var r Reply
	r.add(m)
	want := Reply{Addresses: []netip.Addr{backendIP}, Aliases: []string{"a."}, TTL: 10 * time.Second, Extended: "Network Error"}
	if diff := cmp.Diff(want, r, cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); diff != "" {
		t.Error(diff)
	}
}

func TestClassify(t *testing.T) {
	wrap := func(err error) error { return &net.OpError{Op: "dial", Err: fmt.Errorf("connect: %w", err)} }
	for _, test := range []struct {
		err  error
		want FailureKind
	}{
		{wrap(syscall.ECONNREFUSED), Refused},
		{wrap(syscall.EHOSTUNREACH), Unreachable},
		{wrap(syscall.ENETUNREACH), Unreachable},
		{wrap(syscall.EACCES), Unreachable},
		{wrap(syscall.ETIMEDOUT), Silent},
		{wrap(context.DeadlineExceeded), Silent},
		{&net.OpError{Op: "read", Err: new(timeoutError)}, Silent},
		{wrap(syscall.ECONNRESET), Broken},
		{errors.New("dns: id mismatch"), Broken},
	} {
		if got := classify(test.err); got.Kind != test.want || got.Text == "" {
			t.Errorf("%v: %+v, want %s", test.err, got, test.want)
		}
	}
}

type timeoutError struct{}

func (*timeoutError) Error() string   { return "i/o timeout" }
func (*timeoutError) Timeout() bool   { return true }
func (*timeoutError) Temporary() bool { return true }
