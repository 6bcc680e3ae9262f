package e2e

import (
	"slices"
	"strings"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// lookup is one thing to look up, and all that is to come out, in the form of `dig +short`.
type lookup struct {
	kind, name string
	want       []string
}

var lookups = []lookup{
	{"a", lab.Backend, []string{lab.Backend4}},
	{"aaaa", lab.Backend, []string{lab.Backend6}},
	{"a", lab.Headless, lab.Headless4},
	{"a", "h1." + lab.Headless, lab.Headless4[1:2]},
	{"srv", "_http._tcp." + lab.Backend, []string{"0 100 80 " + lab.Backend}},
	{"srv", "_http._tcp." + lab.Headless, []string{
		"0 33 8080 h0." + lab.Headless, "0 33 8080 h1." + lab.Headless, "0 33 8080 h2." + lab.Headless,
	}},
	{"ptr", lab.Backend4, []string{lab.Backend}},
	{"ptr", lab.Backend6, []string{lab.Backend}},
	{"ptr", lab.Headless4[2], []string{"h2." + lab.Headless}},
	{"a", lab.WWW, []string{lab.WWW4}},
	{"aaaa", lab.WWW, []string{lab.WWW6}},
	{"srv", "_sip._tcp.example.com.", []string{"0 5 5060 " + lab.WWW}},
	{"ptr", lab.WWW4, []string{lab.WWW}},
	// An ExternalName Service: CoreDNS asks outside for the target by itself.
	{"a", lab.External, []string{lab.WWW4}},
	{"aaaa", lab.External, []string{lab.WWW6}},
}

// A client is a program that resolves, and how it is called for a lookup; nil if it can't do that.
type client struct {
	name string
	argv func(l lookup) []string
	// answers of its output.
	answers func(l lookup, out string) []string
}

func clients(t *testing.T) []client {
	t.Helper()
	helper := func(name string) string {
		path, err := lab.Helper(name)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	goresolve, musl := helper("goresolve"), helper("muslresolve")
	lines := func(_ lookup, out string) []string { return strings.Split(strings.TrimSpace(out), "\n") }
	dig := func(extra ...string) func(l lookup) []string {
		return func(l lookup) []string {
			argv := append([]string{"dig", "+short", "+tries=1"}, extra...)
			if l.kind == "ptr" {
				return append(argv, "-x", l.name)
			}
			return append(argv, l.name, l.kind)
		}
	}
	// With CNAMEs, dig +short prints the chain first.
	last := func(l lookup, out string) []string {
		return slices.DeleteFunc(lines(l, out), func(s string) bool { return l.name == lab.External && s == lab.WWW })
	}
	return []client{
		{"dig", dig(), last},
		{"dig over TCP", dig("+tcp"), last},
		{"dig without EDNS", dig("+noedns"), last},
		{"glibc", func(l lookup) []string {
			switch l.kind {
			case "a":
				return []string{"getent", "ahostsv4", l.name}
			case "aaaa":
				return []string{"getent", "ahostsv6", l.name}
			case "ptr":
				return []string{"getent", "hosts", l.name}
			}
			return nil // getent knows no SRV
		}, func(l lookup, out string) []string {
			var found []string
			for line := range strings.Lines(out) {
				f := strings.Fields(line)
				if l.kind == "ptr" {
					found = append(found, f[1]+".")
				} else if f[1] == "STREAM" { // one of three lines for each address
					found = append(found, f[0])
				}
			}
			return found
		}},
		{"Go", func(l lookup) []string { return []string{goresolve, l.kind, l.name} }, lines},
		{"musl", func(l lookup) []string { return []string{musl, l.kind, l.name} },
			func(l lookup, out string) []string {
				found := lines(l, out)
				for i, f := range found { // it prints names without the final dot
					if l.kind == "srv" || l.kind == "ptr" {
						found[i] = strings.TrimSuffix(f, ".") + "."
					}
				}
				return found
			}},
	}
}

// TestResolvers looks everything up with every kind of resolver that programs have, as they are: from /etc/resolv.conf,
// which says 127.0.0.1 on the attached host and the KubeSwitch address on the worker.
func TestResolvers(t *testing.T) {
	h := raise(t, lab.Options{CoreDNSForwards: true})
	h.attach(endpoints, endpoints6, ranges, ranges6)
	conf, err := h.Host().ReadFile("/etc/resolv.conf")
	if err != nil || !strings.Contains(string(conf), "\nnameserver 127.0.0.1\n") {
		t.Fatalf("the host does not ask 127.0.0.1: %v: %s", err, conf)
	}
	for _, from := range []struct {
		node  *lab.Node
		scope string
	}{{h.Host(), "host"}, {h.Worker(), "kubeswitch"}} {
		for _, c := range clients(t) {
			t.Run(from.node.Name()+" "+c.name, func(t *testing.T) {
				h := h.in(t)
				before := h.healthy()
				inCluster := 0
				for _, l := range lookups {
					argv := c.argv(l)
					if argv == nil {
						continue
					}
					r := command(t, from.node, argv...)
					got := c.answers(l, r.stdout)
					slices.Sort(got)
					want := slices.Sorted(slices.Values(l.want))
					if r.code != 0 || !slices.Equal(got, want) {
						t.Errorf("%s %s: got %q, want %q\n%v", l.kind, l.name, got, want, r)
					}
					if !strings.Contains(l.name, "example.com") && l.name != lab.WWW4 {
						inCluster++
					}
				}
				// And they took the way that they should: steered, but over TCP.
				after := h.healthy()
				steered := after.Reasons[from.scope]["replied"] - before.Reasons[from.scope]["replied"]
				forwarded := after.Forwarder.Queries - before.Forwarder.Queries
				if c.name == "dig over TCP" {
					if steered != 0 || forwarded != uint64(len(lookups)) {
						t.Errorf("%d of %d lookups over TCP were steered, %d forwarded", steered, len(lookups), forwarded)
					}
				} else if steered < uint64(inCluster) {
					t.Errorf("%d lookups in the cluster, and only %d queries were steered", inCluster, steered)
				}
			})
		}
	}

	t.Run("CNAME", func(t *testing.T) {
		for _, from := range []*lab.Node{h.Host(), h.Worker()} {
			out := must(t, from, "dig", "+short", lab.External, "A")
			if out != lab.WWW+"\n"+lab.WWW4+"\n" {
				t.Errorf("%s: the chain of %s is %q", from.Name(), lab.External, out)
			}
		}
	})

	t.Run("search", func(t *testing.T) {
		// host0's search list is that of before: example.com.
		if out := must(t, h.Host(), "getent", "ahostsv4", "www"); !strings.HasPrefix(out, lab.WWW4+" ") {
			t.Errorf("www by way of the search list: %q", out)
		}
	})

	t.Run("TC to TCP", func(t *testing.T) {
		for _, from := range []*lab.Node{h.Host(), h.Worker()} {
			for _, test := range []struct {
				name, kind string
				want       int
			}{{lab.Big, "A", lab.BigCount}, {lab.BigExternal, "TXT", 20}} {
				out := must(t, from, "dig", "+short", test.name, test.kind)
				if n := strings.Count(out, "\n"); n != test.want || strings.Contains(out, ";;") {
					t.Errorf("%s: %d answers for %s, want %d: %s", from.Name(), n, test.name, test.want, out)
				}
				ignored := must(t, from, "dig", "+ignore", "+bufsize=4096", test.name, test.kind)
				if !strings.Contains(ignored, " tc") {
					t.Errorf("%s: no TC for %s over UDP: %s", from.Name(), test.name, ignored)
				}
			}
			if out := must(t, from, "getent", "ahostsv4", lab.Big); strings.Count(out, "STREAM") != lab.BigCount {
				t.Errorf("%s: glibc got %d addresses, want %d", from.Name(), strings.Count(out, "STREAM"), lab.BigCount)
			}
		}
	})

	t.Run("no kubernetes name is NXDOMAIN by mistake", func(t *testing.T) {
		for _, from := range []*lab.Node{h.Host(), h.Worker()} {
			out := must(t, from, "dig", "missing.default.svc.cluster.local", "A")
			for _, want := range []string{"status: NXDOMAIN", "SOA"} {
				if !strings.Contains(out, want) {
					t.Errorf("%s: no %q for a missing Service: %s", from.Name(), want, out)
				}
			}
			if out := must(t, from, "dig", lab.Backend, "MX"); !strings.Contains(out, "status: NOERROR") || !strings.Contains(out, "ANSWER: 0") {
				t.Errorf("%s: no NODATA: %s", from.Name(), out)
			}
		}
	})
	if n := h.healthy().Reasons["host"]["error_rewrite"]; n != 0 {
		t.Errorf("error_rewrite: %d", n)
	}
	counters, err := h.Host().Counters()
	if err != nil {
		t.Fatal(err)
	}
	if counters["UdpInCsumErrors"]+counters["Udp6InCsumErrors"] != 0 {
		t.Errorf("checksum errors: %v", counters)
	}
}
