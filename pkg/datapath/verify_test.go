//go:build linux

package datapath

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
)

// inUse is a datapath with something in each map and on each kind of hook.
func inUse(t *testing.T, pinDir string, eth int) *Datapath {
	t.Helper()
	d := load(t, Options{PinDir: pinDir})
	steer(t, d, eth)
	return d
}

func steer(t *testing.T, d *Datapath, eth int) {
	t.Helper()
	filter, err := d.TryIngressFilter("eth0", eth)
	backend := []Backend{{Address: backend4, NATAddress: nat4, Ifindex: uint32(eth)}}
	if err := errors.Join(err, d.AddReplyVia(map[uint32]uint32{7: 8}),
		d.ReplaceSources([]Source{{Prefix: netip.MustParsePrefix("192.0.2.0/24"), Ifindex: uint32(eth), Allowed: true}}),
		d.ReplaceListeners([]Listener{{Address: listener4, Scope: ScopeHost}}),
		d.ReplaceZones([]string{"cluster.local"}, backend, backend, nil),
	); err != nil {
		t.Fatal(err)
	}
	replaceAttachments(t, d, Attachment{FromHost, "lo", loIfindex, true}, Attachment{FromBackend, "eth0", eth, false}, filter)
}

// detachLink detaches as bpftool does: by a descriptor that is not ours.
func detachLink(t *testing.T, d *Datapath, a Attachment) {
	t.Helper()
	l, err := link.NewFromID(linkID(d.links[a]))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(l.Detach(), l.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestVerify: whatever is taken away is noticed, by its name, and comes back.
func TestVerify(t *testing.T) {
	needTCX(t)
	pinDir := newNamespace(t)
	eth := addInterface(t, "eth0")
	d := inUse(t, pinDir, eth)
	detach := func(a Attachment) func(*testing.T) {
		return func(t *testing.T) {
			t.Helper()
			detachLink(t, d, a)
		}
	}
	empty := func(m *ebpf.Map) func(*testing.T) {
		return func(t *testing.T) {
			t.Helper()
			var key []byte
			for {
				err := m.NextKey(nil, &key)
				if errors.Is(err, ebpf.ErrKeyNotExist) {
					return
				}
				if err := errors.Join(err, m.Delete(key)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	o := &d.objects
	for name, c := range map[string]struct {
		damage func(*testing.T)
		says   string
	}{
		"the host's link":          {detach(Attachment{FromHost, "lo", loIfindex, true}), "dns_from_host on egress of lo"},
		"a backend's link":         {detach(Attachment{FromBackend, "eth0", eth, false}), "dns_from_backend on ingress of eth0"},
		"the ingress filter":       {detach(Attachment{IngressFilter, "eth0", eth, false}), "on xdp of eth0"},
		"zones":                    {empty(o.DnsZones), "dns_zones"},
		"backends":                 {empty(o.DnsBackends), "dns_backends"},
		"listeners":                {empty(o.DnsListeners), "dns_listeners"},
		"sources":                  {empty(o.DnsSources), "dns_sources"},
		"where replies leave":      {empty(o.DnsReplyVia), "dns_reply_via"},
		"one more listener":        {func(t *testing.T) { overwrite(t, o.DnsListeners, listenerKey(listener6), dnsbpfDnsListener{}) }, "dns_listeners"},
		"another scope":            {func(t *testing.T) { overwrite(t, o.DnsListeners, listenerKey(listener4), dnsbpfDnsListener{Scope: 2}) }, "dns_listeners"},
		"the configuration":        {func(t *testing.T) { overwrite(t, o.DnsConfig, uint32(0), dnsbpfDnsConfig{}) }, "dns_config"},
		"a pin":                    {func(t *testing.T) { remove(t, filepath.Join(pinDir, "maps", "dns_zones")) }, "1 pins"},
		"all pins":                 {func(t *testing.T) { remove(t, pinDir) }, "pins"},
		"a map in another's place": {func(t *testing.T) { usurp(t, d.objects.DnsZones, filepath.Join(pinDir, "maps", "dns_listeners")) }, "1 pins"},
		"a map in a link's place": {func(t *testing.T) {
			usurp(t, d.objects.DnsZones, filepath.Join(pinDir, "links", "dns_from_host-lo-egress"))
		}, "1 pins"},
		"a program in a map's place": {func(t *testing.T) { usurp(t, d.objects.DnsFromHost, filepath.Join(pinDir, "maps", "dns_zones")) }, "1 pins"},
		"a directory in a pin's place": {func(t *testing.T) {
			remove(t, filepath.Join(pinDir, "maps", "dns_zones"))
			if err := os.Mkdir(filepath.Join(pinDir, "maps", "dns_zones"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, "1 pins"},
		"the program in our link": {func(t *testing.T) { exchange(t, d.links[Attachment{FromHost, "lo", loIfindex, true}]) }, "dns_from_host on egress of lo"},
	} {
		// No subtest: this thread has the namespaces.
		if wrong := d.Verify(); len(wrong) != 0 {
			t.Fatalf("before %s: %q", name, wrong)
		}
		pins := listPins(t, pinDir)
		c.damage(t)
		if wrong := strings.Join(d.Verify(), "; "); !strings.Contains(wrong, c.says) {
			t.Errorf("%s: said %q, want %q", name, wrong, c.says)
		}
		if strings.Contains(c.says, " of ") == d.Intact() {
			t.Errorf("%s: intact: %v", name, d.Intact())
		}
		if err := d.Heal(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if wrong := d.Verify(); len(wrong) != 0 || !d.Intact() {
			t.Errorf("after %s: %q", name, wrong)
		}
		wantAttached(t, d, loIfindex, true, FromHost)
		wantAttached(t, d, eth, false, FromBackend)
		wantFilter(t, d, "eth0", "native")
		if now := listPins(t, pinDir); !slices.Equal(now, pins) {
			t.Errorf("after %s: pins %q, want %q", name, now, pins)
		}
	}
}

func overwrite[K, V any](t *testing.T, m *ebpf.Map, key K, value V) {
	t.Helper()
	if err := m.Put(key, value); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

// usurp pins an object in the place of another's pin.
func usurp(t *testing.T, object interface{ FD() int }, path string) {
	t.Helper()
	remove(t, path)
	attr := struct {
		path      uint64
		fd, flags uint32
	}{path: uint64(uintptr(unsafe.Pointer(unsafe.StringData(path + "\x00")))), fd: uint32(object.FD())}
	const objPin = 6 // BPF_OBJ_PIN of bpf(2): the library knows of one pin for each object
	if _, _, errno := unix.Syscall(unix.SYS_BPF, objPin, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr)); errno != 0 {
		t.Fatal(errno)
	}
}

// TestFailedWrite: what a write that fails has left is not the work of others, and is looked after until the next one.
func TestFailedWrite(t *testing.T) {
	pinDir := newNamespace(t)
	eth := addInterface(t, "eth0")
	d := load(t, Options{PinDir: pinDir, TrafficControl: &filters{}})
	steer(t, d, eth)
	good := Backend{Address: backend4, NATAddress: nat4, Ifindex: uint32(eth)}
	bad := Backend{Address: backend4, NATAddress: nat6, Ifindex: uint32(eth)}
	many := func(n int) []netip.Addr {
		list := make([]netip.Addr, 0, n)
		for a := netip.MustParseAddr("10.0.0.1"); len(list) < n; a = a.Next() {
			list = append(list, a)
		}
		return list
	}
	via := make(map[uint32]uint32)
	var listeners []Listener
	var sources []Source
	for i, a := range many(int(max(d.objects.DnsListeners.MaxEntries(), d.objects.DnsSources.MaxEntries(), d.objects.DnsReplyVia.MaxEntries())) + 1) {
		via[uint32(i+1)] = 1
		listeners = append(listeners, Listener{Address: netip.AddrPortFrom(a, 53), Scope: ScopeHost})
		sources = append(sources, Source{Prefix: netip.PrefixFrom(a, 32), Ifindex: 1})
	}
	for name, write := range map[string]func() error{
		"zones, a trial's endpoint": func() error {
			return d.ReplaceZones([]string{"other.local"}, []Backend{good, good}, nil, map[string]Backend{"trial.local": bad})
		},
		"zones, the fallback":  func() error { return d.ReplaceZones([]string{"third.local"}, []Backend{good}, []Backend{bad}, nil) },
		"listeners":            func() error { return d.ReplaceListeners(listeners) },
		"sources":              func() error { return d.ReplaceSources(sources) },
		"more ways of replies": func() error { return d.AddReplyVia(via) },
		"ways of replies":      func() error { return d.ReplaceReplyVia(via) },
	} {
		// No subtest: this thread has the namespaces.
		if err := write(); err == nil {
			t.Fatalf("%s: no error", name)
		}
		if wrong := d.Verify(); len(wrong) != 0 {
			t.Errorf("%s: said %q", name, wrong)
		}
	}
	var zone dnsbpfDnsZone
	if err := d.objects.DnsZones.Lookup(mustKey(t, "third.local").hash(), &zone); err != nil {
		t.Fatal(err)
	}
	if err := d.objects.DnsZones.Delete(mustKey(t, "third.local").hash()); err != nil {
		t.Fatal(err)
	}
	if wrong := d.Verify(); len(wrong) != 1 {
		t.Errorf("said %q", wrong)
	}
	if err := d.Heal(); err != nil || len(d.Verify()) != 0 {
		t.Errorf("after: %q, %v", d.Verify(), err)
	}
	steer(t, d, eth)
	if wrong := d.Verify(); len(wrong) != 0 {
		t.Errorf("in the end: %q", wrong)
	}
}

func mustKey(t *testing.T, zone string) zoneKey {
	t.Helper()
	key, err := newZoneKey(zone)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func listPins(t *testing.T, pinDir string) (names []string) {
	t.Helper()
	for _, dir := range []string{"maps", "links"} {
		entries, err := os.ReadDir(filepath.Join(pinDir, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			names = append(names, entry.Name())
		}
	}
	return names
}

// exchange puts another program into a link.
func exchange(t *testing.T, l link.Link) {
	t.Helper()
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := l.Update(other); err != nil {
		t.Fatal(err)
	}
}

// TestVerifyFilters: those of traffic control, too.
func TestVerifyFilters(t *testing.T) {
	pinDir := newNamespace(t)
	d := load(t, Options{PinDir: pinDir, TrafficControl: &filters{}, ForceTrafficControl: true})
	onLo := Attachment{FromHost, "lo", loIfindex, true}
	replaceAttachments(t, d, onLo)
	if wrong := d.Verify(); len(wrong) != 0 {
		t.Fatalf("before: %q", wrong)
	}
	if err := errors.Join(netdev.DetachFilter(filterOf(onLo)), netdev.RemoveClsact(loIfindex)); err != nil {
		t.Fatal(err)
	}
	if wrong := d.Verify(); len(wrong) != 1 || !strings.Contains(wrong[0], onLo.String()) || d.Intact() {
		t.Errorf("said %q", wrong)
	}
	if err := d.Heal(); err != nil || len(d.Verify()) != 0 {
		t.Errorf("after: %q, %v", d.Verify(), err)
	}
}

// TestStrangePins: whatever has the place of a dead daemon's pins, the next one loads.
func TestStrangePins(t *testing.T) {
	pinDir := newNamespace(t)
	d := load(t, Options{PinDir: pinDir, TrafficControl: &filters{}})
	maps := filepath.Join(pinDir, "maps")
	usurp(t, d.objects.DnsFromHost, filepath.Join(maps, "dns_zones"))
	usurp(t, d.objects.DnsStats, filepath.Join(maps, "dns_flows"))
	remove(t, filepath.Join(maps, "dns_config"))
	if err := os.Mkdir(filepath.Join(maps, "dns_config"), 0o700); err != nil {
		t.Fatal(err)
	}
	usurp(t, d.objects.DnsStats, filepath.Join(pinDir, "links", string(FromClient)+"-eth9-ingress"))
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	next := load(t, Options{PinDir: pinDir, TrafficControl: &filters{}})
	replaceAttachments(t, next, Attachment{FromHost, "lo", loIfindex, true})
	if wrong := next.Verify(); len(wrong) != 0 {
		t.Errorf("said %q", wrong)
	}
	if left := listPins(t, pinDir); slices.Contains(left, string(FromClient)+"-eth9-ingress") {
		t.Errorf("left: %q", left)
	}
}

// TestForeignPins: what others have pinned in our directory is neither listed nor detached nor removed, whatever its name.
func TestForeignPins(t *testing.T) {
	needTCX(t)
	pinDir := newNamespace(t)
	eth := addInterface(t, "eth0")
	other := addInterface(t, "eth1")
	d := inUse(t, pinDir, eth)
	foreign, err := link.AttachXDP(link.XDPOptions{Interface: other, Program: foreignXDP(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = foreign.Close() })
	pins := []string{"links/theirs", "links/" + string(IngressFilter) + "-eth1-xdp", "maps/theirs"}
	for _, pin := range pins[:2] {
		usurp(t, foreign.(interface{ FD() int }), filepath.Join(pinDir, pin))
	}
	usurp(t, d.objects.DnsZones, filepath.Join(pinDir, pins[2]))
	programs, err := PinnedPrograms(pinDir)
	if err != nil || slices.ContainsFunc(programs, func(p AttachedProgram) bool { return p.Name == "theirs" }) {
		t.Errorf("pinned: %v, %v", programs, err)
	}
	steer(t, d, eth)
	if err := errors.Join(d.Close(), Remove(pinDir)); err != nil {
		t.Error(err)
	}
	left := listPins(t, pinDir)
	slices.Sort(left)
	if want := []string{string(IngressFilter) + "-eth1-xdp", "theirs", "theirs"}; !slices.Equal(left, want) {
		t.Errorf("left are %q, want %q", left, want)
	}
	if id, err := netdev.XDPProgram(other); err != nil || id == 0 {
		t.Errorf("the other's program: %d, %v", id, err)
	}
	if got, err := Attached(netdev.XDPProgram); err != nil || len(got) != 0 {
		t.Errorf("of ours: %v, %v", got, err)
	}
}

// TestGhosts: programs whose pins are out of sight, under another BPF file system or none, are found, and taken over or away.
func TestGhosts(t *testing.T) {
	needTCX(t)
	pinDir := newNamespace(t)
	eth := addInterface(t, "eth0")
	dead := inUse(t, pinDir, eth)
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", filepath.Dir(pinDir), "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(filepath.Dir(pinDir), unix.MNT_DETACH) })
	attached := func() (names []string) {
		t.Helper()
		programs, err := Attached(netdev.XDPProgram)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range programs {
			names = append(names, p.Name+" "+p.Attach+" "+p.Interface)
		}
		slices.Sort(names)
		return names
	}
	all := []string{string(IngressFilter) + " xdp eth0", "dns_from_backend tcx/ingress eth0", "dns_from_host tcx/egress lo"}
	if got := attached(); !slices.Equal(got, all) {
		t.Fatalf("attached: %q", got)
	}
	heir := inUse(t, pinDir, eth)
	if got := attached(); !slices.Equal(got, all) {
		t.Errorf("after the next one: %q", got)
	}
	wantAttached(t, heir, loIfindex, true, FromHost)
	wantFilter(t, heir, "eth0", "native")
	remove(t, pinDir)
	programs, err := Attached(netdev.XDPProgram)
	if err := errors.Join(err, Detach(programs), Detach(programs)); err != nil {
		t.Error(err)
	}
	if got := attached(); len(got) != 0 {
		t.Errorf("after Detach: %q", got)
	}
}

// TestGhostOfFormerVersion: a program that had another name in an earlier version is found, and taken over or away.
func TestGhostOfFormerVersion(t *testing.T) {
	pinDir := newNamespace(t)
	eth := addInterface(t, "eth0")
	spec, err := loadDnsbpf()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	old := spec.Programs[string(IngressFilter)]
	old.Name = "dns_guard"
	btf.FuncMetadata(&old.Instructions[0]).Name = old.Name
	ghost := func(pin string) {
		t.Helper()
		ghosts, err := ebpf.NewCollection(spec.Copy())
		if err != nil {
			t.Fatal(err)
		}
		defer ghosts.Close()
		l, err := link.AttachXDP(link.XDPOptions{Program: ghosts.Programs[string(IngressFilter)], Interface: eth, Flags: link.XDPGenericMode})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := l.Pin(filepath.Join(filepath.Dir(pinDir), pin)); err != nil {
			t.Fatal(err)
		}
	}
	attached := func() int {
		t.Helper()
		programs, err := Attached(netdev.XDPProgram)
		if err != nil {
			t.Fatal(err)
		}
		return len(programs)
	}
	ghost("away")
	if got := attached(); got != 1 {
		t.Fatalf("%d programs attached, want the ghost", got)
	}
	programs, err := Attached(netdev.XDPProgram)
	if err := errors.Join(err, Detach(programs)); err != nil {
		t.Fatal(err)
	}
	if got := attached(); got != 0 {
		t.Fatalf("after Detach: %d programs attached", got)
	}
	ghost("heir")
	heir := load(t, Options{PinDir: pinDir})
	filter, err := heir.TryIngressFilter("eth0", eth)
	if err != nil {
		t.Fatal(err)
	}
	replaceAttachments(t, heir, filter)
	if got := attached(); got != 1 {
		t.Errorf("after the next one: %d programs attached", got)
	}
	running, err := netdev.XDPProgram(eth)
	if err != nil || !heir.Loaded(running) {
		t.Errorf("program %d runs, error %v: want the next one's", running, err)
	}
}

// TestMapsOfAnotherVersion: the programs of another version, whose maps have another layout, keep steering until ours take over their
// links.
func TestMapsOfAnotherVersion(t *testing.T) {
	needTCX(t)
	pinDir := newNamespace(t)
	eth := addInterface(t, "eth0")
	old := inUse(t, pinDir, eth)
	programs := func() (ids []uint32) {
		t.Helper()
		attached, err := Attached(netdev.XDPProgram)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range attached {
			ids = append(ids, p.KernelID)
		}
		return ids
	}
	before := programs()
	other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 20, ValueSize: 4, MaxEntries: 7})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	usurp(t, other, filepath.Join(pinDir, "maps", "dns_listeners"))
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	next := load(t, Options{PinDir: pinDir})
	if got := programs(); len(before) != 3 || !slices.Equal(got, before) {
		t.Errorf("attached are %v, were %v", got, before)
	}
	steer(t, next, eth)
	for _, id := range programs() {
		if !next.Loaded(id) {
			t.Errorf("program %d still runs", id)
		}
	}
	if wrong := next.Verify(); len(wrong) != 0 || len(programs()) != 3 {
		t.Errorf("said %q; attached %v", wrong, programs())
	}
}
