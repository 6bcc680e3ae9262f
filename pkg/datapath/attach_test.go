//go:build linux

package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
)

// newNamespace gives the test a network namespace and a BPF file system of its own, and returns a pin directory that
// does not exist yet. The thread is never unlocked, so it ends with the test and takes both along.
func newNamespace(t *testing.T) (pinDir string) {
	t.Helper()
	needKernel(t)
	mountPoint := t.TempDir()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		t.Fatalf("unshare: %v", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatalf("make mounts private: %v", err)
	}
	if err := unix.Mount("bpf", mountPoint, "bpf", 0, ""); err != nil {
		t.Fatalf("mount a BPF file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mountPoint, 0); err != nil {
			t.Errorf("unmount the BPF file system: %v", err)
		}
	})
	return filepath.Join(mountPoint, "k2s-dnsbpf")
}

// addInterface makes a veth pair and returns the index of the end with the name.
func addInterface(t *testing.T, name string) int {
	t.Helper()
	return addInterfaceAt(t, name, 0)
}

// addInterfaceAt does it with a given index; 0 is for one that no interface had before.
func addInterfaceAt(t *testing.T, name string, index int) int {
	t.Helper()
	attributes := netlink.NewLinkAttrs()
	attributes.Name, attributes.Index = name, index
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attributes, PeerName: "peer-" + name}); err != nil {
		t.Fatal(err)
	}
	device, err := net.InterfaceByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return device.Index
}

func deleteInterface(t *testing.T, name string) {
	t.Helper()
	device, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkDel(device); err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, options Options) *Datapath {
	t.Helper()
	options.XDPProgram = netdev.XDPProgram
	options.NATPorts = natPorts
	d, err := Load(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func replaceAttachments(t *testing.T, d *Datapath, attachments ...Attachment) {
	t.Helper()
	if err := d.ReplaceAttachments(attachments); err != nil {
		t.Fatal(err)
	}
}

// hasTCX reports whether the kernel has TCX links; one without (before 6.6) refuses to be asked for them.
func hasTCX(t *testing.T) bool {
	t.Helper()
	_, err := link.QueryPrograms(link.QueryOptions{Target: loIfindex, Attach: ebpf.AttachTCXIngress})
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, ebpf.ErrNotSupported) {
		t.Fatal(err)
	}
	return err == nil
}

func needTCX(t *testing.T) {
	t.Helper()
	needKernel(t)
	if !hasTCX(t) {
		t.Skip("this is about TCX links, which the kernel does not have (before 6.6)")
	}
}

// attached returns the IDs of the programs on a hook, in the order in which they run.
func attached(t *testing.T, ifindex int, egress bool) (ids []ebpf.ProgramID) {
	t.Helper()
	hook := ebpf.AttachTCXIngress
	if egress {
		hook = ebpf.AttachTCXEgress
	}
	result, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: hook})
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range result.Programs {
		ids = append(ids, program.ID)
	}
	return ids
}

func wantAttached(t *testing.T, d *Datapath, ifindex int, egress bool, want ...Program) {
	t.Helper()
	var ids []ebpf.ProgramID
	for _, name := range want {
		program, err := d.program(name)
		if err != nil {
			t.Fatal(err)
		}
		info, err := program.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, _ := info.ID()
		ids = append(ids, id)
	}
	got := attached(t, ifindex, egress)
	// The kernel lets go of a link a moment after its last descriptor is closed.
	for deadline := time.Now().Add(10 * time.Second); !slices.Equal(got, ids) && time.Now().Before(deadline); got = attached(t, ifindex, egress) {
		time.Sleep(time.Millisecond)
	}
	if !slices.Equal(got, ids) {
		t.Errorf("interface %d, egress %v: programs %v attached, want %v %v", ifindex, egress, got, want, ids)
	}
}

// pinnedLinks returns the link IDs by the names of their pins.
func pinnedLinks(t *testing.T, pinDir string) map[string]link.ID {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(pinDir, "links"))
	if err != nil {
		t.Fatal(err)
	}
	links := make(map[string]link.ID)
	for _, entry := range entries {
		pinned, err := link.LoadPinnedLink(filepath.Join(pinDir, "links", entry.Name()), nil)
		if err != nil {
			t.Fatal(err)
		}
		info, err := pinned.Info()
		if err != nil {
			t.Fatal(err)
		}
		links[entry.Name()] = info.ID
		pinned.Close()
	}
	return links
}

// wantLinksGone looks for links in the whole kernel, of which the pins alone tell nothing. One that has lost its pin
// just now may still be listed, but must not be attached.
func wantLinksGone(t *testing.T, links map[string]link.ID) {
	t.Helper()
	gone := slices.Collect(maps.Values(links))
	var all link.Iterator
	defer all.Close()
	for all.Next() {
		if !slices.Contains(gone, all.ID) {
			continue
		}
		if ifindex, err := linkIfindex(all.Link); err != nil || ifindex != 0 {
			t.Errorf("link %d is still attached to interface %d: %v", all.ID, ifindex, err)
		}
	}
	if err := all.Err(); err != nil {
		t.Fatal(err)
	}
}

func TestAttach(t *testing.T) {
	needTCX(t)
	pinDir := newNamespace(t)
	eth, vlan := addInterface(t, "eth0"), addInterface(t, "eth0.5-x")
	d := load(t, Options{PinDir: pinDir})
	fromHost := Attachment{FromHost, "lo", loIfindex, true}
	fromClient := Attachment{FromClient, "eth0", eth, false}
	onEth, onVLAN := Attachment{FromBackend, "eth0", eth, false}, Attachment{FromBackend, "eth0.5-x", vlan, false}
	replaceAttachments(t, d, fromHost, fromClient, onEth, onVLAN)
	wantAttached(t, d, loIfindex, true, FromHost)
	wantAttached(t, d, loIfindex, false)
	wantAttached(t, d, eth, false, FromBackend, FromClient) // each new one at the head
	wantAttached(t, d, vlan, false, FromBackend)

	links := pinnedLinks(t, pinDir)
	want := []string{
		"dns_from_backend-eth0-ingress", "dns_from_backend-eth0:5-x-ingress", "dns_from_client-eth0-ingress", "dns_from_host-lo-egress",
	}
	if got := slices.Sorted(maps.Keys(links)); !slices.Equal(got, want) {
		t.Errorf("pinned links %q, want %q", got, want)
	}
	programs, err := PinnedPrograms(pinDir)
	if err != nil {
		t.Fatal(err)
	}
	for i := range programs {
		if programs[i].KernelID == 0 {
			t.Errorf("%+v has no ID", programs[i])
		}
		programs[i].KernelID, programs[i].pin = 0, ""
	}
	wantPrograms := []AttachedProgram{
		{Name: "dns_from_backend", Attach: "tcx/ingress", Ifindex: eth, Interface: "eth0"},
		{Name: "dns_from_backend", Attach: "tcx/ingress", Ifindex: vlan, Interface: "eth0.5-x"},
		{Name: "dns_from_client", Attach: "tcx/ingress", Ifindex: eth, Interface: "eth0"},
		{Name: "dns_from_host", Attach: "tcx/egress", Ifindex: loIfindex, Interface: "lo"},
	}
	slices.SortFunc(programs, func(a, b AttachedProgram) int { return strings.Compare(a.Name+a.Interface, b.Name+b.Interface) })
	if diff := cmp.Diff(wantPrograms, programs, cmp.AllowUnexported(AttachedProgram{})); diff != "" {
		t.Errorf("pinned programs (-want +got):\n%s", diff)
	}

	// The same again changes nothing.
	replaceAttachments(t, d, fromHost, fromClient, onEth, onVLAN)
	if again := pinnedLinks(t, pinDir); !maps.Equal(again, links) {
		t.Errorf("links %v, before they were %v", again, links)
	}

	// Another process, with programs of its own: the links stay and get them.
	next := load(t, Options{PinDir: pinDir})
	replaceAttachments(t, next, fromHost, onEth, onVLAN)
	wantAttached(t, next, loIfindex, true, FromHost)
	wantAttached(t, next, eth, false, FromBackend)
	wantAttached(t, next, vlan, false, FromBackend)
	removed := map[string]link.ID{"dns_from_client-eth0-ingress": links["dns_from_client-eth0-ingress"]}
	wantLinksGone(t, removed)
	delete(links, "dns_from_client-eth0-ingress")
	if again := pinnedLinks(t, pinDir); !maps.Equal(again, links) {
		t.Errorf("links %v, before they were %v", again, links)
	}

	if err := next.DetachQueries(); err != nil {
		t.Fatal(err)
	}
	wantAttached(t, next, loIfindex, true)
	wantAttached(t, next, eth, false, FromBackend)

	for range 2 { // the second time nothing is left to do
		if err := Remove(pinDir); err != nil {
			t.Fatal(err)
		}
		for _, ifindex := range []int{loIfindex, eth, vlan} {
			wantAttached(t, next, ifindex, false)
			wantAttached(t, next, ifindex, true)
		}
		wantLinksGone(t, links)
		if _, err := os.Stat(pinDir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("pin directory after Remove: %v", err)
		}
	}
	if programs, err := PinnedPrograms(pinDir); err != nil || len(programs) != 0 {
		t.Errorf("PinnedPrograms without pins: %v, %v", programs, err)
	}
}

// A program of another owner on the same hook stays, behind ours.
func TestAttachBesideOthers(t *testing.T) {
	needTCX(t)
	pinDir := newNamespace(t)
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	otherLink, err := link.AttachTCX(link.TCXOptions{Interface: loIfindex, Program: other, Attach: ebpf.AttachTCXEgress})
	if err != nil {
		t.Fatal(err)
	}
	defer otherLink.Close()
	before := attached(t, loIfindex, true)

	d := load(t, Options{PinDir: pinDir})
	replaceAttachments(t, d, Attachment{FromHost, "lo", loIfindex, true})
	during := attached(t, loIfindex, true)
	if len(during) != 2 || during[1] != before[0] {
		t.Errorf("programs %v, want ours and %v", during, before)
	}
	if err := Remove(pinDir); err != nil {
		t.Fatal(err)
	}
	if after := attached(t, loIfindex, true); !slices.Equal(after, before) {
		t.Errorf("programs %v after Remove, want %v", after, before)
	}
}

// An interface that goes takes its attachment along; the pin that stays must not hide that from the next one of its name.
func TestAttachRecreatedInterface(t *testing.T) {
	needTCX(t)
	for _, sameIndex := range []bool{false, true} {
		t.Run(fmt.Sprintf("same index %v", sameIndex), func(t *testing.T) {
			pinDir := newNamespace(t)
			index := addInterface(t, "eth0")
			at := 0
			if sameIndex {
				at = index
			}
			d := load(t, Options{PinDir: pinDir})
			attachment := Attachment{FromBackend, "eth0", index, false}
			replaceAttachments(t, d, attachment)
			links := pinnedLinks(t, pinDir)

			deleteInterface(t, "eth0")
			programs, err := PinnedPrograms(pinDir)
			if err != nil || len(programs) != 1 || programs[0].Ifindex != 0 || programs[0].Interface != "eth0" {
				t.Errorf("pinned programs without their interface: %+v, %v", programs, err)
			}
			// Attaching to what is gone fails, and leaves no pin that claims the opposite.
			if err := d.ReplaceAttachments([]Attachment{attachment}); err == nil {
				t.Error("attached to an interface that is gone")
			} else if !strings.Contains(err.Error(), "dns_from_backend on ingress of eth0") {
				t.Errorf("error does not name the attachment: %v", err)
			}

			attachment.Ifindex = addInterfaceAt(t, "eth0", at)
			if (attachment.Ifindex == index) != sameIndex {
				t.Fatalf("index %d follows %d", attachment.Ifindex, index)
			}
			replaceAttachments(t, d, attachment)
			wantAttached(t, d, attachment.Ifindex, false, FromBackend)
			wantLinksGone(t, links)
			if again := pinnedLinks(t, pinDir); len(again) != 1 {
				t.Errorf("pinned links %v", again)
			}
		})
	}
}

// As before, but nobody noticed that the interface was away: the old pin meets the new interface.
func TestAttachStalePin(t *testing.T) {
	needTCX(t)
	for _, sameIndex := range []bool{false, true} {
		t.Run(fmt.Sprintf("same index %v", sameIndex), func(t *testing.T) {
			pinDir := newNamespace(t)
			index := addInterface(t, "eth0")
			at := 0
			if sameIndex {
				at = index
			}
			d := load(t, Options{PinDir: pinDir})
			replaceAttachments(t, d, Attachment{FromBackend, "eth0", index, false})
			links := pinnedLinks(t, pinDir)
			deleteInterface(t, "eth0")
			again := addInterfaceAt(t, "eth0", at)
			replaceAttachments(t, d, Attachment{FromBackend, "eth0", again, false})
			wantAttached(t, d, again, false, FromBackend)
			wantLinksGone(t, links)
		})
	}
}

// What is in the maps outlives the process: counters go on, generations go on, the seed of the hash stays.
func TestMapsOutliveProcess(t *testing.T) {
	pinDir := newNamespace(t)
	first := load(t, Options{PinDir: pinDir})
	for range 3 {
		if err := first.ReplaceZones([]string{testZone}, defaultBackends(), nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := first.ReplaceListeners([]Listener{{Address: listener4, Scope: testScope}}); err != nil {
		t.Fatal(err)
	}
	h := &harness{Datapath: first}
	q := h.steer(t, FromHost, families[0], families[0].query(query(t, inZone)))
	config, err := first.readConfig()
	if err != nil {
		t.Fatal(err)
	}
	if config.QuestionSeed == 0 {
		t.Error("the hash of questions is not seeded")
	}

	next := &harness{Datapath: load(t, Options{PinDir: pinDir, FlowTimeout: DefaultFlowTimeout * 2})}
	if next.group != first.group-1 {
		t.Errorf("generation %d, want %d", next.group, first.group-1)
	}
	adopted, err := next.readConfig()
	if err != nil {
		t.Fatal(err)
	}
	config.FlowTimeoutNs *= 2
	if adopted.DrawKey == config.DrawKey || adopted.DrawKey == ([2]uint64{}) {
		t.Error("NAT ports are drawn with the old key, or none")
	}
	config.DrawKey = adopted.DrawKey
	if adopted != config {
		t.Errorf("config %+v, want %+v", adopted, config)
	}
	counters, err := PinnedCounters(pinDir)
	if err != nil {
		t.Fatal(err)
	}
	if got := counters[testScope].Steered(); got != 1 {
		t.Errorf("%d steered, want 1", got)
	}
	next.countedSince(t)
	// The reply to a query that the first process's programs steered.
	next.deliver(t, FromHost, families[0], q, replyFrame(q, answer(t, q)))
	if err := next.Drain(context.Background()); err != nil {
		t.Error(err)
	}
	if err := Remove(pinDir); err != nil {
		t.Fatal(err)
	}
	if _, err := PinnedCounters(pinDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("PinnedCounters without pins: %v", err)
	}
}

// Drain ends with its context while a query is in flight, and that is no error.
func TestDrain(t *testing.T) {
	h := newHarness(t)
	h.steer(t, FromHost, families[0], families[0].query(query(t, inZone)))
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := h.Drain(ended); err != nil {
		t.Error(err)
	}
	h.wantInFlight(t, 1)
	h.forgetSteered(t)
	if err := h.Drain(context.Background()); err != nil {
		t.Error(err)
	}
}

// filters does with netdev what the daemon does, and keeps a record.
type filters struct{ calls []string }

func filterOf(a Attachment) netdev.Filter {
	filter := netdev.Filter{Ifindex: a.Ifindex, Egress: a.Egress, Name: string(a.Program)}
	if a.Program == FromClient {
		filter.Index = 1
	}
	return filter
}

func (f *filters) AttachFilter(a Attachment, programFD int) error {
	f.calls = append(f.calls, "attach "+a.String())
	return netdev.AttachFilter(filterOf(a), programFD)
}

func (f *filters) DetachFilter(a Attachment) error {
	f.calls = append(f.calls, "detach "+a.String())
	return errors.Join(netdev.DetachFilter(filterOf(a)), netdev.RemoveClsact(a.Ifindex))
}

func (f *filters) HasFilter(a Attachment, program uint32) (bool, error) {
	id, name, err := netdev.FilterProgram(filterOf(a))
	return name == "" || id == program, err
}

func filterNames(t *testing.T, ifindex int, parent uint32) (names []string) {
	t.Helper()
	device, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		t.Fatal(err)
	}
	//nolint:forbidigo // nothing else changes this namespace
	found, err := netlink.FilterList(device, parent)
	if err != nil {
		t.Fatal(err)
	}
	for _, filter := range found {
		names = append(names, filter.(*netlink.BpfFilter).Name)
	}
	return names
}

func TestForceTrafficControl(t *testing.T) {
	pinDir := newNamespace(t)
	eth := addInterface(t, "eth0")
	control := &filters{}
	// Without TCX it must come to the same by itself.
	d := load(t, Options{PinDir: pinDir, TrafficControl: control, ForceTrafficControl: hasTCX(t)})
	attachments := []Attachment{
		{FromHost, "lo", loIfindex, true}, {FromClient, "eth0", eth, false}, {FromBackend, "eth0", eth, false},
	}
	for range 2 {
		replaceAttachments(t, d, attachments...)
		if got := filterNames(t, loIfindex, netlink.HANDLE_MIN_EGRESS); !slices.Equal(got, []string{"dns_from_host"}) {
			t.Errorf("filters on egress of lo: %q", got)
		}
		if got := filterNames(t, eth, netlink.HANDLE_MIN_INGRESS); !slices.Equal(got, []string{"dns_from_backend", "dns_from_client"}) {
			t.Errorf("filters on ingress of eth0: %q", got)
		}
		if hasTCX(t) {
			wantAttached(t, d, loIfindex, true) // no TCX link beside them
		}
		if links := pinnedLinks(t, pinDir); len(links) != 0 {
			t.Errorf("pinned links %v", links)
		}
	}
	want := []string{
		"attach dns_from_host on egress of lo", "attach dns_from_client on ingress of eth0", "attach dns_from_backend on ingress of eth0",
	}
	if !slices.Equal(control.calls, want) { // the second time all is there
		t.Errorf("calls %q, want %q", control.calls, want)
	}
	for _, attachment := range attachments {
		if err := control.DetachFilter(attachment); err != nil {
			t.Error(err)
		}
	}
	for _, ifindex := range []int{loIfindex, eth} {
		if has, err := netdev.HasClsact(ifindex); err != nil || has {
			t.Errorf("interface %d: clsact %v, %v", ifindex, has, err)
		}
	}
}

// refusing is a traffic control that can't attach.
type refusing struct{ err error }

func (r refusing) AttachFilter(Attachment, int) error       { return r.err }
func (refusing) HasFilter(Attachment, uint32) (bool, error) { return true, nil }

func (r refusing) DetachFilter(Attachment) error { return r.err }

func TestAttachErrors(t *testing.T) {
	pinDir := newNamespace(t)
	broken := errors.New("broken")
	d := load(t, Options{PinDir: pinDir, TrafficControl: refusing{broken}, ForceTrafficControl: true})
	err := d.ReplaceAttachments([]Attachment{{FromHost, "lo", loIfindex, true}})
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "dns_from_host on egress of lo") {
		t.Errorf("ReplaceAttachments returned %v", err)
	}
	err = d.ReplaceAttachments([]Attachment{{"dns_from_nowhere", "lo", loIfindex, true}})
	if err == nil || !strings.Contains(err.Error(), "dns_from_nowhere") {
		t.Errorf("unknown program: %v", err)
	}
}

func TestLoadErrors(t *testing.T) {
	pinDir := newNamespace(t)
	for _, ports := range []PortRange{{}, {First: 0, Last: 10}, {First: 10, Last: 9}} {
		if _, err := Load(Options{PinDir: pinDir, NATPorts: ports}); err == nil || !strings.Contains(err.Error(), "NAT port range") {
			t.Errorf("NAT ports %v: %v", ports, err)
		}
	}
	if _, err := Load(Options{PinDir: t.TempDir(), NATPorts: natPorts}); !errors.Is(err, ErrNoBPFFS) {
		t.Errorf("without a BPF file system: %v", err)
	}
	if _, err := os.Stat(pinDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a load that failed left the pin directory: %v", err)
	}
}

func TestCheckPinDir(t *testing.T) {
	plain := t.TempDir()
	for _, dir := range []string{plain, filepath.Join(plain, "a", "b"), plain + "/../" + filepath.Base(plain)} {
		if err := CheckPinDir(dir); !errors.Is(err, ErrNoBPFFS) {
			t.Errorf("CheckPinDir(%q) returned %v", dir, err)
		}
	}
	if entries, err := os.ReadDir(plain); err != nil || len(entries) != 0 {
		t.Errorf("CheckPinDir left %v, %v", entries, err)
	}
	pinDir := newNamespace(t)
	for _, dir := range []string{pinDir, filepath.Dir(pinDir), filepath.Join(pinDir, "a", "b")} {
		if err := CheckPinDir(dir); err != nil {
			t.Errorf("CheckPinDir(%q) returned %v", dir, err)
		}
	}
}

// An interface that is renamed keeps its attachment, which gets the new name too.
func TestAttachRenamedInterface(t *testing.T) {
	needTCX(t)
	pinDir := newNamespace(t)
	index := addInterface(t, "eth0")
	d := load(t, Options{PinDir: pinDir})
	replaceAttachments(t, d, Attachment{FromBackend, "eth0", index, false}, Attachment{FromClient, "eth0", index, false})
	links := pinnedLinks(t, pinDir)

	device, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetName(device, "lan.0"); err != nil {
		t.Fatal(err)
	}
	replaceAttachments(t, d, Attachment{FromBackend, "lan.0", index, false}, Attachment{FromClient, "lan.0", index, false})
	if again := pinnedLinks(t, pinDir); len(again) != len(links) {
		t.Errorf("pinned links %v, were %v", again, links)
	}
	programs, err := PinnedPrograms(pinDir)
	if err != nil || len(programs) != 2 {
		t.Fatalf("pinned programs %+v, %v", programs, err)
	}
	for _, program := range programs {
		if program.Interface != "lan.0" || program.Ifindex != index {
			t.Errorf("pinned program %+v is not on lan.0", program)
		}
	}
}
