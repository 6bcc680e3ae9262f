package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

var transparent = []string{"--resolver", "transparent"}

// hostResolver is the resolver that a host had before, and that goes on to be its resolver.
type hostResolver struct {
	*lab.Server
	h       *host
	address string
}

// startDnsmasq makes dnsmasq the host's resolver.
func (h *host) startDnsmasq(addresses ...string) hostResolver {
	h.t.Helper()
	s, err := h.Dnsmasq(h.t.Context(), 53, addresses...)
	if err != nil {
		h.t.Fatal(err)
	}
	h.nameResolvers(addresses...)
	return hostResolver{s, h, addresses[0]}
}

// nameResolvers writes the host's resolv.conf anew.
func (h *host) nameResolvers(addresses ...string) {
	h.t.Helper()
	text := "# the site's\nsearch example.com\n"
	for _, address := range addresses {
		text += "nameserver " + address + "\n"
	}
	if err := h.Host().WriteFile("/etc/resolv.conf", []byte(text), 0o644); err != nil {
		h.t.Fatal(err)
	}
}

// startResolved makes systemd-resolved the host's resolver, as its package does.
func (h *host) startResolved(servers ...string) hostResolver {
	h.t.Helper()
	// Before it starts, or it would take what it finds there for servers of its own.
	must(h.t, h.Host(), "ln", "-sf", "../run/systemd/resolve/stub-resolv.conf", "/etc/resolv.conf")
	s, err := h.Resolved(h.t.Context(), servers...)
	if err != nil {
		h.t.Fatal(err)
	}
	eventually(h.t, "systemd-resolved is on the bus and has written its files", func() error {
		if _, err := h.Resolvectl(h.t.Context(), "dns"); err != nil {
			return err
		}
		_, err := h.Host().ReadFile("/etc/resolv.conf")
		return err
	})
	return hostResolver{s, h, lab.Stub}
}

func (h *host) resolvectl(args ...string) string {
	h.t.Helper()
	out, err := h.Resolvectl(h.t.Context(), args...)
	if err != nil {
		h.t.Fatal(err)
	}
	return out
}

func (r hostResolver) addrPort() netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(r.address), 53)
}

// asked returns the names below a domain that the resolver has been asked for, once all that came before are in its log.
func (r hostResolver) asked(t *testing.T, domain string) (names []string) {
	t.Helper()
	marker := fmt.Sprintf("marker-%d.example.net.", dns.Id())
	command(t, r.Node(), "dig", "+short", "+tries=1", "@"+r.address, marker)
	eventually(t, "the resolver has logged what it was asked", func() error {
		for _, q := range r.QueryLog() {
			if q.Name == marker {
				return nil
			}
		}
		return errors.New("the last query is not in its log: " + r.Log())
	})
	for _, q := range r.QueryLog() {
		if strings.HasSuffix(strings.ToLower(q.Name), domain) {
			names = append(names, q.Name)
		}
	}
	return names
}

func inCluster(l lookup) bool {
	return !strings.Contains(l.name, "example.com") && l.name != lab.WWW4
}

// TestTransparent: the host keeps its resolver, which hears nothing of the cluster from then on.
func TestTransparent(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		start func(h *host) hostResolver
		args  [][]string
	}{
		{"dnsmasq", func(h *host) hostResolver { return h.startDnsmasq("127.0.0.1") }, [][]string{endpoints, ranges, ranges6}},
		{"dnsmasq on IPv6", func(h *host) hostResolver { return h.startDnsmasq("::1") }, [][]string{endpoints6, ranges, ranges6}},
		{"systemd-resolved", func(h *host) hostResolver { return h.startResolved(lab.External0) }, [][]string{endpoints, ranges, ranges6}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := raise(t, lab.Options{CoreDNSForwards: true})
			resolver := c.start(h)
			before := h.snapshot()
			mtime, inode := h.stamp("/etc/resolv.conf")
			plan := h.run(attachArgs(append(slices.Concat(c.args...), "--resolver", "transparent", "--dry-run")...)...)
			for _, want := range []string{"asked by UDP at " + resolver.address + ",", "not covered: TCP", "send all other names to " + resolver.addrPort().String()} {
				if plan.code != 0 || !strings.Contains(plan.stdout, want) {
					t.Errorf("the plan does not say %q: %v", want, plan)
				}
			}
			if strings.Contains(plan.stdout, "take over") {
				t.Errorf("the plan: %v", plan)
			}
			h.attach(append(c.args, transparent)...)
			r := h.healthy()
			if r.Resolver.State != "transparent" || !slices.Equal(r.Resolver.SteeredAt, []string{resolver.address}) {
				t.Errorf("status says of the resolver: %+v", r.Resolver)
			}
			if !slices.Equal(r.Forwarder.Listen, []string{switchDNS.String()}) {
				t.Errorf("the forwarder listens on %v", r.Forwarder.Listen)
			}
			untouched := func(t *testing.T) {
				t.Helper()
				if m, i := h.stamp("/etc/resolv.conf"); m != mtime || i != inode {
					t.Errorf("resolv.conf is not the one from before: %s %d, %s %d", m, i, mtime, inode)
				}
			}
			untouched(t)
			for _, c := range clients(t) {
				if c.name != "dig over TCP" {
					t.Run(c.name, func(t *testing.T) { resolver.testClient(t, c) })
				}
			}
			t.Run("past us", func(t *testing.T) { resolver.testPassed(t) })
			t.Run("workers", func(t *testing.T) {
				resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
				resolve(t, h.Worker(), switchDNS, lab.WWW, lab.WWW4)
			})

			h.kill()
			h.works()
			untouched(t)
			h.attach(append(c.args, transparent)...)
			h.healthy()
			h.works()
			h.detach()
			h.unchanged(before)
			untouched(t)
			must(t, h.Host(), "getent", "ahostsv4", lab.WWW)
			if out := command(t, h.Host(), "dig", "+short", "+tries=1", lab.Backend).stdout; strings.Contains(out, lab.Backend4) {
				t.Errorf("cluster names are steered after the detach: %s", out)
			}
		})
	}
}

// testClient looks everything up with one kind of client, as it is.
func (r hostResolver) testClient(t *testing.T, c client) {
	t.Helper()
	h := r.h.in(t)
	before := h.healthy()
	cluster := 0
	for _, l := range lookups {
		argv := c.argv(l)
		if argv == nil {
			continue
		}
		out := command(t, h.Host(), argv...)
		got, want := slices.Sorted(slices.Values(c.answers(l, out.stdout))), slices.Sorted(slices.Values(l.want))
		if out.code != 0 || !slices.Equal(got, want) {
			t.Errorf("%s %s: got %q, want %q\n%v", l.kind, l.name, got, want, out)
		}
		if inCluster(l) {
			cluster++
		}
	}
	after := h.healthy()
	if n := after.Reasons["transparent"]["replied"] - before.Reasons["transparent"]["replied"]; n < uint64(cluster) {
		t.Errorf("%d lookups in the cluster, and only %d queries were steered", cluster, n)
	}
	if n := after.Forwarder.Queries - before.Forwarder.Queries; n != 0 {
		t.Errorf("the forwarder was asked %d times", n)
	}
	for _, domain := range []string{lab.Zone, "21.172.in-addr.arpa.", "20.172.in-addr.arpa.", "0.0.0.d.f.ip6.arpa."} {
		if names := r.asked(t, domain); len(names) > 0 {
			t.Errorf("the resolver was asked for %v", names)
		}
	}
	if len(r.asked(t, "example.com.")) == 0 {
		t.Error("the resolver was not asked for names outside of the cluster")
	}
}

// testPassed is about what stays the resolver's though a cluster's name is asked for.
func (r hostResolver) testPassed(t *testing.T) {
	t.Helper()
	h := r.h.in(t)
	for _, c := range []struct {
		network, name, reason string
		change                func(m *dns.Msg)
	}{
		{"tcp", "tcp." + lab.Zone, "", func(*dns.Msg) {}},
		{"udp", "oversize." + lab.Zone, "passed_oversize", func(m *dns.Msg) {
			m.SetEdns0(1232, false)
			m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_PADDING{Padding: make([]byte, 500)}}
		}},
		{"udp", "edns." + lab.Zone, "passed_edns", func(m *dns.Msg) {
			m.SetEdns0(1232, false)
			m.IsEdns0().SetVersion(1)
		}},
	} {
		before := h.healthy()
		m := new(dns.Msg).SetQuestion(c.name, dns.TypeA)
		c.change(m)
		reply, err := h.Host().Exchange(t.Context(), c.network, r.addrPort(), m)
		if err != nil || reply.Rcode == dns.RcodeNameError { // which CoreDNS would say
			t.Errorf("%s: want an answer of the resolver's: %v: %v", c.name, err, reply)
		}
		after := h.healthy()
		if n := after.Counters["transparent"].Steered - before.Counters["transparent"].Steered; n != 0 {
			t.Errorf("%s was steered", c.name)
		}
		if c.reason != "" && after.Reasons["transparent"][c.reason] == before.Reasons["transparent"][c.reason] {
			t.Errorf("%s: not counted as %s: %v", c.name, c.reason, after.Reasons["transparent"])
		}
	}
	if names := r.asked(t, "tcp."+lab.Zone); len(names) == 0 {
		t.Error("TCP did not reach the resolver")
	}
}

// TestTransparentSplitDNS: what systemd-resolved knows of links and domains goes on to count.
func TestTransparentSplitDNS(t *testing.T) {
	h := raise(t, lab.Options{})
	h.startResolved(lab.External0)
	h.resolvectl("dns", "uplink", lab.External1)
	h.resolvectl("domain", "uplink", "~example.com")
	h.attach(endpoints, ranges, transparent)
	which := func() string { return must(t, h.Host(), "dig", "+short", "+tries=1", "which.example.com", "TXT") }
	if out := which(); out != "\"ext1\"\n" {
		t.Errorf("example.com is asked of %q, want the link's server, ext1", out)
	}
	before := queries(t, h.External(1))
	if out := must(t, h.Host(), "dig", "+short", "+tries=1", "www.example.net"); out != lab.OutsideAnswer+"\n" {
		t.Errorf("another name: %q", out)
	}
	if n := queries(t, h.External(1)) - before; n != 0 {
		t.Errorf("the link's server was asked %d times for a name that is not in its domain", n)
	}
	// And what changes while attached.
	h.resolvectl("domain", "uplink", "~example.org")
	if out := which(); out != "\"ext0\"\n" {
		t.Errorf("example.com is asked of %q now, want ext0", out)
	}
	// The forwarder asks the host's resolver, so workers have it too.
	h.resolvectl("domain", "uplink", "~example.com")
	if out := must(t, h.Worker(), "dig", "+short", "+tries=1", "which.example.com", "TXT"); out != "\"ext1\"\n" {
		t.Errorf("a worker's example.com is asked of %q", out)
	}
	h.works()
	if text, err := h.Host().ReadFile(kubeletFile); err != nil || !strings.Contains(string(text), "nameserver "+lab.External0+"\n") || strings.Contains(string(text), "127.") {
		t.Errorf("the file for pods: %v: %s", err, text)
	}
}

// TestTransparentNoEndpoint: a query that no endpoint can be steered to for is answered by the kernel, at once. The
// resolver, which would ask outside, does not hear of it.
func TestTransparentNoEndpoint(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		endpoints []string
		server    string
	}{
		{"IPv4", endpoints6, "127.0.0.1"},
		{"IPv6", endpoints, "::1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			resolver := h.startDnsmasq("127.0.0.1", "::1")
			h.attach(c.endpoints, ranges, transparent)
			before := h.healthy()
			for _, extra := range [][]string{{}, {"+noedns"}, {"+nocookie"}, {"+cd", "+dnssec"}} {
				out := must(t, h.Host(), append([]string{"dig", "+tries=1", "@" + c.server, lab.Backend}, extra...)...)
				if !strings.Contains(out, "status: SERVFAIL") || strings.Contains(out, "arning") || strings.Contains(out, "COOKIE") {
					t.Errorf("%v: %s", extra, out)
				}
			}
			if n := h.healthy().Counters["transparent"].Answered - before.Counters["transparent"].Answered; n != 4 {
				t.Errorf("%d queries were answered by the kernel, want 4", n)
			}
			if names := resolver.asked(t, lab.Zone); len(names) != 0 {
				t.Errorf("the resolver was asked for %v", names)
			}
			// glibc goes on to the resolver's other address, where there are endpoints.
			h.works()
			counters, err := h.Host().Counters()
			if err != nil {
				t.Fatal(err)
			}
			if counters["UdpInCsumErrors"]+counters["Udp6InCsumErrors"] != 0 {
				t.Errorf("checksum errors: %v", counters)
			}
		})
	}
}

// TestTransparentAllDead: the kernel answers that nobody is there, at once, and the resolver does not hear of it. The dead are
// found alive again.
func TestTransparentAllDead(t *testing.T) {
	h := raise(t, lab.Options{})
	resolver := h.startDnsmasq("127.0.0.1")
	h.attach(endpoints, ranges, transparent)
	for _, s := range h.cluster() {
		if err := s.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	h.judged(lab.CoreDNS0v4+":53", false)
	h.judged(lab.CoreDNS1v4+":53", false)
	before := h.status()
	const rounds = 10
	for range rounds {
		raw, err := ask(h.Host(), hostDNS, pack(t, 4, lab.Backend, dns.TypeA), noReply)
		var m dns.Msg
		if err := errors.Join(err, m.Unpack(raw)); err != nil || m.Rcode != dns.RcodeServerFailure {
			t.Errorf("want SERVFAIL, got %v, %v", &m, err)
		}
	}
	if n := h.status().Counters["transparent"].Answered - before.Counters["transparent"].Answered; n != rounds {
		t.Errorf("%d of %d queries were answered by the kernel", n, rounds)
	}
	if names := resolver.asked(t, lab.Zone); len(names) != 0 {
		t.Errorf("the resolver was asked for %v", names)
	}
	resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
	if err := h.CoreDNS(0).Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.judged(lab.CoreDNS0v4+":53", true)
	for range rounds {
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	}
}

// TestTransparentFollows: queries are steered to where resolv.conf says that the resolver is now.
func TestTransparentFollows(t *testing.T) {
	h := raise(t, lab.Options{})
	first := h.startDnsmasq("127.0.0.1")
	h.attach(endpoints, ranges, transparent)
	second := h.startDnsmasq("127.0.0.2")
	eventually(t, "the new resolver's address is steered at", func() error {
		if at := h.status().Resolver.SteeredAt; !slices.Equal(at, []string{second.address}) {
			return fmt.Errorf("it is %v", at)
		}
		return nil
	})
	h.works()
	for _, r := range []hostResolver{first, second} {
		if names := r.asked(t, lab.Zone); len(names) != 0 {
			t.Errorf("%s was asked for %v", r.address, names)
		}
	}
	resolve(t, h.Worker(), switchDNS, lab.WWW, lab.WWW4)
	if len(second.asked(t, lab.WWW)) < 2 {
		t.Error("the forwarder does not ask the new resolver")
	}

	// Names of a file that is half written, or that names others, are not followed: but the status says so.
	h.nameResolvers(lab.External0)
	eventually(t, "status tells that programs ask another server", func() error {
		r := h.status()
		if r.Healthy || !strings.Contains(strings.Join(r.Problems, "\n"), lab.External0) {
			return fmt.Errorf("problems: %v", r.Problems)
		}
		return nil
	})
	resolve(t, h.Host(), second.addrPort(), lab.Backend, lab.Backend4)
	h.nameResolvers(second.address)
	eventually(t, "all is well again", func() error {
		if r := h.status(); !r.Healthy {
			return fmt.Errorf("problems: %v", r.Problems)
		}
		return nil
	})
}

// TestTransparentRefused: where it can't work, nothing is attached.
func TestTransparentRefused(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	refused := func(t *testing.T, want []string, args ...string) {
		t.Helper()
		out := h.in(t).run(attachArgs(append(transparent, args...)...)...)
		if out.code != 1 && out.code != 2 {
			t.Errorf("exit %d: %v", out.code, out)
		}
		for _, text := range want {
			if !strings.Contains(out.stderr, text) {
				t.Errorf("no %q: %v", text, out)
			}
		}
	}
	t.Run("no resolver on loopback", func(t *testing.T) {
		refused(t, []string{"/etc/resolv.conf", "no resolver on loopback", lab.External0, "--resolver takeover"})
	})
	t.Run("no BPF", func(t *testing.T) { refused(t, []string{"transparent", "--no-bpf"}, "--no-bpf") })
	if diff := lab.Diff(before, h.snapshot()); diff != "" {
		t.Errorf("the host is not as before:\n%s", diff)
	}
	t.Run("redirected", func(t *testing.T) {
		h := h.in(t)
		h.startDnsmasq("127.0.0.1")
		if _, err := h.Dnsmasq(t.Context(), 5300, "127.0.0.1"); err != nil {
			t.Fatal(err)
		}
		must(t, h.Host(), "nft", "add table ip site; add chain ip site out { type nat hook output priority -100; }; "+
			"add rule ip site out ip daddr 127.0.0.1 udp dport 53 redirect to :5300")
		before := h.snapshot()
		refused(t, []string{"self-test", "the host's resolver itself answers", "nftables"})
		h.unchanged(before)
	})
	t.Run("another address family", func(t *testing.T) {
		h := h.in(t)
		h.nameResolvers("::1")
		refused(t, []string{"self-test", "address family"})
	})
}

// TestTakeOverResolved: systemd-resolved is no upstream while our file is in place, since it reads that: its uplinks are.
func TestTakeOverResolved(t *testing.T) {
	h := raise(t, lab.Options{})
	h.startResolved()
	h.resolvectl("dns", "uplink", lab.External0, lab.External1)
	h.resolvectl("domain", "uplink", "~.")
	uplinks := "/run/systemd/resolve/resolv.conf"
	eventually(t, "systemd-resolved publishes its uplinks", func() error {
		if text, err := h.Host().ReadFile(uplinks); err != nil || !strings.Contains(string(text), lab.External1) {
			return fmt.Errorf("%w: %s", err, text)
		}
		return nil
	})
	mtime, inode := h.stamp("/etc/resolv.conf")
	h.attach()
	check := func() {
		t.Helper()
		if got := h.healthy().Resolver.Upstreams; !slices.Equal(got, []string{lab.External0 + ":53", lab.External1 + ":53"}) {
			t.Errorf("upstreams %v", got)
		}
		text, err := h.Host().ReadFile(kubeletFile)
		if err != nil || strings.Contains(string(text), "127.") || !strings.Contains(string(text), lab.External0) {
			t.Errorf("the file for pods: %v: %s", err, text)
		}
	}
	check()
	h.works()

	// It takes our address for a server once it is asked, and passes it on to whoever reads its list: why pods must not.
	command(t, h.Host(), "dig", "+short", "+tries=1", "@"+lab.Stub, lab.WWW)
	h.resolvectl("dns", "uplink", lab.External1, lab.Ext0v6)
	text, err := h.Host().ReadFile(uplinks)
	if err != nil || !strings.Contains(string(text), "nameserver 127.0.0.1\n") {
		t.Errorf("systemd-resolved does not list our address: docs/resolver.md says so: %v: %s", err, text)
	}
	check()
	h.detach()
	if m, i := h.stamp("/etc/resolv.conf"); m != mtime || i != inode {
		t.Error("the link is not the one from before")
	}
	must(t, h.Host(), "getent", "ahostsv4", lab.WWW)

	// It keeps it after a detach, until it is restarted; the next attach does not fall for it.
	if out := h.resolvectl("dns"); !strings.Contains(out, "Global: 127.0.0.1") {
		t.Errorf("systemd-resolved has forgotten our address: docs/resolver.md says that it keeps it: %s", out)
	}
	h.attach()
	if got := h.healthy().Resolver.Upstreams; !slices.Equal(got, []string{lab.External1 + ":53", "[" + lab.Ext0v6 + "]:53"}) {
		t.Errorf("upstreams of the second attach: %v", got)
	}
	h.works()
	h.detach()
}
