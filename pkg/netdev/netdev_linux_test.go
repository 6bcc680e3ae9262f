package netdev

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestOutside(t *testing.T) {
	for _, c := range []struct {
		first, last int
		want        PortRange // empty: an error
	}{
		{32768, 60999, PortRange{1024, 32767}}, // the kernel's default
		{1024, 40000, PortRange{40001, 65535}},
		{1025, 40000, PortRange{40001, 65535}},
		{20000, 46511, PortRange{46512, 65535}},
		{20000, 46559, PortRange{1024, 19999}}, // both of 18976: the one below
		{49152, 65535, PortRange{1024, 49151}},
		{2048, 65535, PortRange{1024, 2047}},
		{2047, 65535, PortRange{}},
		{1024, 64511, PortRange{64512, 65535}},
		{1024, 64512, PortRange{}},
		{1, 65535, PortRange{}},
		{1, 1023, PortRange{1024, 65535}},
		{60000, 60000, PortRange{1024, 59999}},
	} {
		got, err := outside(c.first, c.last)
		if failed := c.want == (PortRange{}); got != c.want || (err != nil) != failed {
			t.Errorf("outside(%d, %d) = %v, %v; want %v", c.first, c.last, got, err, c.want)
		}
		if err == nil && (int(got.First) <= c.last && int(got.Last) >= c.first || got.First < firstUserPort || got.First > got.Last) {
			t.Errorf("outside(%d, %d) = %v overlaps them or is out of order", c.first, c.last, got)
		}
		if err != nil && !strings.Contains(err.Error(), "ip_local_port_range") {
			t.Errorf("outside(%d, %d): error names no setting: %v", c.first, c.last, err)
		}
	}
}

// newNamespace gives the test a network namespace of its own: the thread that is in it ends with the test.
func newNamespace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" || os.Getenv("K2S_LAB_REQUIRED") != "" {
			t.Fatal("this run must not skip the kernel tests: run as root")
		}
		t.Skip("making a network namespace needs root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("unshare: %v", err)
	}
}

// addInterface makes a veth pair that is up, with addresses on the end that has the name.
func addInterface(t *testing.T, name string, addresses ...string) int {
	t.Helper()
	attributes := netlink.NewLinkAttrs()
	attributes.Name = name
	pair := &netlink.Veth{LinkAttrs: attributes, PeerName: "peer-" + name}
	if err := netlink.LinkAdd(pair); err != nil {
		t.Fatal(err)
	}
	for _, end := range []string{name, pair.PeerName} {
		up(t, end)
	}
	device, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range addresses {
		address, err := netlink.ParseAddr(text)
		if err != nil {
			t.Fatal(err)
		}
		address.Flags = unix.IFA_F_NODAD // else an IPv6 address can't be used yet
		if err := netlink.AddrAdd(device, address); err != nil {
			t.Fatal(err)
		}
	}
	return device.Attrs().Index
}

func up(t *testing.T, name string) {
	t.Helper()
	device, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(device); err != nil {
		t.Fatal(err)
	}
}

func TestRouteTo(t *testing.T) {
	newNamespace(t)
	up(t, "lo")
	index := addInterface(t, "eth0", "172.20.0.1/24", "fd00:20::1/64")
	for _, c := range []struct {
		to   string
		want Route
	}{
		{"172.20.0.10", Route{Network: netip.MustParsePrefix("172.20.0.0/24"), Interface: "eth0", Ifindex: index, Source: netip.MustParseAddr("172.20.0.1"), Ethernet: true}},
		{"::ffff:172.20.0.10", Route{Network: netip.MustParsePrefix("172.20.0.0/24"), Interface: "eth0", Ifindex: index, Source: netip.MustParseAddr("172.20.0.1"), Ethernet: true}},
		{"fd00:20::10", Route{Network: netip.MustParsePrefix("fd00:20::/64"), Interface: "eth0", Ifindex: index, Source: netip.MustParseAddr("fd00:20::1"), Ethernet: true}},
		{"127.0.0.1", Route{Network: netip.MustParsePrefix("127.0.0.1/32"), Interface: "lo", Ifindex: 1, Source: netip.MustParseAddr("127.0.0.1"), Local: true, Ethernet: true}},
		{"::1", Route{Network: netip.MustParsePrefix("::1/128"), Interface: "lo", Ifindex: 1, Source: netip.IPv6Loopback(), Local: true, Ethernet: true}},
		{"172.20.0.1", Route{Network: netip.MustParsePrefix("172.20.0.1/32"), Interface: "lo", Ifindex: 1, Source: netip.MustParseAddr("172.20.0.1"), Local: true, Ethernet: true}},
	} {
		got, err := RouteTo(netip.MustParseAddr(c.to))
		if err != nil || got != c.want {
			t.Errorf("RouteTo(%s) = %+v, %v; want %+v", c.to, got, err, c.want)
		}
	}
	for _, group := range []string{"172.20.0.255", "255.255.255.255", "224.0.0.1"} {
		if got, err := RouteTo(netip.MustParseAddr(group)); err == nil && !got.Group {
			t.Errorf("RouteTo(%s) = %+v: it is no host's address", group, got)
		}
	}
	for _, nowhere := range []string{"192.0.2.1", "2001:db8::1"} {
		if got, err := RouteTo(netip.MustParseAddr(nowhere)); !errors.Is(err, ErrNoRoute) || !strings.Contains(err.Error(), nowhere) {
			t.Errorf("RouteTo(%s) = %+v, %v; want ErrNoRoute", nowhere, got, err)
		}
	}
}

func TestInterfaceOf(t *testing.T) {
	newNamespace(t)
	up(t, "lo")
	eth0 := Interface{Name: "eth0", Index: addInterface(t, "eth0", "172.20.0.1/24", "172.20.0.2/24", "fd00:20::1/64")}
	eth1 := Interface{Name: "eth1", Index: addInterface(t, "eth1", "172.19.1.1/24")}
	for address, want := range map[string]Interface{
		"127.0.0.1": {Name: "lo", Index: 1}, "::1": {Name: "lo", Index: 1}, "172.20.0.1": eth0, "172.20.0.2": eth0, "::ffff:172.20.0.1": eth0,
		"fd00:20::1": eth0, "172.19.1.1": eth1,
	} {
		if got, err := InterfaceOf(netip.MustParseAddr(address)); err != nil || got != want {
			t.Errorf("InterfaceOf(%s) = %v, %v; want %v", address, got, err, want)
		}
	}
	for _, address := range []string{"172.20.0.3", "172.20.0.0", "127.0.0.2", "fd00:20::2"} {
		if got, err := InterfaceOf(netip.MustParseAddr(address)); !errors.Is(err, ErrNoInterface) {
			t.Errorf("InterfaceOf(%s) = %v, %v; want ErrNoInterface", address, got, err)
		}
	}
	want := []netip.Prefix{netip.MustParsePrefix("172.19.1.1/24")}
	prefixes, err := PrefixesOf("eth1")
	prefixes = slices.DeleteFunc(prefixes, func(p netip.Prefix) bool { return p.Addr().IsLinkLocalUnicast() })
	if err != nil || !slices.Equal(prefixes, want) {
		t.Errorf("PrefixesOf(eth1) = %v, %v; want %v", prefixes, err, want)
	}
	if got, err := PrefixesOf("eth2"); err == nil || !strings.Contains(err.Error(), "eth2") {
		t.Errorf("PrefixesOf(eth2) = %v, %v", got, err)
	}
	for _, test := range []struct {
		patterns []string
		want     []Interface
	}{
		{nil, nil}, {[]string{"lo"}, nil}, {[]string{"eth0"}, []Interface{eth0}}, {[]string{"eth*", "eth1"}, []Interface{eth0, eth1}},
		{[]string{"veth*"}, nil},
	} {
		if got, err := MatchInterfaces(test.patterns); err != nil || !slices.Equal(got, test.want) {
			t.Errorf("MatchInterfaces(%q) = %v, %v; want %v", test.patterns, got, err, test.want)
		}
	}
	if got, err := MatchInterfaces([]string{"eth["}); err == nil || !strings.Contains(err.Error(), "eth[") {
		t.Errorf("MatchInterfaces(eth[) = %v, %v", got, err)
	}
	if mode, err := XDPMode("eth0"); err != nil || mode != "" {
		t.Errorf("XDPMode(eth0) = %q, %v", mode, err)
	}
}

func TestSysctls(t *testing.T) {
	newNamespace(t)
	for _, name := range []string{"net.ipv4.conf.lo.route_localnet", "net.ipv4.conf.lo.accept_local"} {
		before, err := Sysctl(name)
		if err != nil || before != "0" && before != "1" {
			t.Fatalf("Sysctl(%s) = %q, %v", name, before, err)
		}
		for _, value := range []string{"1", "0", "1"} {
			if err := SetSysctl(name, value); err != nil {
				t.Fatal(err)
			}
			if got, err := Sysctl(name); err != nil || got != value {
				t.Errorf("Sysctl(%s) = %q, %v; want %q", name, got, err, value)
			}
		}
	}
	const ports = "net.ipv4.ip_local_port_range"
	if err := SetSysctl(ports, "10000 50000"); err != nil {
		t.Fatal(err)
	}
	if got, err := PortsOutsideEphemeral(); err != nil || got != (PortRange{50001, 65535}) {
		t.Errorf("PortsOutsideEphemeral() = %v, %v", got, err)
	}
	if err := SetSysctl(ports, "1024 65535"); err != nil {
		t.Fatal(err)
	}
	if got, err := PortsOutsideEphemeral(); err == nil {
		t.Errorf("PortsOutsideEphemeral() = %v with no port left", got)
	}
	const none = "net.ipv4.conf.lo.no_such_setting"
	if _, err := Sysctl(none); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), none) {
		t.Errorf("Sysctl(%s): %v", none, err)
	}
	if err := SetSysctl(none, "1"); err == nil || !strings.Contains(err.Error(), none) {
		t.Errorf("SetSysctl(%s): %v", none, err)
	}
	if err := SetSysctl(ports, "nonsense"); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("SetSysctl(%s, nonsense): %v", ports, err)
	}
}

// emptyProgram is what filters run here: the next one on the hook follows.
func emptyProgram(t *testing.T) int {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	return program.FD()
}

func wantFilters(t *testing.T, f Filter, want int) {
	t.Helper()
	device, err := netlink.LinkByIndex(f.Ifindex)
	if err != nil {
		t.Fatal(err)
	}
	filters, err := netlink.FilterList(device, f.parent())
	if err != nil && !isGone(err) { // no qdisc
		t.Fatal(err)
	}
	if len(filters) != want {
		t.Errorf("%d filters beside %+v, want %d: %v", len(filters), f, want, filters)
	}
}

// wantProgram looks for the filter itself: whether it runs a program, and the name of its interface.
func wantProgram(t *testing.T, f Filter, want bool, wantName string) {
	t.Helper()
	id, name, err := FilterProgram(f)
	if err != nil || (id != 0) != want || name != wantName {
		t.Errorf("FilterProgram(%+v) = %d, %q, %v; want an ID %v, %q", f, id, name, err, want, wantName)
	}
}

func wantClsact(t *testing.T, ifindex int, want bool) {
	t.Helper()
	if got, err := HasClsact(ifindex); err != nil || got != want {
		t.Errorf("HasClsact(%d) = %v, %v; want %v", ifindex, got, err, want)
	}
}

func TestClsact(t *testing.T) {
	newNamespace(t)
	program := emptyProgram(t)
	index := addInterface(t, "eth0")
	first, second := Filter{Ifindex: index, Name: "first"}, Filter{Ifindex: index, Name: "second", Index: 1}
	egress := Filter{Ifindex: index, Egress: true, Name: "egress"}

	wantClsact(t, index, false)
	wantProgram(t, first, false, "eth0")
	for range 2 { // a filter that is there is replaced
		for _, filter := range []Filter{first, second, egress} {
			if err := AttachFilter(filter, program); err != nil {
				t.Fatal(err)
			}
		}
		wantClsact(t, index, true)
		wantFilters(t, first, 2)
		wantFilters(t, egress, 1)
		for _, filter := range []Filter{first, second, egress} {
			wantProgram(t, filter, true, "eth0")
		}
		wantProgram(t, Filter{Ifindex: index, Name: "third", Index: 2}, false, "eth0")
	}
	for i, filter := range []Filter{first, egress, second} {
		if err := RemoveClsact(index); err != nil { // refuses while filters are left
			t.Fatal(err)
		}
		wantClsact(t, index, true)
		for range 2 { // one that is not there is no error
			if err := DetachFilter(filter); err != nil {
				t.Errorf("detach %d: %v", i, err)
			}
		}
		wantProgram(t, filter, false, "eth0")
	}
	wantFilters(t, first, 0)
	wantFilters(t, egress, 0)
	for range 2 {
		if err := RemoveClsact(index); err != nil {
			t.Error(err)
		}
		wantClsact(t, index, false)
	}
	if err := DetachFilter(first); err != nil {
		t.Errorf("detach without a qdisc: %v", err)
	}
}

// A qdisc and a filter of another owner stay as they are.
func TestClsactOfAnother(t *testing.T) {
	newNamespace(t)
	program := emptyProgram(t)
	index := addInterface(t, "eth0")
	if err := netlink.QdiscAdd(clsact(index)); err != nil {
		t.Fatal(err)
	}
	other := Filter{Ifindex: index, Name: "other"}.netlink()
	other.Handle, other.Priority, other.Fd = 7, 49152, program
	if err := netlink.FilterAdd(other); err != nil {
		t.Fatal(err)
	}

	ours := Filter{Ifindex: index, Name: "ours"}
	if err := AttachFilter(ours, program); err != nil {
		t.Fatal(err)
	}
	wantFilters(t, ours, 2)
	if err := DetachFilter(ours); err != nil {
		t.Fatal(err)
	}
	wantFilters(t, ours, 1)
	// Even if the owner's filter were asked to go with ours.
	if err := RemoveClsact(index); err != nil {
		t.Fatal(err)
	}
	wantClsact(t, index, true)
	wantFilters(t, ours, 1)
}

func TestFiltersOfGoneInterface(t *testing.T) {
	newNamespace(t)
	program := emptyProgram(t)
	index := addInterface(t, "eth0")
	filter := Filter{Ifindex: index, Name: "ours"}
	if err := AttachFilter(filter, program); err != nil {
		t.Fatal(err)
	}
	device, err := netlink.LinkByIndex(index)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkDel(device); err != nil {
		t.Fatal(err)
	}
	wantProgram(t, filter, false, "")
	if err := errors.Join(DetachFilter(filter), RemoveClsact(index)); err != nil {
		t.Error(err)
	}
	if err := AttachFilter(filter, program); err == nil {
		t.Error("attached to an interface that is gone")
	}
	if _, err := HasClsact(index); err == nil {
		t.Error("an interface that is gone has a qdisc")
	}
}

// TestFilterChanges: who takes a filter away, or the qdisc that it is on, is noticed at once.
func TestFilterChanges(t *testing.T) {
	newNamespace(t)
	ctx, cancel := context.WithCancel(t.Context())
	changes, err := Changes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	filter := Filter{Ifindex: 1, Egress: true, Name: "dns_from_host"}
	for _, take := range []func() error{
		func() error { return DetachFilter(filter) },
		func() error { return netlink.QdiscDel(clsact(1)) },
	} {
		if err := AttachFilter(filter, emptyProgram(t)); err != nil {
			t.Fatal(err)
		}
		if err := take(); err != nil {
			t.Fatal(err)
		}
		if _, open := <-changes; !open {
			t.Fatal("the channel ended before its context")
		}
	}
	cancel()
	for range changes {
		// what was told before the end
	}
}

// Each kind of change is told, and the channel ends with the context.
func TestChanges(t *testing.T) {
	newNamespace(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	changes, err := Changes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	addInterface(t, "eth0", "172.20.0.1/24")
	if _, open := <-changes; !open {
		t.Error("the channel ended before its context")
	}
	cancel()
	for range changes {
		// what was told before the end
	}
}
