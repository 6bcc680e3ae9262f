//go:build linux

package datapath

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
)

// xdpOf returns the ID of the XDP program on an interface and how the kernel runs it; zero and empty without one.
func xdpOf(t *testing.T, name string) (id ebpf.ProgramID, mode string) {
	t.Helper()
	device, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	if xdp := device.Attrs().Xdp; xdp != nil {
		id = ebpf.ProgramID(xdp.ProgId)
	}
	mode, err = netdev.XDPMode(name)
	if err != nil {
		t.Fatal(err)
	}
	return id, mode
}

func programID(t *testing.T, program *ebpf.Program) ebpf.ProgramID {
	t.Helper()
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return id
}

// wantFilter requires the datapath's filter on an interface, in a mode; an empty mode is for no program at all.
func wantFilter(t *testing.T, d *Datapath, name, mode string) {
	t.Helper()
	var want ebpf.ProgramID
	if mode != "" {
		want = programID(t, d.objects.DnsFilter)
	}
	if id, got := xdpOf(t, name); id != want || got != mode {
		t.Errorf("%s: XDP program %d, mode %q; want %d, %q", name, id, got, want, mode)
	}
}

func tryFilter(t *testing.T, d *Datapath, name string, ifindex int) Attachment {
	t.Helper()
	filter, err := d.TryIngressFilter(name, ifindex)
	if err != nil {
		t.Fatal(err)
	}
	if want := (Attachment{IngressFilter, name, ifindex, false}); filter != want {
		t.Errorf("attached %+v, want %+v", filter, want)
	}
	return filter
}

// foreignXDP is another owner's program.
func foreignXDP(t *testing.T) *ebpf.Program {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	return program
}

// A veth takes no program of its driver's hook while its peer may send more than a page.
func TestIngressFilterOnJumboFrames(t *testing.T) {
	pinDir := newNamespace(t)
	ifindex := addInterface(t, "eth0")
	for _, end := range []string{"eth0", "peer-eth0"} {
		device, err := netlink.LinkByName(end)
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetMTU(device, 9000); err != nil {
			t.Fatal(err)
		}
	}
	d := load(t, Options{PinDir: pinDir})
	tryFilter(t, d, "eth0", ifindex)
	wantFilter(t, d, "eth0", "generic")
}

func TestIngressFilterAttach(t *testing.T) {
	pinDir := newNamespace(t)
	veth := addInterface(t, "eth0.7")
	bridge, _ := addBridge(t, "br0", "port0")
	d := load(t, Options{PinDir: pinDir})
	onVeth := tryFilter(t, d, "eth0.7", veth)
	wantFilter(t, d, "eth0.7", "native")
	onBridge := tryFilter(t, d, "br0", bridge)
	wantFilter(t, d, "br0", "generic")

	links := pinnedLinks(t, pinDir)
	if got := slices.Sorted(maps.Keys(links)); !slices.Equal(got, []string{"dns_filter-br0-xdp", "dns_filter-eth0:7-xdp"}) {
		t.Errorf("pinned links %q", got)
	}
	programs, err := PinnedPrograms(pinDir)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []AttachedProgram{
		{Name: "dns_filter", Attach: "xdp", Ifindex: bridge, Interface: "br0"},
		{Name: "dns_filter", Attach: "xdp", Ifindex: veth, Interface: "eth0.7"},
	} {
		want.KernelID, want.pin = uint32(programID(t, d.objects.DnsFilter)), programs[i].pin
		if programs[i] != want {
			t.Errorf("pinned program %+v, want %+v", programs[i], want)
		}
	}

	// The same again changes nothing.
	tryFilter(t, d, "eth0.7", veth)
	replaceAttachments(t, d, onVeth, onBridge)
	if again := pinnedLinks(t, pinDir); !maps.Equal(again, links) {
		t.Errorf("links %v, before they were %v", again, links)
	}

	// Another process, with programs of its own: the links stay and get them.
	next := load(t, Options{PinDir: pinDir})
	tryFilter(t, next, "eth0.7", veth)
	wantFilter(t, next, "eth0.7", "native")
	wantFilter(t, d, "br0", "generic") // not yet
	tryFilter(t, next, "br0", bridge)
	wantFilter(t, next, "br0", "generic")
	if again := pinnedLinks(t, pinDir); !maps.Equal(again, links) {
		t.Errorf("links %v, before they were %v", again, links)
	}

	if !hasTCX(t) {
		t.Skip("what follows is about TCX links, which the kernel does not have (before 6.6); what came before passed")
	}
	// Beside the programs of traffic control, and away with the next set that is without it.
	fromClient, fromBackend := Attachment{FromClient, "eth0.7", veth, false}, Attachment{FromBackend, "eth0.7", veth, false}
	replaceAttachments(t, next, fromBackend, fromClient, onVeth)
	wantAttached(t, next, veth, false, FromClient, FromBackend)
	wantFilter(t, next, "eth0.7", "native")
	wantFilter(t, next, "br0", "")
	// It stops queries, so it goes with those who take them.
	if err := next.DetachQueries(); err != nil {
		t.Fatal(err)
	}
	wantAttached(t, next, veth, false, FromBackend)
	wantFilter(t, next, "eth0.7", "")

	tryFilter(t, next, "eth0.7", veth)
	tryFilter(t, next, "br0", bridge)
	links = pinnedLinks(t, pinDir)
	if err := Remove(pinDir); err != nil {
		t.Fatal(err)
	}
	wantFilter(t, next, "eth0.7", "")
	wantFilter(t, next, "br0", "")
	wantLinksGone(t, links)
}

// An interface takes one XDP program. One that is there stays, whoever attached it, and however.
func TestIngressFilterBesideOthers(t *testing.T) {
	pinDir := newNamespace(t)
	d := load(t, Options{PinDir: pinDir})
	foreign := foreignXDP(t)
	for _, c := range []struct {
		name   string
		flags  link.XDPAttachFlags
		bridge bool
		link   bool
	}{
		{"native0", link.XDPDriverMode, false, true},
		{"generic0", link.XDPGenericMode, false, true},
		{"bridge0", link.XDPGenericMode, true, true},
		{"nolink0", link.XDPDriverMode, false, false},
		{"nolink1", link.XDPGenericMode, false, false},
		{"nolink2", link.XDPGenericMode, true, false},
	} {
		var ifindex int
		if c.bridge {
			ifindex, _ = addBridge(t, c.name, "p-"+c.name)
		} else {
			ifindex = addInterface(t, c.name)
		}
		if c.link {
			other, err := link.AttachXDP(link.XDPOptions{Interface: ifindex, Program: foreign, Flags: c.flags})
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
		} else {
			device, err := netlink.LinkByName(c.name)
			if err != nil {
				t.Fatal(err)
			}
			if err := netlink.LinkSetXdpFdWithFlags(device, foreign.FD(), int(c.flags)); err != nil {
				t.Fatal(err)
			}
		}
		id, mode := xdpOf(t, c.name)
		if id != programID(t, foreign) {
			t.Fatalf("%s: program %d is attached, not the test's", c.name, id)
		}
		_, err := d.TryIngressFilter(c.name, ifindex)
		if err == nil || !strings.Contains(err.Error(), c.name) || !strings.Contains(err.Error(), "another XDP program") {
			t.Errorf("%s: TryIngressFilter returned %v", c.name, err)
		}
		if idAfter, modeAfter := xdpOf(t, c.name); idAfter != id || modeAfter != mode {
			t.Errorf("%s: program %d, mode %s; before %d, %s", c.name, idAfter, modeAfter, id, mode)
		}
		if links := pinnedLinks(t, pinDir); len(links) != 0 {
			t.Errorf("%s: pinned links %v", c.name, links)
		}
	}
}

// As for the other programs: an interface that is made anew gets a new link, and one that is gone an error.
func TestIngressFilterRecreatedInterface(t *testing.T) {
	pinDir := newNamespace(t)
	d := load(t, Options{PinDir: pinDir})
	for _, sameIndex := range []bool{false, true} {
		index := addInterface(t, "eth0")
		tryFilter(t, d, "eth0", index)
		links := pinnedLinks(t, pinDir)
		deleteInterface(t, "eth0")
		at := 0
		if sameIndex {
			at = index
		}
		again := addInterfaceAt(t, "eth0", at)
		tryFilter(t, d, "eth0", again)
		wantFilter(t, d, "eth0", "native")
		wantLinksGone(t, links)
		deleteInterface(t, "eth0")
		if _, err := d.TryIngressFilter("eth0", again); !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENODEV) {
			t.Errorf("an interface that is gone: %v", err)
		}
		if links := pinnedLinks(t, pinDir); len(links) != 0 {
			t.Errorf("pinned links %v", links)
		}
	}
}

// Filters of traffic control are another matter: the ingress filter is a link there too.
func TestIngressFilterWithTrafficControl(t *testing.T) {
	pinDir := newNamespace(t)
	eth := addInterface(t, "eth0")
	control := &filters{}
	d := load(t, Options{PinDir: pinDir, TrafficControl: control, ForceTrafficControl: true})
	filter := tryFilter(t, d, "eth0", eth)
	replaceAttachments(t, d, filter)
	wantFilter(t, d, "eth0", "native")
	if len(control.calls) != 0 {
		t.Errorf("calls %q", control.calls)
	}
	replaceAttachments(t, d)
	wantFilter(t, d, "eth0", "")
}
