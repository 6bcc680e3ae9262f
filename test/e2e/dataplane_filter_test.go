package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// strayed is an address behind the worker that is in no subnet of the KubeSwitch interface.
const strayed = "10.77.0.5"

// straySubnet gives the worker an address outside the default prefixes that host0 has a route to, so that only the
// filter keeps its queries from being answered.
func (h *host) straySubnet() {
	h.t.Helper()
	sh(h.t, h.Worker(), "ip address add "+strayed+"/32 dev eth0")
	sh(h.t, h.Host(), "ip route add 10.77.0.0/24 via "+lab.Worker4+" dev kubeswitch")
}

// refusedEverywhere fails the test if a query or a connection from the stray address gets anything back.
func (h *host) refusedEverywhere(server netip.AddrPort) {
	h.t.Helper()
	for _, name := range []string{lab.Backend, lab.WWW} {
		raw, err := askAs(h.Worker(), strayed, server, pack(h.t, 1, name, dns.TypeA), noReply)
		if raw != nil || err != nil {
			h.t.Errorf("%s from %s: want no reply, got %s, %v", name, strayed, text(raw), err)
		}
	}
}

// ping sends an ICMP echo request and waits for its reply.
func ping(from *lab.Node, local, to string) error {
	return from.Do(func() error {
		conn, err := net.ListenPacket("ip4:icmp", local)
		if err != nil {
			return err
		}
		defer conn.Close()
		request := []byte{8, 0, 0, 0, 0x12, 0x34, 0, 1}
		sum := uint32(0x0800) + 0x1234 + 1
		binary.BigEndian.PutUint16(request[2:], ^uint16(sum))
		if _, err := conn.WriteTo(request, &net.IPAddr{IP: net.ParseIP(to)}); err != nil {
			return err
		}
		if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		buf := make([]byte, 1500)
		for {
			n, _, err := conn.ReadFrom(buf)
			if err != nil {
				return err
			}
			if n >= 8 && buf[0] == 0 && buf[4] == 0x12 {
				return nil
			}
		}
	})
}

// echo serves UDP and TCP on an address of host0 that has nothing to do with DNS.
func (h *host) echo(address string) {
	h.t.Helper()
	udp, err := listenUDP(h.Host(), address)
	if err != nil {
		h.t.Fatal(err)
	}
	var tcp net.Listener
	if err := h.Host().Do(func() (err error) { tcp, err = net.Listen("tcp", address); return err }); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _, _ = udp.Close(), tcp.Close() })
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := udp.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(conn, conn); _ = conn.Close() }()
		}
	}()
}

func TestIngressFilter(t *testing.T) {
	h := raise(t, lab.Options{})
	h.straySubnet()
	h.attach()
	if got := h.dataplane().programs("kubeswitch"); !slices.Equal(got, []string{"dns_filter xdp/generic", "dns_from_client tcx/ingress"}) {
		t.Errorf("programs on the KubeSwitch bridge: %v", got)
	}

	t.Run("source", func(t *testing.T) {
		h := h.in(t)
		before := h.dataplane()
		h.refusedEverywhere(switchDNS)
		if err := connectAs(h.Worker(), strayed, switchDNS, noReply); err == nil {
			t.Error("a TCP connection from outside the allowed prefixes was accepted")
		}
		after := h.dataplane()
		// Two queries, and one SYN at the least.
		if n := after.rose(before, "kubeswitch", "refused_source"); n < 3 || n > 6 {
			t.Errorf("refused_source rose by %d, want 2 queries and the SYNs", n)
		}
		if n := after.Refusals["kubeswitch"].Refused - before.Refusals["kubeswitch"].Refused; n < 3 {
			t.Errorf("the counter refused rose by %d", n)
		}
		if n := after.forwarded(before); n != 0 {
			t.Errorf("%d refused queries have reached the forwarder", n)
		}
	})

	t.Run("allowed meanwhile", func(t *testing.T) {
		h := h.in(t)
		before := h.dataplane()
		const rounds = 20
		for range rounds {
			resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
			resolve(t, h.Worker(), switchDNS, lab.WWW, lab.WWW4)
		}
		if m, err := h.Worker().Query(t.Context(), "tcp", switchDNS, lab.Backend, dns.TypeA); err != nil || len(m.Answer) != 1 {
			t.Errorf("TCP: %v %v", m, err)
		}
		after := h.dataplane()
		if s, r := after.rose(before, "kubeswitch", "steered"), after.rose(before, "kubeswitch", "replied"); s != rounds || r != rounds {
			t.Errorf("steered %d, replied %d, want %d beside the ingress filter on the same interface", s, r, rounds)
		}
	})

	t.Run("message", func(t *testing.T) {
		h := h.in(t)
		backend := question(labels("backend", "default", "svc", "cluster", "local"), dns.TypeA, 1)
		for _, bad := range []struct {
			name    string
			payload []byte
		}{
			{"a reply", message(rd|0x8000, one, backend)},
			{"11 bytes", message(rd, one)[:11]},
			{"one byte", []byte{1}},
		} {
			before := h.dataplane()
			raw, err := ask(h.Worker(), switchDNS, bad.payload, noReply)
			after := h.dataplane()
			if raw != nil || err != nil {
				t.Errorf("%s: got %x, %v", bad.name, raw, err)
			}
			if n := after.rose(before, "kubeswitch", "refused_message"); n != 1 {
				t.Errorf("%s: refused_message rose by %d", bad.name, n)
			}
			if n := after.forwarded(before); n != 0 {
				t.Errorf("%s has reached the forwarder", bad.name)
			}
		}
		// An empty datagram has less than any: it must not be lost on the way to being counted or passed.
		if raw, err := ask(h.Worker(), switchDNS, nil, noReply); raw != nil || err != nil {
			t.Errorf("an empty datagram: %x, %v", raw, err)
		}
	})

	t.Run("others", func(t *testing.T) {
		h := h.in(t)
		h.echo(lab.KubeSwitch4 + ":9999")
		for _, local := range []string{strayed, lab.Worker4} {
			service := netip.MustParseAddrPort(lab.KubeSwitch4 + ":9999")
			if raw, err := askAs(h.Worker(), local, service, []byte("hello"), patience); string(raw) != "hello" {
				t.Errorf("UDP to another port from %s: %q, %v", local, raw, err)
			}
			if err := connectAs(h.Worker(), local, service, patience); err != nil {
				t.Errorf("TCP to another port from %s: %v", local, err)
			}
			if err := ping(h.Worker(), local, lab.KubeSwitch4); err != nil {
				t.Errorf("ICMP from %s: %v", local, err)
			}
		}
	})

	t.Run("elsewhere", func(t *testing.T) {
		h := h.in(t)
		// DNS for somebody else that only passes through this host.
		server := netip.AddrPortFrom(netip.MustParseAddr(lab.CoreDNS0v4), 53)
		raw, err := askAs(h.Worker(), strayed, server, pack(t, 1, lab.Backend, dns.TypeA), patience)
		if err := errors.Join(err, isAddress(raw, lab.Backend4)); err != nil {
			t.Errorf("a query routed through this host: %v", err)
		}
	})

	t.Run("loopback", func(t *testing.T) {
		h := h.in(t)
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		resolve(t, h.Host(), switchDNS, lab.Backend, lab.Backend4)
		resolve(t, h.Host(), switchDNS, lab.WWW, lab.WWW4)
	})
}

// TestIngressFilterServiceAddress: the ingress filter is about the KubeSwitch address. With --pods the cluster's DNS address is one more
// that is intercepted, and a pod of a worker, whose address is in no subnet of the interface, asks it through this host.
func TestIngressFilterServiceAddress(t *testing.T) {
	t.Parallel()
	// With the setting off, the rules see a packet only after our programs, as they do on an interface that is no bridge.
	for _, bridged := range []string{"0", "1"} {
		t.Run("bridge-nf-call-iptables="+bridged, func(t *testing.T) {
			h := raise(t, lab.Options{HostSysctls: map[string]string{"net.bridge.bridge-nf-call-iptables": bridged}})
			h.straySubnet()
			if err := h.LoadKubeProxyLikeRules(t.Context()); err != nil {
				t.Fatal(err)
			}
			h.attach(endpoints, ranges, []string{"--pods", "cni0", "--cluster-dns", lab.KubeDNS4})
			raw, err := askAs(h.Worker(), strayed, clusterDNS, pack(t, 1, lab.Backend, dns.TypeA), noReply)
			if err := errors.Join(err, isAddress(raw, lab.Backend4)); err != nil {
				t.Errorf("UDP to the kube-dns Service: %v", err)
			}
			if err := connectAs(h.Worker(), strayed, clusterDNS, noReply); err != nil {
				t.Errorf("TCP to the kube-dns Service: %v", err)
			}
		})
	}
}

func TestIngressFilterAllow(t *testing.T) {
	h := raise(t, lab.Options{})
	h.straySubnet()
	h.attach(endpoints, ranges, []string{"--allow", "10.77.0.0/24"})
	before := h.dataplane()
	for _, name := range [][2]string{{lab.Backend, lab.Backend4}, {lab.WWW, lab.WWW4}} {
		raw, err := askAs(h.Worker(), strayed, switchDNS, pack(t, 1, name[0], dns.TypeA), patience)
		if err := errors.Join(err, isAddress(raw, name[1])); err != nil {
			t.Errorf("%s from an allowed prefix: %v", name[0], err)
		}
	}
	if err := connectAs(h.Worker(), strayed, switchDNS, patience); err != nil {
		t.Errorf("TCP from an allowed prefix: %v", err)
	}
	// --allow replaces the default.
	if raw, err := ask(h.Worker(), switchDNS, pack(t, 1, lab.Backend, dns.TypeA), noReply); raw != nil || err != nil {
		t.Errorf("from the interface's subnet, which is no longer allowed: %s, %v", text(raw), err)
	}
	after := h.dataplane()
	if n := after.rose(before, "kubeswitch", "refused_source"); n != 1 {
		t.Errorf("refused_source rose by %d, want 1", n)
	}

	t.Run("second attach", func(t *testing.T) {
		h := h.in(t)
		h.attach(endpoints, ranges, []string{"--allow", "172.19.1.0/24", "--allow", "10.78.0.0/16"})
		resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
		h.refusedEverywhere(switchDNS)
	})
}

func TestIngressFilterIPv6(t *testing.T) {
	h := raise(t, lab.Options{})
	sh(t, h.Worker(), "ip address add fd00:77::5/128 dev eth0")
	sh(t, h.Host(), "ip route add fd00:77::/64 via "+lab.Worker6+" dev kubeswitch")
	h.attach(endpoints, endpoints6, ranges, []string{"--kubeswitch-address", lab.KubeSwitch6})
	server := netip.AddrPortFrom(netip.MustParseAddr(lab.KubeSwitch6), 53)
	before := h.dataplane()
	if raw, err := askAs(h.Worker(), "fd00:77::5", server, pack(t, 1, lab.Backend, dns.TypeA), noReply); raw != nil || err != nil {
		t.Errorf("want no reply, got %s, %v", text(raw), err)
	}
	if err := connectAs(h.Worker(), "fd00:77::5", server, noReply); err == nil {
		t.Error("a TCP connection from outside the allowed prefixes was accepted")
	}
	resolve(t, h.Worker(), server, lab.Backend, lab.Backend4)
	after := h.dataplane()
	if n := after.rose(before, "kubeswitch", "refused_source"); n < 2 {
		t.Errorf("refused_source rose by %d", n)
	}
	if n := after.forwarded(before); n != 0 {
		t.Errorf("the forwarder saw %d queries", n)
	}
}

// TestIngressFilterNative puts the KubeSwitch address on a veth, whose driver runs XDP by itself.
func TestIngressFilterNative(t *testing.T) {
	h := raise(t, lab.Options{})
	far, err := h.AddNode("worker1", "172.19.7.2", "fd00:19:7::2")
	if err != nil {
		t.Fatal(err)
	}
	h.cable(h.Host(), "vswitch", far, "eth0")
	sh(t, h.Host(), "ip address add 172.19.7.1/24 dev vswitch")
	sh(t, far, "ip address add 172.19.7.2/24 dev eth0; ip address add "+strayed+"/32 dev eth0; ip route add default via 172.19.7.1")
	sh(t, h.Host(), "ip route add 10.77.0.0/24 via 172.19.7.2")
	h.attach(endpoints, ranges, []string{"--kubeswitch-address", "172.19.7.1"})
	if got := h.dataplane().programs("vswitch"); !slices.Equal(got, []string{"dns_filter xdp/native", "dns_from_client tcx/ingress"}) {
		t.Errorf("programs on the veth: %v", got)
	}
	server := netip.MustParseAddrPort("172.19.7.1:53")
	before := h.dataplane()
	const rounds = 20
	for range rounds {
		resolve(t, far, server, lab.Backend, lab.Backend4)
		resolve(t, far, server, lab.WWW, lab.WWW4)
	}
	if m, err := far.Query(t.Context(), "tcp", server, lab.Big, dns.TypeA); err != nil || len(m.Answer) != lab.BigCount {
		t.Errorf("TCP: %v %v", m, err)
	}
	if raw, err := askAs(far, strayed, server, pack(t, 1, lab.Backend, dns.TypeA), noReply); raw != nil || err != nil {
		t.Errorf("want no reply, got %s, %v", text(raw), err)
	}
	after := h.dataplane()
	if s, r := after.rose(before, "kubeswitch", "steered"), after.rose(before, "kubeswitch", "replied"); s != rounds || r != rounds {
		t.Errorf("steered %d, replied %d, want %d", s, r, rounds)
	}
	if n := after.rose(before, "kubeswitch", "refused_source"); n != 1 {
		t.Errorf("refused_source rose by %d", n)
	}
	h.detach()
	if out := sh(t, h.Host(), "ip -d link show vswitch"); strings.Contains(out, "xdp") {
		t.Errorf("XDP is left on the interface: %s", out)
	}
}

// TestIngressFilterBesideXDP: an interface takes one XDP program. Where another is, the source is checked nevertheless.
func TestIngressFilterBesideXDP(t *testing.T) {
	h := raise(t, lab.Options{})
	h.straySubnet()
	counter := newCounter(t, ebpf.XDP, 2) // XDP_PASS
	var xdp link.Link
	if err := h.Host().Do(func() error {
		iface, err := net.InterfaceByName("kubeswitch")
		if err != nil {
			return err
		}
		xdp, err = link.AttachXDP(link.XDPOptions{Interface: iface.Index, Program: counter.program, Flags: link.XDPGenericMode})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = xdp.Close() })
	h.attach()
	now := h.dataplane()
	if len(now.Problems) != 1 || !strings.Contains(now.Problems[0], "kubeswitch") || !strings.Contains(now.Problems[0], "XDP") {
		t.Errorf("status does not say that the ingress filter is missing: %q", now.Problems)
	}
	if got := now.programs("kubeswitch"); !slices.Equal(got, []string{"dns_from_client tcx/ingress"}) {
		t.Errorf("programs: %v", got)
	}
	first := counter.value(t)
	resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Worker(), switchDNS, lab.WWW, lab.WWW4)
	if counter.value(t) <= first {
		t.Error("the other XDP program sees nothing any more")
	}
	for _, name := range []string{lab.WWW, lab.Backend} {
		t.Run(name, func(t *testing.T) {
			raw, err := askAs(h.Worker(), strayed, switchDNS, pack(t, 1, name, dns.TypeA), noReply)
			if raw != nil || err != nil {
				t.Errorf("from outside the allowed prefixes: want no reply, got %s, %v", text(raw), err)
			}
		})
	}
	t.Run("TCP", func(t *testing.T) {
		// Only user space is left: it may accept, but must not answer.
		err := h.Worker().Do(func() error {
			dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(strayed)}, Timeout: patience}
			conn, err := dialer.Dial("tcp", switchDNS.String())
			if err != nil {
				return nil
			}
			defer conn.Close()
			query := pack(t, 1, lab.Backend, dns.TypeA)
			_, _ = conn.Write(append([]byte{0, byte(len(query))}, query...))
			_ = conn.SetReadDeadline(time.Now().Add(noReply))
			if n, err := conn.Read(make([]byte, 512)); n > 0 {
				return fmt.Errorf("%d bytes came back", n)
			} else if !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrDeadlineExceeded) && !strings.Contains(err.Error(), "reset") {
				return err
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// counter is a program that counts the packets it sees and returns the same verdict for all of them.
type counter struct {
	program *ebpf.Program
	packets *ebpf.Map
}

func newCounter(t *testing.T, kind ebpf.ProgramType, verdict int32) *counter {
	t.Helper()
	packets, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = packets.Close() })
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "neighbour", Type: kind, License: "GPL",
		Instructions: asm.Instructions{
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.LoadMapPtr(asm.R1, packets.FD()),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, verdict).WithSymbol("out"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = program.Close() })
	return &counter{program, packets}
}

func (c *counter) value(t *testing.T) (n uint64) {
	t.Helper()
	if err := c.packets.Lookup(uint32(0), &n); err != nil {
		t.Fatal(err)
	}
	return n
}
