package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// startLibvirt starts libvirt's dnsmasq where the KubeSwitch is one of its networks.
func (h *host) startLibvirt() hostResolver {
	h.t.Helper()
	s, err := h.LibvirtDnsmasq(h.t.Context(), "kubeswitch")
	if err != nil {
		h.t.Fatal(err)
	}
	return hostResolver{s, h, lab.KubeSwitch4}
}

// lookUp asks with dig, once, and returns the status and the short answer.
func lookUp(t *testing.T, from *lab.Node, args ...string) (status, answer string) {
	t.Helper()
	out := must(t, from, append([]string{"dig", "+tries=1", "@" + lab.KubeSwitch4}, args...)...)
	_, rest, _ := strings.Cut(out, "status: ")
	status, _, _ = strings.Cut(rest, ",")
	_, rest, _ = strings.Cut(out, ";; ANSWER SECTION:\n")
	line, _, _ := strings.Cut(rest, "\n")
	if fields := strings.Fields(line); len(fields) > 0 {
		answer = fields[len(fields)-1]
	}
	return status, answer
}

func wantAnswer(t *testing.T, from *lab.Node, want string, args ...string) {
	t.Helper()
	if status, answer := lookUp(t, from, args...); status != "NOERROR" || answer != want {
		t.Errorf("%v from %s: %s %q, want %s", args, from.Name(), status, answer, want)
	}
}

// TestLibvirt: on K2s's own Linux host libvirt's dnsmasq has the KubeSwitch address. It keeps it, and hears nothing of the
// cluster by UDP; all else is its own.
func TestLibvirt(t *testing.T) {
	h := raise(t, lab.Options{})
	dnsmasq := h.startLibvirt()
	before := h.snapshot()
	says := []string{"cluster names", "at 172.19.1.1:53 past dnsmasq, process", "all else"}
	plan := h.run(attachArgs("--dry-run")...)
	attached := h.run(attachArgs()...)
	for _, r := range []result{plan, attached, h.run("status")} {
		for _, want := range says {
			if r.code != 0 || !strings.Contains(r.stdout, want) {
				t.Errorf("no %q: %v", want, r)
			}
		}
	}
	if listen := h.healthy().Forwarder.Listen; slices.Contains(listen, switchDNS.String()) {
		t.Errorf("the forwarder listens on %v", listen)
	}
	h.wantFinding(h.doctor(), "port53", "ok", "172.19.1.1:53/udp", "dnsmasq", "steered past it")
	h.works()
	workers := func(t *testing.T) {
		t.Helper()
		h := h.in(t)
		begin := h.status().Reasons["shared"]
		wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend)
		wantAnswer(t, h.Host(), lab.Backend4, lab.Backend)
		if names := dnsmasq.asked(t, lab.Zone); len(names) != 0 {
			t.Errorf("dnsmasq was asked for %v", names)
		}
		if n := h.status().Reasons["shared"]["replied"] - begin["replied"]; n != 2 {
			t.Errorf("%d queries were steered, want 2", n)
		}
		wantAnswer(t, h.Worker(), lab.VM4, lab.VM)
		wantAnswer(t, h.Worker(), lab.WWW4, lab.WWW)
	}
	workers(t)

	t.Run("what the kernel leaves alone", func(t *testing.T) {
		h := h.in(t)
		wantAnswer(t, h.Worker(), lab.WWW4, "+tcp", lab.WWW)
		wantAnswer(t, h.Worker(), lab.VM4, "+tcp", lab.VM)
		// A cluster's name, too: dnsmasq asks this host, which asks us.
		wantAnswer(t, h.Worker(), lab.Backend4, "+tcp", lab.Backend)
		if names := dnsmasq.asked(t, lab.Zone); len(names) != 1 {
			t.Errorf("dnsmasq was asked for %v", names)
		}
		offer, err := discoverDHCP(h.Worker())
		if err != nil || !bytes.Contains(offer, []byte{172, 19, 1, 1}) {
			t.Errorf("DHCP: %v, %x", err, offer)
		}
	})
	t.Run("sources", func(t *testing.T) {
		h := h.in(t)
		h.attach(endpoints, ranges, []string{"--allow", "172.19.1.200/32"})
		begin := h.healthy()
		if r := command(t, h.Worker(), "dig", "+tries=1", "+time=1", "@"+lab.KubeSwitch4, "forbidden."+lab.Zone); r.code == 0 {
			t.Errorf("answered: %v", r)
		}
		wantAnswer(t, h.Worker(), lab.VM4, lab.VM)
		wantAnswer(t, h.Worker(), lab.WWW4, "+tcp", lab.WWW)
		if n := h.healthy().Reasons["shared"]["refused_source"] - begin.Reasons["shared"]["refused_source"]; n != 1 {
			t.Errorf("%d queries were refused", n)
		}
		if names := dnsmasq.asked(t, "forbidden."+lab.Zone); len(names) != 0 {
			t.Errorf("dnsmasq was asked for %v", names)
		}
		h.attach()
	})
	t.Run("it is started again", func(t *testing.T) {
		h := h.in(t)
		if err := dnsmasq.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "status tells that nobody is there", func() error {
			if r := h.status(); r.Healthy || !strings.Contains(strings.Join(r.Problems, "\n"), "no server listens on 172.19.1.1:53") {
				return fmt.Errorf("problems: %v", r.Problems)
			}
			return nil
		})
		wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend)
		if err := dnsmasq.Start(t.Context()); err != nil { // we must not have taken its port
			t.Fatal(err)
		}
		eventually(t, "all is well again", func() error {
			if r := h.status(); !r.Healthy {
				return fmt.Errorf("problems: %v", r.Problems)
			}
			return nil
		})
	})
	t.Run("the daemon is dead", func(t *testing.T) {
		h := h.in(t)
		h.kill()
		begin := h.status().Reasons["shared"]
		eventually(t, "other names are not steered past dnsmasq, which asks the upstream servers again", func() error {
			if status, answer := lookUp(t, h.Worker(), lab.WWW); answer != lab.WWW4 {
				return fmt.Errorf("%s %s", status, answer)
			}
			return nil
		})
		wantAnswer(t, h.Worker(), lab.VM4, lab.VM)
		wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend)
		// Longer than the kernel takes a silent daemon for a living one.
		eventually(t, "the kernel takes the daemon for dead", func() error {
			if status, _ := lookUp(t, h.Host(), "@127.0.0.1", lab.WWW); status != "NOERROR" {
				return errors.New(status)
			}
			return nil
		})
		wantAnswer(t, h.Worker(), lab.VM4, lab.VM)
		if after := h.status().Reasons["shared"]; after["steered_fallback"] != begin["steered_fallback"] {
			t.Errorf("other names were steered past dnsmasq: %v", after)
		}
		h.attach()
		h.healthy()
	})
	// Also where the sockets of a daemon that lingers are taken over.
	must(t, h.Host(), h.binary, "detach")
	h.attach()
	h.healthy()
	wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend)
	wantAnswer(t, h.Worker(), lab.VM4, lab.VM)
	h.detach()
	h.unchanged(before)
	wantAnswer(t, h.Worker(), lab.VM4, lab.VM)
	eventually(t, "dnsmasq asks the upstream servers again", func() error {
		if status, answer := lookUp(t, h.Worker(), lab.WWW); answer != lab.WWW4 {
			return fmt.Errorf("%s %s", status, answer)
		}
		return nil
	})
}

// discoverDHCP asks for an address as a virtual machine does that has none, and returns the offer.
func discoverDHCP(node *lab.Node) ([]byte, error) {
	conn, err := listenUDP(node, ":68")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var option error
	err = raw.Control(func(fd uintptr) {
		option = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1), unix.BindToDevice(int(fd), "eth0"))
	})
	if err := errors.Join(err, option); err != nil {
		return nil, err
	}
	message := make([]byte, 240, 260)
	copy(message, []byte{1, 1, 6, 0, 'k', '2', 's', 0, 0, 0, 0x80, 0}) // a request, answered by broadcast
	copy(message[28:], []byte{0x52, 0x54, 0, 0, 0, 0x65})              // hardware address
	copy(message[236:], []byte{99, 130, 83, 99})                       // magic cookie
	message = append(message, 53, 1, 1, 55, 1, 6, 255)                 // DISCOVER, and the DNS servers, please
	if _, err := conn.WriteToUDP(message, &net.UDPAddr{IP: net.IPv4bcast, Port: 67}); err != nil {
		return nil, err
	}
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	offer := make([]byte, 1500)
	n, _, err := conn.ReadFromUDP(offer)
	return offer[:n], err
}

// TestSharedNoEndpoint: names of the cluster that nobody answers for go nowhere, round nor out.
func TestSharedNoEndpoint(t *testing.T) {
	h := raise(t, lab.Options{LogQueries: true})
	dnsmasq := h.startLibvirt()
	h.attach(endpoints6, ranges) // none that a query by IPv4 can be steered to
	before := h.healthy()
	for _, from := range []*lab.Node{h.Worker(), h.Host()} {
		for _, extra := range []string{"+noedns", "+dnssec"} {
			if status, answer := lookUp(t, from, extra, lab.Backend); status != "SERVFAIL" || answer != "" {
				t.Errorf("%s %s: %s %s", from.Name(), extra, status, answer)
			}
		}
	}
	if n := h.healthy().Counters["shared"].Answered - before.Counters["shared"].Answered; n != 4 {
		t.Errorf("%d queries were answered by the kernel, want 4", n)
	}
	if names := dnsmasq.asked(t, lab.Zone); len(names) != 0 {
		t.Errorf("dnsmasq was asked for %v", names)
	}
	for _, node := range []*lab.Node{h.Worker(), h.Host()} {
		counters, err := node.Counters()
		if err != nil {
			t.Fatal(err)
		}
		if counters["UdpInCsumErrors"]+counters["Udp6InCsumErrors"] != 0 {
			t.Errorf("checksum errors: %v", counters)
		}
	}

	// By TCP, what dnsmasq asks this host for ends here too.
	for _, s := range h.cluster() {
		if err := s.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if status, _ := lookUp(t, h.Worker(), "+tcp", "+time=10", lab.Backend); status != "SERVFAIL" {
		t.Errorf("by TCP: %s", status)
	}
	if names := dnsmasq.asked(t, lab.Zone); len(names) != 1 {
		t.Errorf("dnsmasq was asked for %v", names)
	}
	for _, s := range h.outside() {
		for _, q := range s.QueryLog() {
			if dns.IsSubDomain(lab.Zone, q.Name) {
				t.Errorf("%s left for an outside server", q.Name)
			}
		}
	}
}

// TestSharedLoop: a host whose only server is that dnsmasq, which asks the host, has none at all. Nothing goes round.
func TestSharedLoop(t *testing.T) {
	h := raise(t, lab.Options{HostResolvConf: "nameserver " + lab.KubeSwitch4 + "\n"})
	dnsmasq := h.startLibvirt()
	out := h.run(attachArgs()...)
	for _, want := range []string{"no usable upstream", lab.KubeSwitch4 + ": this program would forward to itself", "--upstream"} {
		if out.code != 1 || !strings.Contains(out.stderr, want) {
			t.Errorf("no %q: %v", want, out)
		}
	}
	h.attach(endpoints, ranges, []string{"--upstream", lab.External0})
	h.healthy()
	eventually(t, "dnsmasq asks us", func() error {
		if status, answer := lookUp(t, h.Worker(), lab.WWW); answer != lab.WWW4 {
			return fmt.Errorf("%s %s", status, answer)
		}
		return nil
	})
	wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend)
	if names := dnsmasq.asked(t, lab.Zone); len(names) != 0 {
		t.Errorf("dnsmasq was asked for %v", names)
	}
}

// TestKubeSwitchComesLater: libvirt starts its networks after us at boot, and ends them before.
func TestKubeSwitchComesLater(t *testing.T) {
	h := raise(t, lab.Options{})
	must(t, h.Host(), "ip", "address", "del", lab.KubeSwitch4+"/24", "dev", "kubeswitch")
	h.attach()
	h.healthy()
	for range 2 {
		must(t, h.Host(), "ip", "address", "add", lab.KubeSwitch4+"/24", "dev", "kubeswitch")
		dnsmasq := h.startLibvirt()
		begin := h.status().Reasons["shared"]["replied"]
		eventually(t, "the kernel steers past dnsmasq", func() error {
			wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend)
			if h.status().Reasons["shared"]["replied"] == begin {
				return errors.New("dnsmasq was asked")
			}
			return nil
		})
		wantAnswer(t, h.Worker(), lab.WWW4, lab.WWW)
		wantAnswer(t, h.Worker(), lab.VM4, lab.VM)
		eventually(t, "all is well", func() error {
			if r := h.status(); !r.Healthy {
				return fmt.Errorf("problems: %v", r.Problems)
			}
			return nil
		})
		if err := dnsmasq.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		must(t, h.Host(), "ip", "address", "del", lab.KubeSwitch4+"/24", "dev", "kubeswitch")
		eventually(t, "a KubeSwitch that is gone with its server is no fault", func() error {
			if r := h.status(); !r.Healthy {
				return fmt.Errorf("problems: %v", r.Problems)
			}
			return nil
		})
	}
}

// TestNoKubeSwitch: none is none.
func TestNoKubeSwitch(t *testing.T) {
	h := raise(t, lab.Options{})
	for _, shared := range []bool{false, true} {
		if shared {
			h.startLibvirt()
		}
		h.attach(endpoints, ranges, []string{"--kubeswitch-address", "none"})
		r := h.healthy()
		if slices.Contains(r.Forwarder.Listen, switchDNS.String()) {
			t.Errorf("the forwarder listens on %v", r.Forwarder.Listen)
		}
		h.works()
		command(t, h.Worker(), "dig", "+tries=1", "+time=1", "@"+lab.KubeSwitch4, lab.Backend)
		if after := h.healthy(); after.packets("shared")+after.packets("kubeswitch") != r.packets("shared")+r.packets("kubeswitch") {
			t.Errorf("queries were looked at: %v", after.Reasons)
		}
		h.detach()
	}
}

// TestPortTaken: a server that has one protocol only, or all addresses, and what to do about it.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	t.Run("everywhere", func(t *testing.T) {
		h := raise(t, lab.Options{})
		s, err := h.SiteDnsmasq(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		site := hostResolver{s, h, "127.0.0.1"}
		refused := func(says ...string) {
			t.Helper()
			out := h.run(attachArgs()...)
			for _, text := range append(says, "127.0.0.1:53", "taken by dnsmasq, process") {
				if out.code != 1 || !strings.Contains(out.stderr, text) {
					t.Errorf("no %q: %v", text, out)
				}
			}
			h.wantFinding(h.doctor(), "port53", "fail", append(says, "dnsmasq")...)
		}
		refused("keep it off loopback")
		h.nameResolvers("127.0.0.1")
		refused("--resolver transparent")
		before := h.snapshot()
		h.attach(endpoints, ranges, transparent)
		r := h.healthy()
		if len(r.Forwarder.Listen) != 0 {
			t.Errorf("the forwarder listens on %v", r.Forwarder.Listen)
		}
		h.works()
		wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend)
		wantAnswer(t, h.Worker(), lab.WWW4, lab.WWW)
		if names := site.asked(t, lab.Zone); len(names) != 0 {
			t.Errorf("dnsmasq was asked for %v", names)
		}
		h.wantFinding(h.doctor(), "port53", "ok", "dnsmasq", "steered past it")
		h.detach()
		h.unchanged(before)
	})
	t.Run("in user space only", func(t *testing.T) {
		h := raise(t, lab.Options{})
		h.startLibvirt()
		out := h.run(attachArgs("--no-bpf")...)
		if out.code != 0 || !strings.Contains(out.stdout, "leave all that is asked at 172.19.1.1:53 to dnsmasq, process") {
			t.Errorf("%v", out)
		}
		h.works()
		wantAnswer(t, h.Worker(), lab.VM4, lab.VM)
		wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend) // dnsmasq asks this host, which asks us
		h.healthy()
	})
	for _, network := range []string{"udp", "tcp"} {
		t.Run(network+" only", func(t *testing.T) {
			h := raise(t, lab.Options{})
			defer busy(network, switchDNS.String())(h)()
			h.attach()
			wantAnswer(t, h.Worker(), lab.Backend4, lab.Backend)
			// By the other protocol nobody is there, and for TCP alone there is no server: status says so.
			eventually(t, "status tells of UDP", func() error {
				if r := h.status(); r.Healthy != (network == "udp") {
					return fmt.Errorf("problems: %v", r.Problems)
				}
				return nil
			})
		})
	}
}
