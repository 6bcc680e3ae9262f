package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// What programs of the host find with the servers of its resolver configuration, they find while it is attached. Stubs
// look names up at the servers themselves, and then through the forwarder; the servers play a part for each name.

// conduct is what a server does with a query for one name.
type conduct struct {
	text  string
	delay time.Duration
	lose  int // of each name, so many queries are lost first
	reply func(q *dns.Msg, tcp bool) *dns.Msg
}

func (c conduct) after(d time.Duration) conduct {
	c.text, c.delay = fmt.Sprintf("%s after %s", c.text, d), d
	return c
}

func (c conduct) losing(n int) conduct {
	c.text, c.lose = fmt.Sprintf("%s, %d lost first", c.text, n), n
	return c
}

const foundIt = "198.51.100.7"

func answering(text string, edit func(r *dns.Msg)) conduct {
	return conduct{text: text, reply: func(q *dns.Msg, _ bool) *dns.Msg {
		r := new(dns.Msg).SetReply(q)
		r.RecursionAvailable = true
		edit(r)
		return r
	}}
}

func withAnswer(r *dns.Msg) {
	header := dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}
	r.Answer = []dns.RR{&dns.A{Hdr: header, A: net.ParseIP(foundIt)}}
}

func withSOA(r *dns.Msg) {
	header := dns.RR_Header{Name: "test.", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 60}
	r.Ns = []dns.RR{&dns.SOA{Hdr: header, Ns: "ns.test.", Mbox: "x.test.", Minttl: 60}}
}

func code(rcode int) conduct {
	return answering(dns.RcodeToString[rcode], func(r *dns.Msg) { r.Rcode = rcode })
}

var (
	found    = answering("found", withAnswer)
	none     = answering("NXDOMAIN", func(r *dns.Msg) { r.Rcode = dns.RcodeNameError; withSOA(r) })
	noData   = answering("NODATA", withSOA)
	servFail = code(dns.RcodeServerFailure)
	refused  = code(dns.RcodeRefused)
	notImp   = code(dns.RcodeNotImplemented)
	formErr  = code(dns.RcodeFormatError)
	lame     = answering("lame", func(r *dns.Msg) { r.RecursionAvailable = false })
	referral = answering("referral upwards", func(r *dns.Msg) {
		r.RecursionAvailable = false
		r.Ns = []dns.RR{&dns.NS{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeNS, Class: dns.ClassINET, Ttl: 60}, Ns: "a.root-servers.net."}}
	})
	silent  = conduct{text: "silent", reply: func(*dns.Msg, bool) *dns.Msg { return nil }}
	wrongID = answering("wrong ID", func(r *dns.Msg) { withAnswer(r); r.Id++ })
	cut     = conduct{text: "truncated", reply: func(q *dns.Msg, tcp bool) *dns.Msg {
		r := found.reply(q, tcp)
		r.Truncated = !tcp
		return r
	}}
	noEDNS = conduct{text: "FORMERR to EDNS, else found", reply: func(q *dns.Msg, tcp bool) *dns.Msg {
		if q.IsEdns0() != nil {
			return formErr.reply(q, tcp)
		}
		return found.reply(q, tcp)
	}}
)

// site is a host with its servers. Those in deaf have a TCP port that drops what comes in, those in mute none.
type site struct {
	name       string
	options    string
	deaf, mute bool
	pairs      [][]conduct // of each: what the first server does, the second, the third
}

const s = time.Second

var sites = []site{
	{name: "two servers", pairs: [][]conduct{
		{found, none},
		{found.after(300 * time.Millisecond), none},
		{found.after(900 * time.Millisecond), none},
		{found.after(1 * s), none},
		{found.after(3 * s), none},
		{found.after(4500 * time.Millisecond), none},
		{found.after(300 * time.Millisecond), noData},
		{found.after(2 * s), noData},
		{found.after(1 * s), servFail},
		{found.after(4 * s), refused},
		{found.after(4500 * time.Millisecond), silent},
		{found.after(6 * s), silent},
		{silent, found},
		{silent, found.after(1 * s)},
		{silent, found.after(4500 * time.Millisecond)},
		{none, found.after(300 * time.Millisecond)},
		{none.after(400 * time.Millisecond), found},
		{noData, found.after(300 * time.Millisecond)},
		{wrongID, found},
		{found.losing(1), none},
		{found.losing(1), silent},
		{found.losing(2), silent},
		{silent, found.losing(1)},
	}},
	{name: "two servers, errors", pairs: [][]conduct{
		{servFail, found},
		{servFail.after(1 * s), found.after(1 * s)},
		{servFail, found.after(4500 * time.Millisecond)},
		{refused, found},
		{notImp, found},
		{formErr, found},
		{code(dns.RcodeNotAuth), found},
		{lame, found},
		{lame.after(400 * time.Millisecond), found.after(400 * time.Millisecond)},
		{referral, found},
		{noEDNS, none},
		{noEDNS.after(1 * s), none},
		{servFail, silent},
		{lame, servFail},
	}},
	{name: "one server", pairs: [][]conduct{
		{found.after(1 * s)},
		{found.after(4500 * time.Millisecond)},
		{found.after(6 * s)},
		{found.after(8 * s)},
		{found.losing(1)},
		{found.after(2 * s).losing(1)},
		{cut}, {cut.after(3 * s)}, {noEDNS}, {lame}, {silent},
	}},
	{name: "one server, timeout:10", options: "timeout:10", pairs: [][]conduct{
		{found.after(6 * s)}, {found.after(9 * s)}, {found.losing(1)},
	}},
	{name: "two servers, timeout:10 attempts:1", options: "timeout:10 attempts:1", pairs: [][]conduct{
		{found.after(6 * s), none}, {found.after(8 * s), noData}, {silent, found.after(6 * s)}, {servFail, found.after(6 * s)},
	}},
	{name: "two servers, timeout:2 attempts:3 rotate", options: "timeout:2 attempts:3 rotate", pairs: [][]conduct{
		{found, found.after(300 * time.Millisecond)}, {silent, found}, {found, silent}, {lame, found}, {found.after(1 * s), servFail}, {cut, cut},
	}},
	{name: "three servers", pairs: [][]conduct{
		{silent, silent, found},
		{silent, silent, found.after(4 * s)},
		{refused, silent, found.after(500 * time.Millisecond)},
		{lame, servFail, found.after(1 * s)},
		{found.after(900 * time.Millisecond), none, none},
		{silent, found.after(3 * s), none},
		{servFail, found.after(3 * s), noData},
	}},
	{name: "two servers, TCP dropped", deaf: true, pairs: [][]conduct{
		{cut, none}, {cut, found}, {cut.after(1 * s), silent}, {cut.after(4 * s), none}, {silent, cut},
	}},
	{name: "two servers, TCP refused", mute: true, pairs: [][]conduct{
		{cut, none}, {cut, found}, {cut.after(2 * s), none}, {silent, cut},
	}},
	// Nothing else is asked here: it is silent for all.
	{name: "the first is dead", pairs: [][]conduct{
		{silent, found.after(500 * time.Millisecond)}, {silent, found.after(4500 * time.Millisecond)}, {silent, cut}, {silent, found.losing(1)},
	}},
}

// stub looks up an address, at the servers themselves or through the forwarder.
type stub struct {
	name string
	argv func(name string, direct bool) []string
}

func stubs(t *testing.T, timeout, attempts string) []stub {
	t.Helper()
	helper := func(name string) string {
		path, err := lab.Helper(name)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	resolver := func(argv ...string) func(string, bool) []string {
		return func(name string, _ bool) []string { return append(slices.Clone(argv), name) }
	}
	return []stub{
		{"glibc", resolver("getent", "ahostsv4")},
		{"musl", resolver(helper("muslresolve"), "a")},
		{"Go", resolver(helper("goresolve"), "a")},
		{"dnsmasq", func(name string, direct bool) []string {
			port := "53"
			if direct {
				port = "5300"
			}
			return []string{"dig", "@127.0.0.1", "-p", port, "+short", "+time=" + timeout, "+tries=" + attempts, name, "A"}
		}},
	}
}

// stage is a site in a lab of its own.
type stage struct {
	site
	*host
	stubs           []stub
	direct, through [][]bool // by pair and stub: whether it found the name
}

// TestStubsFindTheSame: what glibc, musl, Go or `dnsmasq --strict-order` finds with some servers is found through us. A
// lookup that fails is repeated through us, since a busy machine may have been late.
func TestStubsFindTheSame(t *testing.T) {
	t.Parallel() // it waits more than it works
	stages := make([]*stage, len(sites))
	for i, site := range sites {
		stages[i] = site.raise(t)
	}
	everywhere := func(look func(s *stage)) {
		var group sync.WaitGroup
		for _, s := range stages {
			group.Go(func() { look(s) })
		}
		group.Wait()
	}
	everywhere(func(s *stage) {
		s.direct = s.look("direct", func(int, int) bool { return true })
	})
	for _, s := range stages {
		s.attach([]string{"--dns-endpoint", lab.CoreDNS0v4}, ranges)
	}
	everywhere(func(s *stage) {
		s.through = s.look("through", func(int, int) bool { return true })
		for again := range 2 {
			found := s.look(fmt.Sprint("again", again), func(i, j int) bool { return s.direct[i][j] && !s.through[i][j] })
			for i := range found {
				for j := range found[i] {
					s.through[i][j] = s.through[i][j] || found[i][j]
				}
			}
		}
	})
	var table strings.Builder
	for _, s := range stages {
		s.detach()
		s.judge(&table)
	}
	t.Logf("found directly/through us\n| site | servers | glibc | musl | Go | dnsmasq --strict-order |\n|---|---|---|---|---|---|\n%s", &table)
}

// raise has the servers and a dnsmasq in place.
func (s site) raise(t *testing.T) *stage {
	t.Helper()
	addresses := []string{lab.External0, lab.External1, "192.0.2.55"}[:len(s.pairs[0])]
	conf, options := "nameserver "+strings.Join(addresses, "\nnameserver ")+"\n", ""
	timeout, attempts := "5", "2"
	if s.options != "" { // dig takes no empty line of them
		options = "options " + s.options + "\n"
	}
	for o := range strings.FieldsSeq(s.options) {
		if v, ok := strings.CutPrefix(o, "timeout:"); ok {
			timeout = v
		} else if v, ok := strings.CutPrefix(o, "attempts:"); ok {
			attempts = v
		}
	}
	h := raiseAlone(t, lab.Options{NoServers: true, HostResolvConf: conf + options})
	if err := h.CoreDNS(0).Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	must(t, h.Ext(), "ip", "address", "add", "192.0.2.55/24", "dev", "eth0")
	if s.deaf {
		must(t, h.Ext(), "nft", "add table inet deaf; add chain inet deaf input { type filter hook input priority 0; }; add rule inet deaf input tcp dport 53 drop")
	}
	h.play(addresses, s)
	if err := h.Host().WriteFile("/run/servers.conf", []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	dnsmasq := h.Host().Command(t.Context(), "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-hosts", "--pid-file=", "--user=root",
		"--bind-interfaces", "--listen-address=127.0.0.1", "--port=5300", "--cache-size=0", "--resolv-file=/run/servers.conf", "--strict-order")
	if err := dnsmasq.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "dnsmasq listens", func() error {
		if r := command(t, h.Host(), "dig", "@127.0.0.1", "-p", "5300", "+tries=1", "+time=1", "version.bind", "CH", "TXT"); r.code != 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	return &stage{site: s, host: h, stubs: stubs(t, timeout, attempts)}
}

// look does all lookups that want says at the same time.
func (s *stage) look(phase string, want func(pair, stub int) bool) [][]bool {
	out := make([][]bool, len(s.pairs))
	var group sync.WaitGroup
	for i := range s.pairs {
		out[i] = make([]bool, len(s.stubs))
		for j, stub := range s.stubs {
			if want(i, j) {
				group.Go(func() {
					// glibc waits for a connection as long as the kernel does.
					argv := append([]string{"timeout", "15"}, stub.argv(fmt.Sprintf("%s-%d.p%d.test.", phase, j, i), phase == "direct")...)
					out[i][j] = strings.Contains(command(s.t, s.Host(), argv...).stdout, foundIt)
				})
			}
		}
	}
	group.Wait()
	return out
}

// judge fails the test for what was found directly only, and adds the site to the table.
func (s *stage) judge(table *strings.Builder) {
	yes := map[bool]string{true: "yes", false: "no"}
	for i, pair := range s.pairs {
		var parts []string
		for _, c := range pair {
			parts = append(parts, c.text)
		}
		servers := strings.Join(parts, "; ")
		fmt.Fprintf(table, "| %s | %s |", s.name, servers)
		for j, stub := range s.stubs {
			fmt.Fprintf(table, " %s/%s |", yes[s.direct[i][j]], yes[s.through[i][j]])
			if s.direct[i][j] && !s.through[i][j] {
				s.t.Errorf("%s: %s finds it directly, and not through us: %s", s.name, stub.name, servers)
			}
		}
		table.WriteString("\n")
	}
}

// play has the servers of a site answer at their addresses until the test ends.
func (h *host) play(addresses []string, s site) {
	h.t.Helper()
	for i, address := range addresses {
		var mu sync.Mutex
		seen := make(map[string]int)
		handle := func(w dns.ResponseWriter, q *dns.Msg, tcp bool) {
			var pair int
			name := strings.ToLower(q.Question[0].Name)
			if _, err := fmt.Sscanf(name[strings.Index(name, ".")+1:], "p%d.test.", &pair); err != nil || pair >= len(s.pairs) {
				return // other names are not for a part of the play
			}
			c := s.pairs[pair][i]
			mu.Lock()
			seen[name]++
			n := seen[name]
			mu.Unlock()
			if n <= c.lose {
				return
			}
			time.Sleep(c.delay)
			if r := c.reply(q, tcp); r != nil {
				_ = w.WriteMsg(r) // to a client that has gone, perhaps
			}
		}
		server := func(network string) *dns.Server {
			return &dns.Server{Net: network, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) { handle(w, q, network == "tcp") })}
		}
		at := netip.AddrPortFrom(netip.MustParseAddr(address), 53)
		udp, tcp := server("udp"), server("tcp")
		if err := h.Ext().Do(func() (err error) {
			if udp.PacketConn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at)); err != nil || s.mute {
				return err
			}
			tcp.Listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
			return err
		}); err != nil {
			h.t.Fatal(err)
		}
		var group sync.WaitGroup
		h.t.Cleanup(group.Wait)
		for _, server := range []*dns.Server{udp, tcp} {
			if server.PacketConn != nil || server.Listener != nil {
				started := make(chan struct{})
				server.NotifyStartedFunc = func() { close(started) }
				group.Go(func() { _ = server.ActivateAndServe() })
				<-started
				h.t.Cleanup(func() { _ = server.Shutdown() })
			}
		}
	}
}

// TestFloodFromAWorker: names of a worker that no server answers, more than are answered at a time, leave the host its
// queries.
func TestFloodFromAWorker(t *testing.T) {
	h := raise(t, lab.Options{NoServers: true})
	if err := h.CoreDNS(0).Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.play([]string{lab.External0, lab.External1}, site{pairs: [][]conduct{{silent, silent}, {found, silent}}})
	h.attach([]string{"--dns-endpoint", lab.CoreDNS0v4}, ranges)
	var conn *net.UDPConn
	if err := h.Worker().Do(func() (err error) {
		conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(switchDNS))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	full := make(chan struct{})
	go func() { // until the worker's oldest queries are refused
		buf := make([]byte, 512)
		for {
			if n, err := conn.Read(buf); err != nil {
				return
			} else if n > 3 && buf[3]&15 == dns.RcodeRefused {
				close(full)
				return
			}
		}
	}()
	// Two thousand more beyond that, and as many as it takes before.
	for i, more := 0, 2000; more > 0; i++ {
		if i == 100_000 {
			t.Fatal("so many are answered at a time?")
		}
		if _, err := conn.Write(pack(t, uint16(i), fmt.Sprintf("flood%d.p0.test.", i), dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		select {
		case <-full:
			more--
		default:
		}
		if i%400 > 0 {
			continue
		}
		for _, network := range []string{"udp", "tcp"} {
			// The server that answers has the worker's queries too, and may lose one.
			eventually(t, fmt.Sprintf("the host has an answer after %d queries of the worker, by %s", i, network), func() error {
				m, err := h.Host().Query(t.Context(), network, hostDNS, fmt.Sprintf("host%d-%s.p1.test.", i, network), dns.TypeA)
				if err == nil && len(m.Answer) != 1 {
					err = fmt.Errorf("%v", m)
				}
				return err
			})
		}
	}
}
