package diagnose

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

const backendName = "backend.default.svc.cluster.local."

var (
	hostDNS    = netip.MustParseAddrPort("127.0.0.1:53")
	oldDNS     = netip.MustParseAddrPort("192.0.2.53:53")
	coreDNS0   = netip.MustParseAddrPort("172.20.0.10:53")
	coreDNS1   = netip.MustParseAddrPort("172.20.0.11:53")
	backendIP  = netip.MustParseAddr("172.21.0.20")
	backend80  = netip.AddrPortFrom(backendIP, 80)
	pod0       = netip.MustParseAddr("172.20.1.10")
	pod1       = netip.MustParseAddr("172.20.1.11")
	outsideIP  = netip.MustParseAddr("203.0.113.80")
	outside443 = netip.AddrPortFrom(outsideIP, 443)
)

func refused() *Failure     { return &Failure{Refused, "connection refused"} }
func unreachable() *Failure { return &Failure{Unreachable, "no route to host"} }
func silent() *Failure      { return &Failure{Silent, "no reply"} }

func failed(f *Failure) Reply { return Reply{Server: hostDNS, Tries: 2, Failure: f} }

func says(addresses ...netip.Addr) Reply {
	return Reply{Server: hostDNS, Addresses: addresses, TTL: 5 * time.Second, Tries: 1, Took: time.Millisecond}
}

func rcode(code int) Reply { return Reply{Server: hostDNS, Rcode: code, Tries: 1} }

// of is a reply of another server, asked directly.
func (r Reply) of(server netip.AddrPort) Reply {
	r.Server = server
	return r
}

// tcp is what a connection to a server gave that failed by UDP.
func (r Reply) tcp(f *Failure) Reply {
	r.TCP = f
	return r
}

func backend(ready ...bool) *Service {
	s := &Service{Namespace: "default", Name: "backend", IPs: []netip.Addr{backendIP}, Ports: []ServicePort{{"http", "TCP", 80}}}
	for i, r := range ready {
		s.Endpoints = append(s.Endpoints, ServiceEndpoint{
			Address: []netip.Addr{pod0, pod1}[i], Ready: r, Serving: r, Ports: map[string]uint16{"http": 8080},
		})
	}
	return s
}

// connection to an address, with failures of all tries but the good ones.
func connection(role Role, to netip.AddrPort, failure *Failure) Connection {
	c := Connection{Role: role, To: to, Tries: 1, Failure: failure}
	if failure == nil {
		c.Good = 1
	}
	return c
}

func toPod(address netip.Addr, failure *Failure) Connection {
	return connection(RoleEndpoint, netip.AddrPortFrom(address, 8080), failure)
}

// well is the evidence about backend:80 on an attached host on which all is well. Each test breaks a part of it.
func well() Evidence {
	s := backend(true, true)
	return Evidence{
		Target: Target{Name: "backend.default.svc.cluster.local", Port: 80},
		Host: CheckedHost{
			Attached: true, File: "/etc/resolv.conf", State: "ours", Servers: []netip.Addr{hostDNS.Addr()}, Dots: 1,
			Zones: []string{"cluster.local"}, Endpoints: []netip.AddrPort{coreDNS0, coreDNS1}, Upstreams: []netip.AddrPort{oldDNS},
			Listen: []netip.AddrPort{hostDNS}, InKernel: true,
		},
		Queries: []Query{{Name: backendName, InZone: true, Path: Path{Carrier: Kernel, Reason: "steered"}, Reply: says(backendIP)}},
		CoreDNS: []Reply{says(backendIP).of(coreDNS0), says(backendIP).of(coreDNS1)},
		Cluster: ClusterAnswer{Source: "apiserver x", Service: s, Port: &s.Ports[0]},
		Connections: []Connection{
			connection(RoleService, backend80, nil), toPod(pod0, nil), toPod(pod1, nil),
		},
	}
}

// external is the same about a name outside of the cluster.
func external() Evidence {
	e := well()
	e.Target = Target{Name: "www.example.com", Port: 443}
	e.Queries = []Query{{Name: "www.example.com.", Path: Path{Carrier: Forwarder, Reason: "passed_external"}, Reply: says(outsideIP)}}
	e.CoreDNS, e.Upstreams, e.Cluster = nil, []Reply{says(outsideIP).of(oldDNS)}, ClusterAnswer{}
	e.Connections = []Connection{connection(RoleAddress, outside443, nil)}
	return e
}

// unanswered is a cluster name that gets no reply by way of us, nor from these servers.
func unanswered(replies ...Reply) func(*Evidence) {
	return func(e *Evidence) {
		e.Queries[0].Reply = failed(silent())
		e.CoreDNS = replies
	}
}

// noAddress is a cluster name that CoreDNS answers without an address.
func noAddress(code int) func(*Evidence) {
	return func(e *Evidence) {
		e.Queries[0].Reply = rcode(code)
		e.CoreDNS = []Reply{rcode(code).of(coreDNS0)}
		e.Connections = nil
	}
}

func both(edits ...func(*Evidence)) func(*Evidence) {
	return func(e *Evidence) {
		for _, edit := range edits {
			edit(e)
		}
	}
}

func notAttached(e *Evidence) {
	e.Host.Attached, e.Host.State, e.Host.InKernel = false, "original", false
	e.Queries[0].Path = Path{Carrier: Direct}
	e.Queries[0].Reply.Server = oldDNS
}

func foreign(e *Evidence) {
	e.Host.State = "foreign"
	e.Host.Problems = []string{"/etc/resolv.conf is foreign: programs do not ask k2s-dnsbpf: run k2s-dnsbpf detach and attach again"}
	e.Queries[0].Path = Path{Carrier: Direct}
	e.Queries[0].Reply.Server = oldDNS
}

func noCluster(e *Evidence) {
	e.Cluster = ClusterAnswer{Problem: "no kubeconfig was found: name one with --kubeconfig"}
}

func connect(connections ...Connection) func(*Evidence) {
	return func(e *Evidence) { e.Connections = connections }
}

func service(s *Service) func(*Evidence) {
	return func(e *Evidence) { e.Cluster.Service, e.Cluster.Node = s, "node-a" }
}

func endpoints(ready ...bool) func(*Evidence) {
	return func(e *Evidence) { e.Cluster.Service = backend(ready...) }
}

func TestConclude(t *testing.T) {
	for name, test := range map[string]struct {
		evidence Evidence
		edit     func(*Evidence)
		cause    Cause
		verdict  string
	}{
		"all well": {well(), nil, CauseNone, "DNS is fine; the Service address 172.21.0.20:80 and its 2 endpoints answer"},
		"one endpoint, well": {
			well(), both(endpoints(true), connect(connection(RoleService, backend80, nil), toPod(pod0, nil))), CauseNone,
			"DNS is fine; the Service address 172.21.0.20:80 and its endpoint answer",
		},
		"no ready endpoint": {
			well(), both(endpoints(false, false), connect(connection(RoleService, backend80, refused()))), CauseNoReadyEndpoint,
			"DNS is fine; the Service default/backend has no ready endpoint of 2",
		},
		"no endpoint at all": {
			well(), both(endpoints(), connect()), CauseNoReadyEndpoint, "DNS is fine; the Service default/backend has no ready endpoint",
		},
		"Service datapath": {
			well(), connect(connection(RoleService, backend80, silent()), toPod(pod0, nil), toPod(pod1, nil)), CauseServiceDatapath,
			"DNS is fine; endpoints answer, but the Service address 172.21.0.20:80 does not (no reply): the Service datapath (kube-proxy or eBPF) is broken",
		},
		"for clients elsewhere": {
			well(), both(service(placed("node-b", "node-b")), connect(connection(RoleService, backend80, silent()))), CauseTrafficPolicy,
			"DNS is fine; the Service default/backend is for clients beside its endpoints only (internalTrafficPolicy: Local), and none is on this Node, node-a: nothing is delivered from here, as it says",
		},
		"for clients elsewhere, and delivered nevertheless": {
			well(), both(service(placed("node-b", "node-b")), connect(connection(RoleService, backend80, nil))), CauseNone,
			"DNS is fine; the Service address 172.21.0.20:80 answers",
		},
		"for clients here": {
			well(), both(service(placed("node-a", "node-b")), connect(connection(RoleService, backend80, silent()), toPod(pod0, nil))), CauseServiceDatapath,
			"DNS is fine; endpoints answer, but the Service address 172.21.0.20:80 does not (no reply): the Service datapath (kube-proxy or eBPF) is broken",
		},
		"for clients elsewhere, without a ready endpoint": {
			well(), both(service(func() *Service { s := backend(false); s.LocalOnly = true; return s }()), connect(connection(RoleService, backend80, refused()))),
			CauseNoReadyEndpoint, "DNS is fine; the Service default/backend has no ready endpoint of 1",
		},
		"endpoints that serve on while they end": {
			well(), both(service(ends(false, true)), connect(connection(RoleService, backend80, nil), toPod(pod1, nil))), CauseNone,
			"DNS is fine; the Service address 172.21.0.20:80 and its endpoint answer",
		},
		"endpoints that end": {
			well(), both(service(ends(false, false)), connect(connection(RoleService, backend80, refused()))), CauseNoReadyEndpoint,
			"DNS is fine; the Service default/backend has no ready endpoint of 2",
		},
		"no endpoint, by hand": {
			well(), both(service(&Service{Namespace: "default", Name: "backend", IPs: []netip.Addr{backendIP}, Selectorless: true}), connect(connection(RoleService, backend80, refused()))),
			CauseNoReadyEndpoint,
			"DNS is fine; the Service default/backend has no ready endpoint: it has no selector, so nobody makes its EndpointSlices but by hand",
		},
		"all connections go to a bad endpoint": {
			well(), both(service(func() *Service { s := backend(true, true); s.Sticky = true; return s }()), connect(connection(RoleService, backend80, refused()), toPod(pod0, nil), toPod(pod1, refused()))), CauseEndpoint,
			"DNS is fine; of 2 endpoints of the Service default/backend, 1 does not answer, 172.20.1.11:8080 (connection refused), and all connections from here go to the same one (sessionAffinity: ClientIP)",
		},
		"Service datapath and an endpoint": {
			well(), connect(connection(RoleService, backend80, refused()), toPod(pod0, nil), toPod(pod1, refused())), CauseServiceDatapath,
			"DNS is fine; endpoints answer, but the Service address 172.21.0.20:80 does not (connection refused): " +
				"the Service datapath (kube-proxy or eBPF) is broken; nor does the endpoint 172.20.1.11:8080 (connection refused)",
		},
		"one endpoint of two": {
			well(), connect(connection(RoleService, backend80, nil), toPod(pod0, nil), toPod(pod1, refused())), CauseEndpoint,
			"DNS is fine; of 2 endpoints of the Service default/backend, 1 does not answer, 172.20.1.11:8080 (connection refused): a part of all connections fails",
		},
		"nothing listens": {
			well(), both(endpoints(true), connect(connection(RoleService, backend80, refused()), toPod(pod0, refused()))), CauseNotListening,
			"DNS is fine; nothing listens at the endpoint of the Service default/backend: 172.20.1.10:8080 refuses connections: " +
				"look at the program in the Pod, and at the Service's targetPort",
		},
		"Pods not reached": {
			well(), connect(connection(RoleService, backend80, silent()), toPod(pod0, silent()), toPod(pod1, unreachable())), CauseUnreachable,
			"DNS is fine; no endpoint of the Service default/backend can be reached: 172.20.1.10:8080, 172.20.1.11:8080 (no reply): the path to the Pods is broken",
		},
		"only the Service is reached": {
			well(), connect(connection(RoleService, backend80, nil), toPod(pod0, silent())), CauseNone,
			"DNS is fine; the Service address 172.21.0.20:80 answers",
		},
		"endpoints without that port": {
			well(), connect(connection(RoleService, backend80, silent())), CauseAddress,
			"DNS is fine; the Service address 172.21.0.20:80 does not answer (no reply)",
		},
		"no such port": {
			well(), both(func(e *Evidence) { e.Target.Port, e.Cluster.Port = 81, nil }, connect()), CauseNoSuchPort,
			"DNS is fine; the Service default/backend has no port 81, but 80/TCP",
		},
		"a port for UDP": {
			well(), both(func(e *Evidence) { e.Cluster.Port = &ServicePort{"syslog", "UDP", 514} }, connect()), CauseNone,
			"DNS is fine; whether port 514/UDP answers can't be told by connecting",
		},
		"headless": {
			well(), both(func(e *Evidence) { e.Cluster.Service.IPs, e.Queries[0].Reply = nil, says(pod0, pod1) }, connect(toPod(pod0, nil), toPod(pod1, nil))),
			CauseNone, "DNS is fine; 172.20.1.10:8080, 172.20.1.11:8080 answer",
		},
		"headless, one endpoint of two": {
			well(), both(func(e *Evidence) { e.Cluster.Service.IPs, e.Queries[0].Reply = nil, says(pod0, pod1) }, connect(toPod(pod0, nil), toPod(pod1, refused()))),
			CauseEndpoint, "DNS is fine; of 2 endpoints of the Service default/backend, 1 does not answer, 172.20.1.11:8080 (connection refused): a part of all connections fails",
		},
		"headless without a ready endpoint": {
			well(), both(endpoints(false), func(e *Evidence) { e.Cluster.Service.IPs = nil }, noAddress(dns.RcodeNameError)), CauseNoReadyEndpoint,
			"DNS is fine; the headless Service default/backend has no ready endpoint of 1, and so no address",
		},
		"no kubeconfig": {
			well(), both(noCluster, connect(connection(RoleAddress, backend80, nil))), CauseNone,
			"DNS is fine; 172.21.0.20:80 answers; what is behind is unknown: no kubeconfig was found: name one with --kubeconfig",
		},
		"no kubeconfig and no port": {
			well(), both(noCluster, connect()), CauseNone,
			"DNS is fine; no port was given, so no connection was tried; what is behind is unknown: no kubeconfig was found: name one with --kubeconfig",
		},
		"apiserver down": {
			well(), both(connect(connection(RoleAddress, backend80, nil)), func(e *Evidence) {
				e.Cluster = ClusterAnswer{Source: "x", Problem: "the apiserver is unreachable", Down: true}
			}),
			CauseAPIServer, "DNS is fine; 172.21.0.20:80 answers; what is behind is unknown: the apiserver is unreachable",
		},
		"stale address": {
			well(), func(e *Evidence) { e.Queries[0].Reply = says(outsideIP) }, CauseCoreDNSStale,
			"DNS is stale: CoreDNS answers 203.0.113.80, but the address of the Service default/backend is 172.21.0.20: look at CoreDNS's log",
		},
		"stale absence": {
			well(), noAddress(dns.RcodeNameError), CauseCoreDNSStale,
			"DNS is stale: the Service default/backend exists, but CoreDNS says that backend.default.svc.cluster.local does not: look at CoreDNS's log",
		},
		"no such Service, one like it": {
			well(), both(noAddress(dns.RcodeNameError), func(e *Evidence) {
				e.Cluster = ClusterAnswer{Source: "x", Missing: "default/backed", Others: []string{"backend", "frontend"}}
			}),
			CauseNoSuchName, "DNS is fine; the name does not exist: there is no Service default/backed, but there is default/backend",
		},
		"no such Service, others": {
			well(), both(noAddress(dns.RcodeNameError), func(e *Evidence) {
				e.Cluster = ClusterAnswer{Source: "x", Missing: "default/other", Others: []string{"backend"}}
			}),
			CauseNoSuchName, "DNS is fine; the name does not exist: there is no Service default/other; the namespace default has other ones",
		},
		"no such Service, empty namespace": {
			well(), both(noAddress(dns.RcodeNameError), func(e *Evidence) { e.Cluster = ClusterAnswer{Source: "x", Missing: "dev/backend"} }),
			CauseNoSuchName, "DNS is fine; the name does not exist: there is no Service dev/backend, nor any other in the namespace dev, if that exists",
		},
		"no such name, no cluster": {
			well(), both(noAddress(dns.RcodeNameError), noCluster), CauseNoSuchName, "DNS is fine; the name does not exist: CoreDNS says so",
		},
		"name without address": {
			well(), both(noAddress(dns.RcodeSuccess), noCluster), CauseNoAddress, "DNS is fine; backend.default.svc.cluster.local exists, but has no address",
		},
		"alias that CoreDNS does not resolve": {
			well(), both(noAddress(dns.RcodeSuccess), func(e *Evidence) {
				e.Queries[0].Reply.Aliases = []string{"www.example.com."}
				e.Alias = &Query{Name: "www.example.com.", Reply: says(outsideIP)}
			}),
			CauseNoAddress, "DNS is broken: backend.default.svc.cluster.local is an alias of www.example.com, and its address does not come with it: " +
				"CoreDNS can't resolve that name: check the forward plugin of its Corefile",
		},
		"CoreDNS stopped": {
			well(), unanswered(failed(refused()).of(coreDNS0).tcp(refused()), failed(refused()).of(coreDNS1).tcp(refused())), CauseCoreDNSSilent,
			"DNS is broken: CoreDNS does not answer; the datapath to it works (connection refused)",
		},
		"CoreDNS hangs": {
			well(), unanswered(failed(silent()).of(coreDNS0)), CauseCoreDNSSilent,
			"DNS is broken: CoreDNS does not answer; the datapath to it works (it takes connections, but does not reply)",
		},
		"CoreDNS not reached": {
			well(), unanswered(failed(silent()).of(coreDNS0).tcp(unreachable())), CauseCoreDNSUnreachable,
			"DNS is broken: CoreDNS does not answer; the datapath to it does not work (no route to host)",
		},
		"one CoreDNS stopped, one not reached": {
			well(), unanswered(failed(refused()).of(coreDNS0).tcp(refused()), failed(silent()).of(coreDNS1).tcp(silent())), CauseCoreDNSSilent,
			"DNS is broken: CoreDNS does not answer; the datapath works to 172.20.0.10:53 (connection refused) and not to 172.20.0.11:53 (no reply)",
		},
		"steered to the one that is down": {
			well(), both(unanswered(failed(silent()).of(coreDNS0).tcp(silent()), says(backendIP).of(coreDNS1)), func(e *Evidence) {
				e.Queries[0].Reply.Steered = coreDNS0
			}),
			CauseCoreDNSSilent, "DNS is broken in part: the query went to CoreDNS at 172.20.0.10:53, which does not answer, while 172.20.0.11:53 does",
		},
		"our own path": {
			well(), unanswered(says(backendIP).of(coreDNS0), says(backendIP).of(coreDNS1)), CauseOwnPath,
			"DNS is broken: CoreDNS answers at 172.20.0.10:53, 172.20.0.11:53, but not by way of k2s-dnsbpf (steered by the kernel): look at k2s-dnsbpf status",
		},
		"CoreDNS answers SERVFAIL": {
			well(), both(noAddress(dns.RcodeServerFailure)), CauseCoreDNSFails,
			"DNS is broken: CoreDNS answers SERVFAIL at 172.20.0.10:53: look at its log",
		},
		"no CoreDNS known": {
			well(), unanswered(), CauseCoreDNSUnknown, "DNS is broken: no endpoint of CoreDNS is known: look at k2s-dnsbpf status",
		},
		"not attached": {
			well(), both(noAddress(dns.RcodeNameError), notAttached), CauseNotAttached,
			"DNS is broken: k2s-dnsbpf is not attached: programs ask 192.0.2.53:53 for cluster names: run sudo k2s-dnsbpf attach",
		},
		"not attached, and the server answers for every name": {
			well(), both(func(e *Evidence) { e.Queries[0].Reply = says(outsideIP) }, notAttached, noCluster), CauseNotAttached,
			"DNS is broken: k2s-dnsbpf is not attached: programs ask 192.0.2.53:53 for cluster names: run sudo k2s-dnsbpf attach",
		},
		"not attached, but the server knows the cluster": {
			well(), notAttached, CauseNotAttached,
			"k2s-dnsbpf is not attached; DNS answers without it; the Service address 172.21.0.20:80 and its 2 endpoints answer",
		},
		"resolver file left alone": {
			well(), both(foreign, func(e *Evidence) {
				e.Queries[0].Reply.Addresses, e.Queries[0].Reply.Rcode, e.Host.State, e.Host.Problems = nil, dns.RcodeNameError, "original", nil
			}), CauseResolverForeign,
			"DNS is broken: programs do not ask k2s-dnsbpf: /etc/resolv.conf is original and names 192.0.2.53:53: it is left alone, as --resolver none says",
		},
		"CoreDNS gone": {
			well(), both(unanswered(failed(silent()).of(coreDNS0).tcp(silent())), func(e *Evidence) { e.Host.Unconfirmed = "no ready endpoint" }),
			CauseCoreDNSUnknown,
			"DNS is broken: CoreDNS does not answer where it was last (no reply), and where it is now is unknown: no ready endpoint",
		},
		"CoreDNS scaled to zero": {
			well(), both(unanswered(), func(e *Evidence) { e.Host.Endpoints, e.Host.Unconfirmed = nil, "no ready endpoint" }),
			CauseCoreDNSUnknown, "DNS is broken: no ready endpoint",
		},
		"the kernel's path is broken": {
			well(), func(e *Evidence) { e.Host.Severed = []netip.AddrPort{coreDNS0} }, CauseKernelPath,
			"DNS is fine, but the kernel's path to CoreDNS at 172.20.0.10:53 is broken, so that queries are not steered to it: look at k2s-dnsbpf status; the Service address 172.21.0.20:80 and its 2 endpoints answer",
		},
		"the kernel's path is broken, and there is no other": {
			well(), both(noAddress(dns.RcodeServerFailure), func(e *Evidence) {
				e.Host.Severed, e.CoreDNS = []netip.AddrPort{coreDNS0}, []Reply{says(backendIP).of(coreDNS0)}
			}), CauseKernelPath, "DNS is broken: CoreDNS answers at 172.20.0.10:53, but the kernel's path to 172.20.0.10:53 is broken: look at k2s-dnsbpf status",
		},
		"alias of an address": {
			well(), both(noAddress(dns.RcodeNameError), func(e *Evidence) {
				e.Cluster = ClusterAnswer{Service: &Service{Namespace: "default", Name: "backend", ExternalName: "192.0.2.80"}}
			}), CauseNoAddress,
			"DNS is fine; the name has no address: the Service default/backend is an alias of 192.0.2.80, which is not a name: give it an EndpointSlice instead",
		},
		"resolver file replaced": {
			well(), both(noAddress(dns.RcodeNameError), foreign), CauseResolverForeign,
			"DNS is broken: programs do not ask k2s-dnsbpf: /etc/resolv.conf is foreign and names 192.0.2.53:53: run k2s-dnsbpf detach and attach again",
		},
		"daemon that hangs": {
			well(), func(e *Evidence) {
				e.Host.Problems = []string{"the daemon does not answer within 1s: see /run/k2s-dnsbpf/daemon.log, or end it with k2s-dnsbpf detach"}
			}, CauseInPart,
			"DNS answers, but not all is well: the daemon does not answer within 1s: see /run/k2s-dnsbpf/daemon.log, or end it with k2s-dnsbpf detach; " +
				"the Service address 172.21.0.20:80 and its 2 endpoints answer",
		},
		"forwarder that hangs": {
			external(), func(e *Evidence) { e.Forwarder = new(failed(silent())) }, CauseInPart,
			"DNS answers, but not all is well: forwarder: 127.0.0.1:53 by TCP: no reply; 203.0.113.80:443 answers",
		},
		"no such name, and a daemon that is dead": {
			well(), both(noAddress(dns.RcodeNameError), noCluster, func(e *Evidence) { e.Host.Problems = []string{"the daemon is dead"} }), CauseNoSuchName,
			"DNS answers, but not all is well: the daemon is dead; the name does not exist: CoreDNS says so",
		},
		"external": {external(), nil, CauseNone, "DNS is fine; 203.0.113.80:443 answers"},
		"external, no port": {
			external(), both(connect(), func(e *Evidence) { e.Target.Port = 0 }), CauseNone, "DNS is fine; no port was given, so no connection was tried",
		},
		"external, refused": {
			external(), connect(connection(RoleAddress, outside443, refused())), CauseAddress, "DNS is fine; 203.0.113.80:443 does not answer (connection refused)",
		},
		"external, not attached": {
			external(), notAttached, CauseNotAttached, "k2s-dnsbpf is not attached; DNS answers without it; 203.0.113.80:443 answers",
		},
		"external, resolver file replaced": {
			external(), foreign, CauseResolverForeign,
			"programs do not ask k2s-dnsbpf, since /etc/resolv.conf is foreign; DNS answers without it; 203.0.113.80:443 answers",
		},
		"external, no such name": {
			external(), func(e *Evidence) { e.Queries[0].Reply = rcode(dns.RcodeNameError) }, CauseNoSuchName,
			"DNS is fine; the name does not exist: the server for external names says so",
		},
		"upstreams down": {
			external(), func(e *Evidence) {
				e.Queries[0].Reply = rcode(dns.RcodeServerFailure)
				e.Upstreams = []Reply{failed(silent()).of(oldDNS).tcp(silent())}
			}, CauseUpstreams, "DNS is broken for external names: no upstream server of this host answers: 192.0.2.53:53 (no reply)",
		},
		"forwarder down": {
			external(), func(e *Evidence) { e.Queries[0].Reply = failed(refused()) }, CauseOwnPath,
			"DNS is broken: 192.0.2.53:53 answers, but not by way of k2s-dnsbpf (through the forwarder): look at k2s-dnsbpf status",
		},
		"server down, not attached": {
			external(), both(func(e *Evidence) { e.Queries[0].Reply = failed(silent()) }, notAttached), CauseUpstreams,
			"DNS is broken: 192.0.2.53:53, which /etc/resolv.conf names, does not answer (no reply)",
		},
		"address of a Service": {
			well(), func(e *Evidence) { e.Target.Name, e.Queries, e.CoreDNS, e.Decisive = backendIP.String(), nil, nil, -1 }, CauseNone,
			"no DNS is needed; the Service address 172.21.0.20:80 and its 2 endpoints answer",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if test.edit != nil {
				test.edit(&test.evidence)
			}
			r := Conclude(test.evidence)
			if r.Cause != test.cause || r.Healthy != (test.cause == CauseNone) {
				t.Errorf("cause %s, healthy %t; want %s", r.Cause, r.Healthy, test.cause)
			}
			if diff := cmp.Diff(test.verdict, r.Verdict); diff != "" {
				t.Error(diff)
			}
			if strings.HasPrefix(r.Verdict, "DNS is fine") && slices.ContainsFunc(r.Steps, func(s Step) bool {
				return s.Question == Where && s.State == StepBad && s.About != aboutAnswer
			}) {
				t.Errorf("%q stands above %+v", r.Verdict, r.Steps)
			}
			if strings.ContainsAny(r.Verdict, "\n\t") {
				t.Errorf("more than one line: %q", r.Verdict)
			}
			var table strings.Builder
			if err := r.Write(&table, status.Table); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestSteps(t *testing.T) {
	e := well()
	e.Cluster.Service.Endpoints[1].Ready = false
	e.Connections = []Connection{connection(RoleService, backend80, silent()), toPod(pod0, nil)}
	e.Connections[0].Tries = 9
	e.Untried = 4
	e.CoreDNS[1] = failed(silent()).of(coreDNS1).tcp(unreachable())
	e.CoreDNS[1].Way = "this host has no route to it"
	e.Queries[0].Reply.Steered = coreDNS0
	var table strings.Builder
	if err := Conclude(e).Write(&table, status.Table); err != nil {
		t.Fatal(err)
	}
	want := `DNS answers, but not all is well: CoreDNS: 172.20.0.11:53 asked directly: no reply; endpoints answer, but the Service address 172.21.0.20:80 does not (no reply): the Service datapath (kube-proxy or eBPF) is broken

WHERE IS IT?
  ok   resolver  /etc/resolv.conf is ours: programs ask 127.0.0.1:53
  ok   path      backend.default.svc.cluster.local: the kernel steers it to CoreDNS, to 172.20.0.10:53 (steered)
  ok   answer    backend.default.svc.cluster.local: NOERROR, 172.21.0.20, TTL 5 s, 1.0 ms
  ok   CoreDNS   172.20.0.10:53 asked directly: the same, 1.0 ms
  bad  CoreDNS   172.20.0.11:53 asked directly: no reply; by TCP: no route to host; this host has no route to it

HOW DO I GET THERE?
  ok       Service    default/backend has the address 172.21.0.20 (apiserver x)
  ok       endpoints  1 of 2 ready, not 172.20.1.11
  bad      Service    172.21.0.20:80: no reply, 9 times
  ok       endpoint   172.20.1.10:8080: connected
  unknown  endpoint   4 more were not tried
`
	if diff := cmp.Diff(want, table.String()); diff != "" {
		t.Error(diff)
	}
}

func TestParseTarget(t *testing.T) {
	for text, want := range map[string]Target{
		"backend":             {Name: "backend"},
		"backend.default.:80": {Name: "backend.default.", Port: 80},
		"172.21.0.20":         {Name: "172.21.0.20"},
		"172.21.0.20:80":      {Name: "172.21.0.20", Port: 80},
		"fd00:21::20":         {Name: "fd00:21::20"},
		"[fd00:21::20]":       {Name: "fd00:21::20"},
		"[fd00:21::20]:80":    {Name: "fd00:21::20", Port: 80},
	} {
		if got, err := ParseTarget(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v; want %+v", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", ":80", "a:", "a:0", "a:65536", "a:http", "a:b:80", "http://a", "a b", "a..b", "[a]:80:80", strings.Repeat("a", 64),
	} {
		if got, err := ParseTarget(text); err == nil {
			t.Errorf("%q is taken for %+v", text, got)
		}
	}
}

func TestCandidates(t *testing.T) {
	search := []string{"default.svc.cluster.local", "example.com."}
	for _, test := range []struct {
		name   string
		search []string
		dots   int
		want   []string
	}{
		{"backend", search, 1, []string{"backend.default.svc.cluster.local.", "backend.example.com.", "backend."}},
		{"www.example", search, 1, []string{"www.example.", "www.example.default.svc.cluster.local.", "www.example.example.com."}},
		{"www.example", search, 5, []string{"www.example.default.svc.cluster.local.", "www.example.example.com.", "www.example."}},
		{"backend", search, 0, []string{"backend.", "backend.default.svc.cluster.local.", "backend.example.com."}},
		{"www.example.", search, 5, []string{"www.example."}},
		{"backend", []string{"."}, 1, []string{"backend."}},
	} {
		if diff := cmp.Diff(test.want, candidates(test.name, test.search, test.dots)); diff != "" {
			t.Errorf("%s, ndots %d:\n%s", test.name, test.dots, diff)
		}
	}
}

func TestServiceOf(t *testing.T) {
	zones := []string{"cluster.local", "21.172.in-addr.arpa"}
	for name, want := range map[string]string{
		"backend.default.svc.cluster.local.":            "default/backend",
		"BackEnd.Default.SVC.Cluster.Local.":            "default/backend",
		"h0.headless.default.svc.cluster.local.":        "default/headless",
		"_http._tcp.backend.default.svc.cluster.local.": "default/backend",
		"default.svc.cluster.local.":                    "",
		"1-2-3-4.default.pod.cluster.local.":            "",
		"backend.default.svc.example.com.":              "",
		"20.0.21.172.in-addr.arpa.":                     "",
	} {
		namespace, service, ok := serviceOf(name, zones)
		if got := namespace + "/" + service; ok != (want != "") || ok && got != want {
			t.Errorf("%s: %s, %t; want %q", name, got, ok, want)
		}
	}
}

func TestNearest(t *testing.T) {
	names := []string{"backend", "frontend", "db"}
	for name, want := range map[string]string{
		"backed": "backend", "bakcend": "backend", "frontends": "frontend", "dp": "db", "other": "", "x": "",
	} {
		if got := say.Nearest(name, names); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}
