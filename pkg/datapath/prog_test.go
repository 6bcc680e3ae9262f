//go:build linux

package datapath

import (
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// Addresses of the tests, named so that they read alike.
var (
	client4   = netip.MustParseAddrPort("127.0.0.1:40000")
	listener4 = netip.MustParseAddrPort("127.0.0.1:53")
	backend4  = netip.MustParseAddrPort("172.20.0.10:53")
	nat4      = netip.MustParseAddr("172.20.0.1")
	client6   = netip.MustParseAddrPort("[::1]:40000")
	listener6 = netip.MustParseAddrPort("[::1]:53")
	backend6  = netip.MustParseAddrPort("[fd00:20::10]:53")
	nat6      = netip.MustParseAddr("fd00:20::1")
	natPorts  = PortRange{First: 1024, Last: 32767}
)

const loIfindex = 1

// needKernel skips a test without privilege; CI runs as root and sets CI, so there a skip is a failure.
func needKernel(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") != "" {
		tb.Fatal("CI must run the kernel tests: run as root")
	}
	tb.Skip("loading BPF programs needs root")
}

// newHarness loads the programs without pins or attachments, with one listener and one endpoint per address family.
func newHarness(tb testing.TB, zones ...string) *Datapath {
	tb.Helper()
	needKernel(tb)
	spec, err := loadDnsbpf()
	if err != nil {
		tb.Fatal(err)
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	d := &Datapath{options: Options{NATPorts: natPorts, FlowTimeout: DefaultFlowTimeout}}
	if err := spec.LoadAndAssign(&d.objects, nil); err != nil {
		tb.Fatalf("%v", describeLoadError(err))
	}
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
	})
	if err := d.configure(); err != nil {
		tb.Fatal(err)
	}
	listeners := []Listener{{Address: listener4, Scope: ScopeHost}, {Address: listener6, Scope: ScopeHost}}
	if err := d.ReplaceListeners(listeners); err != nil {
		tb.Fatal(err)
	}
	backends := []Backend{
		{Address: backend4, NATAddress: nat4, Ifindex: loIfindex},
		{Address: backend6, NATAddress: nat6, Ifindex: loIfindex},
	}
	if len(zones) == 0 {
		zones = []string{"cluster.local"}
	}
	if err := d.ReplaceZones(zones, backends); err != nil {
		tb.Fatal(err)
	}
	return d
}

// TC verdicts by name.
func verdictName(verdict uint32) string {
	switch int32(verdict) {
	case -1:
		return "pass"
	case 2:
		return "shot"
	case 7:
		return "redirect"
	}
	return "verdict?"
}

func query(tb testing.TB, name string, edit ...func(*dns.Msg)) []byte {
	tb.Helper()
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), dns.TypeA)
	m.Id = 0x1234
	for _, e := range edit {
		e(m)
	}
	wire, err := m.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	return wire
}

func BenchmarkPrograms(b *testing.B) {
	d := newHarness(b)
	external := pktgen.UDP(client4, listener4, query(b, "abcdefgh.ijklmnop.qrst.example.com"))
	cluster := pktgen.UDP(client4, listener4, query(b, "backend.default.svc.cluster.local"))
	other := pktgen.UDP(client4, netip.MustParseAddrPort("127.0.0.1:8080"), query(b, "backend.default.svc.cluster.local"))
	for name, frame := range map[string][]byte{"other": other, "external": external, "cluster": cluster} {
		b.Run(name, func(b *testing.B) {
			var total time.Duration
			repeat := 1
			if name != "cluster" {
				repeat = 1000000
			}
			n := 0
			for b.Loop() {
				n++
				opts := ebpf.RunOptions{Data: frame, Repeat: uint32(repeat), DataOut: make([]byte, 4096)}
				ret, err := d.objects.DnsFromHost.Run(&opts)
				if err != nil {
					b.Fatal(err)
				}
				_ = ret
			}
			_, dur, err := d.objects.DnsFromHost.Benchmark(frame, repeat, nil)
			if err != nil {
				b.Fatal(err)
			}
			total = dur
			b.ReportMetric(float64(total.Nanoseconds()), "run-ns")
		})
	}
}
