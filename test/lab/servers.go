package lab

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// prepareServers writes the configuration of all servers into the nodes that they run in.
func (l *Lab) prepareServers() error {
	binary := l.options.CoreDNS
	if binary == "" {
		var err error
		if binary, err = Helper("coredns"); err != nil {
			return err
		}
	}
	for i, node := range []*Node{l.Pod("coredns-0"), l.Pod("coredns-1")} {
		s := newCoreDNS(binary, strconv.Itoa(i), node)
		if err := node.WriteFile(corefilePath, []byte(l.corefile(node)), 0o644); err != nil {
			return err
		}
		if err := node.Do(func() error { return writeZones(clusterZones()) }); err != nil {
			return err
		}
		l.coredns = append(l.coredns, s)
	}
	unbound, err := exec.LookPath("unbound")
	if err != nil {
		return fmt.Errorf("find unbound, the external server: %w: run scripts/bootstrap test", err)
	}
	for i, addrs := range [][2]string{{External0, Ext0v6}, {External1, Ext1v6}} {
		s := newUnbound(unbound, i, l.Ext(), mustAddr(addrs[0]), mustAddr(addrs[1]))
		if err := l.Ext().WriteFile(unboundPath(i), []byte(l.unboundConfig(i, s)), 0o644); err != nil {
			return err
		}
		l.ext = append(l.ext, s)
	}
	return nil
}

const corefilePath = "/run/lab/Corefile"

func newCoreDNS(binary, label string, node *Node) *Server {
	s := &Server{
		name: "CoreDNS " + label, node: node, addr4: node.addr4, addr6: node.addr6,
		argv:  []string{binary, "-conf", corefilePath},
		ready: "CoreDNS-", // its banner, written when all listeners are open
		isQuery: func(line string) (Query, bool) {
			_, rest, ok := strings.Cut(line, "[INFO] query ")
			f := strings.Fields(rest)
			if !ok || len(f) != 3 {
				return Query{}, false
			}
			client, err := netip.ParseAddr(strings.Trim(f[2], "[]"))
			return Query{Name: f[0], Type: f[1], Client: client}, err == nil
		},
	}
	s.count = func(ctx context.Context) (uint64, error) { return scrape(ctx, node, "coredns_dns_requests_total{") }
	return s
}

func (l *Lab) corefile(node *Node) string {
	var extra string
	if l.options.LogQueries {
		extra += "\tlog . \"query {name} {type} {remote}\"\n"
	}
	if l.options.CoreDNSCache {
		extra += "\tcache 30\n"
	}
	var zones strings.Builder
	for _, z := range clusterZones() {
		fmt.Fprintf(&zones, "\tfile %s %s {\n\t\treload 100ms\n\t}\n", zonePath(z.origin), z.origin)
	}
	if l.options.CoreDNSForwards { // otherwise CoreDNS refuses by itself what is in none of its zones
		fmt.Fprintf(&zones, "\tforward . %s %s\n", External0, External1)
	}
	return fmt.Sprintf(".:53 {\n\tbind %s %s 127.0.0.1\n\terrors\n\tprometheus 127.0.0.1:9153\n%s%s}\n",
		node.addr4, node.addr6, extra, zones.String())
}

// scrape adds up all samples of a metric that a node offers on 127.0.0.1:9153.
func scrape(ctx context.Context, node *Node, metric string) (uint64, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			err = node.Do(func() error {
				conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return err
			})
			return conn, err
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:9153/metrics", nil)
	if err != nil {
		return 0, err
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	var sum uint64
	scanner := bufio.NewScanner(response.Body)
	for scanner.Scan() {
		if line := scanner.Text(); strings.HasPrefix(line, metric) {
			value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			if err != nil {
				return 0, fmt.Errorf("read the sample %q: %w", line, err)
			}
			sum += uint64(value)
		}
	}
	return sum, scanner.Err()
}

func unboundPath(i int) string { return fmt.Sprintf("/run/lab/unbound%d.conf", i) }

func newUnbound(binary string, i int, node *Node, addr4, addr6 netip.Addr) *Server {
	s := &Server{
		name: fmt.Sprintf("unbound %d", i), node: node, addr4: addr4, addr6: addr6,
		argv:  []string{binary, "-d", "-p", "-c", unboundPath(i)},
		ready: "start of service",
		isQuery: func(line string) (Query, bool) {
			_, rest, ok := strings.Cut(line, "info: ") // "client name. type class"
			f := strings.Fields(rest)
			if !ok || len(f) != 4 {
				return Query{}, false
			}
			client, err := netip.ParseAddr(f[0])
			return Query{Name: f[1], Type: f[2], Client: client}, err == nil
		},
	}
	s.count = func(ctx context.Context) (uint64, error) {
		stats, err := node.Output(ctx, "unbound-control", "-c", unboundPath(i), "stats_noreset")
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(stats) {
			if value, ok := strings.CutPrefix(line, "total.num.queries="); ok {
				return strconv.ParseUint(strings.TrimSpace(value), 10, 64)
			}
		}
		return 0, fmt.Errorf("no total.num.queries in %q", stats)
	}
	return s
}

// unboundConfig makes an unbound that knows example.com and answers every other name with the address 198.51.100.1
// and the text "outside": a cluster name, or one that only looks like it, that has left the host shows at once.
func (l *Lab) unboundConfig(i int, s *Server) string {
	yesNo := map[bool]string{true: "yes", false: "no"}
	var b strings.Builder
	fmt.Fprintf(&b, `server:
	interface: %s
	interface: %s
	access-control: 0.0.0.0/0 allow
	access-control: ::/0 allow
	username: ""
	chroot: ""
	directory: "/run/lab"
	pidfile: ""
	do-daemonize: no
	use-syslog: no
	logfile: ""
	verbosity: 1
	log-queries: %s
	num-threads: 1
	incoming-num-tcp: 200
	module-config: "iterator"
	unblock-lan-zones: yes
	local-zone: "." redirect
	local-data: ". 60 IN A 198.51.100.1"
	local-data: ". 60 IN TXT outside"
	local-zone: "example.com." static
	local-data: "example.com. 60 IN SOA ns.example.com. hostmaster.example.com. 1 7200 1800 86400 30"
	local-data: "www.example.com. 60 IN A 203.0.113.80"
	local-data: "www.example.com. 60 IN AAAA 2001:db8:ff::80"
	local-data: "mail.example.com. 60 IN A 203.0.113.25"
	local-data: "example.com. 60 IN MX 10 mail.example.com."
	local-data: "_sip._tcp.example.com. 60 IN SRV 0 5 5060 www.example.com."
	local-data: "which.example.com. 0 IN TXT ext%d"
	local-zone: "113.0.203.in-addr.arpa." static
	local-data-ptr: "203.0.113.80 60 www.example.com"
`, s.addr4, s.addr6, yesNo[l.options.LogQueries], i)
	// Over 4 KiB: it fits neither 512 nor 1232 bytes, so it takes TCP.
	for n := range 20 {
		fmt.Fprintf(&b, "\tlocal-data: 'big.example.com. 60 IN TXT \"%02d %s\"'\n", n, strings.Repeat("x", 200))
	}
	fmt.Fprintf(&b, "remote-control:\n\tcontrol-enable: yes\n\tcontrol-interface: /run/lab/unbound%d.ctl\n\tcontrol-use-cert: no\n", i)
	return b.String()
}

// Query asks a server from inside the node, over "udp" or "tcp", and returns the whole reply.
func (n *Node) Query(ctx context.Context, network string, server netip.AddrPort, name string, qtype uint16) (*dns.Msg, error) {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), qtype)
	return n.Exchange(ctx, network, server, m)
}

// Exchange sends a message from inside the node and returns the reply. The reply is checked by its ID only.
func (n *Node) Exchange(ctx context.Context, network string, server netip.AddrPort, m *dns.Msg) (*dns.Msg, error) {
	var reply *dns.Msg
	err := n.Do(func() (err error) {
		client := dns.Client{Net: network, Timeout: 5 * time.Second}
		reply, _, err = client.ExchangeContext(ctx, m, server.String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("ask %s from %s: %w", server, n.name, err)
	}
	return reply, nil
}
