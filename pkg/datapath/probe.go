//go:build linux

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// ErrOtherVersion is returned if what is attached was loaded by another version of this program.
var ErrOtherVersion = errors.New("attached by another version of k2s-dnsbpf")

// The reasons of a Verdict that its reader must know; reasons.h has the others.
const (
	ReasonNotIntercepted  = "" // the program does not look at packets to that address
	ReasonSteered         = "steered"
	ReasonSteeredFallback = "steered_fallback"
	ReasonCached          = "answered_cached"
)

// Verdict is what the kernel program decides about a query.
type Verdict struct {
	// Reason is the outcome by its name in reasons.h, ReasonNotIntercepted if there is none.
	Reason string
	// Server is where a steered query goes; the next one may go to another server of the same group.
	Server netip.AddrPort
}

// writtenMaps are the pinned ones that a program writes while it judges a query. A Prober has its own, so that its runs
// take no slot and no count of real queries.
var writtenMaps = map[string]bool{dnsbpfMapDnsFlows: true, dnsbpfMapDnsStats: true}

// Prober asks the program that is attached to lo about queries without sending them: it runs the same instructions
// over the same zones, endpoints, listeners and settings. It is not for several goroutines at once.
type Prober struct {
	collection *ebpf.Collection
}

// NewProber loads dns_from_host onto the maps that are pinned below pinDir. kernelID is the attached program's: one
// with other instructions is ErrOtherVersion. Needs the rights to load programs.
func NewProber(pinDir string, kernelID uint32) (_ *Prober, err error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("probe: lift the memlock limit: %w", err)
	}
	spec, err := loadDnsbpf()
	if err != nil {
		return nil, fmt.Errorf("probe: %w", err)
	}
	shared := make(map[string]*ebpf.Map)
	defer func() {
		for _, m := range shared {
			err = errors.Join(err, m.Close())
		}
	}()
	for name, m := range spec.Maps {
		if m.Pinning != ebpf.PinByName || writtenMaps[name] {
			m.Pinning = ebpf.PinNone
			continue
		}
		pin := filepath.Join(pinDir, "maps", name)
		if shared[name], err = ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true}); err != nil {
			delete(shared, name)
			return nil, fmt.Errorf("probe: open map %s: %w", name, err)
		}
	}
	if err := addAnswers(shared, kernelID); err != nil {
		return nil, fmt.Errorf("probe: %w", err)
	}
	for name := range spec.Programs {
		if Program(name) != FromHost {
			delete(spec.Programs, name)
		}
	}
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: shared})
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return nil, fmt.Errorf("probe: %w: %w", ErrOtherVersion, err)
	}
	if err != nil {
		return nil, fmt.Errorf("probe: %w", describeLoadError(err))
	}
	p := &Prober{collection: collection}
	if err := p.same(kernelID); err != nil {
		p.Close()
		return nil, fmt.Errorf("probe: %w", err)
	}
	return p, nil
}

// addAnswers adds the maps of answers that the attached program has. They are not pinned.
func addAnswers(shared map[string]*ebpf.Map, kernelID uint32) error {
	attached, err := ebpf.NewProgramFromID(ebpf.ProgramID(kernelID))
	if err != nil {
		return fmt.Errorf("open program %d: %w", kernelID, err)
	}
	defer attached.Close()
	info, err := attached.Info()
	if err != nil {
		return fmt.Errorf("read program %d: %w", kernelID, err)
	}
	ids, _ := info.MapIDs() // from 4.15 on
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return fmt.Errorf("open map %d: %w", id, err)
		}
		name, err := answersMap(m)
		if err != nil || name == "" {
			err = errors.Join(err, m.Close())
		} else {
			shared[name] = m
		}
		if err != nil {
			return fmt.Errorf("read map %d: %w", id, err)
		}
	}
	return nil
}

// answersMap returns the name of a map of answers, "" for another map. The kernel keeps 15 octets of it.
func answersMap(m *ebpf.Map) (string, error) {
	info, err := m.Info()
	if err != nil {
		return "", err
	}
	for _, name := range []string{dnsbpfMapDnsAnswersIndex, dnsbpfMapDnsAnswersSmall, dnsbpfMapDnsAnswersLarge} {
		if info.Name == name[:min(len(name), unix.BPF_OBJ_NAME_LEN-1)] {
			return name, nil
		}
	}
	return "", nil
}

// same compares the instructions by the kernel's hash of them, which leaves out where the maps are.
func (p *Prober) same(kernelID uint32) error {
	attached, err := ebpf.NewProgramFromID(ebpf.ProgramID(kernelID))
	if err != nil {
		return fmt.Errorf("open program %d: %w", kernelID, err)
	}
	defer attached.Close()
	theirs, err := attached.Info()
	if err != nil {
		return fmt.Errorf("read program %d: %w", kernelID, err)
	}
	ours, err := p.program().Info()
	if err != nil {
		return fmt.Errorf("read program: %w", err)
	}
	if theirs.Tag != ours.Tag {
		return fmt.Errorf("program %d: %w", kernelID, ErrOtherVersion)
	}
	return nil
}

func (p *Prober) program() *ebpf.Program { return p.collection.Programs[string(FromHost)] }

// Close unloads the program. What is attached is not touched.
func (p *Prober) Close() { p.collection.Close() }

// Query returns what becomes of a DNS message that a program of this host sends by UDP.
func (p *Prober) Query(from, to netip.AddrPort, message []byte) (Verdict, error) {
	before, err := p.counted()
	if err != nil {
		return Verdict{}, err
	}
	in := queryFrame(from, to, message)
	_, out, err := p.program().Test(in)
	if err != nil {
		return Verdict{}, fmt.Errorf("run %s: %w", FromHost, err)
	}
	after, err := p.counted()
	if err != nil {
		return Verdict{}, err
	}
	var verdict Verdict
	for reason, count := range after {
		if count != before[reason] {
			verdict.Reason = reason
		}
	}
	if verdict.Reason == ReasonSteered || verdict.Reason == ReasonSteeredFallback {
		verdict.Server = frameDestination(out)
	}
	return verdict, nil
}

func (p *Prober) counted() (map[string]uint64, error) {
	scopes, err := readCounters(p.collection.Maps[dnsbpfMapDnsStats])
	if err != nil {
		return nil, err
	}
	sum := make(map[string]uint64)
	for _, counters := range scopes {
		for reason, count := range counters.ByReason {
			sum[reason] += count
		}
	}
	return sum, nil
}

// Lengths of headers without options, and the offsets of destination addresses in them, in octets.
const (
	ethernetLength  = 14
	ipv4Length      = 20
	ipv6Length      = 40
	udpLength       = 8
	ipv4Destination = 16
	ipv6Destination = 24

	etherTypeIPv4 = 0x0800
	etherTypeIPv6 = 0x86dd
	protocolUDP   = 17
)

// queryFrame is a message as it leaves through lo: UDP in IP in Ethernet.
func queryFrame(from, to netip.AddrPort, message []byte) []byte {
	total := udpLength + len(message)
	frame := make([]byte, ethernetLength-2, ethernetLength+ipv6Length+total)
	if to.Addr().Is4() {
		frame = binary.BigEndian.AppendUint16(frame, etherTypeIPv4)
		frame = append(frame, 0x45, 0)
		frame = binary.BigEndian.AppendUint16(frame, uint16(ipv4Length+total))
		frame = append(frame, 0, 0, 0, 0, 64, protocolUDP, 0, 0)
	} else {
		frame = binary.BigEndian.AppendUint16(frame, etherTypeIPv6)
		frame = append(frame, 0x60, 0, 0, 0)
		frame = binary.BigEndian.AppendUint16(frame, uint16(total))
		frame = append(frame, protocolUDP, 64)
	}
	addresses := len(frame)
	frame = append(frame, from.Addr().AsSlice()...)
	frame = append(frame, to.Addr().AsSlice()...)
	sum := onesSum(frame[addresses:], uint32(protocolUDP+total))
	frame = binary.BigEndian.AppendUint16(frame, from.Port())
	frame = binary.BigEndian.AppendUint16(frame, to.Port())
	frame = binary.BigEndian.AppendUint16(frame, uint16(total))
	// As the stack leaves it to the device: the sum of the pseudo header (RFC 768).
	frame = binary.BigEndian.AppendUint16(frame, sum)
	return append(frame, message...)
}

// onesSum is the ones' complement sum (RFC 1071) of an even number of octets and of what it is begun with.
func onesSum(octets []byte, sum uint32) uint16 {
	for i := 0; i < len(octets); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(octets[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// frameDestination reads back where a frame of queryFrame goes after a program has rewritten it.
func frameDestination(frame []byte) netip.AddrPort {
	at, addressLength, header := ethernetLength+ipv4Destination, 4, ipv4Length
	if binary.BigEndian.Uint16(frame[ethernetLength-2:]) == etherTypeIPv6 {
		at, addressLength, header = ethernetLength+ipv6Destination, 16, ipv6Length
	}
	address, _ := netip.AddrFromSlice(frame[at : at+addressLength])
	return netip.AddrPortFrom(address, binary.BigEndian.Uint16(frame[ethernetLength+header+2:]))
}

// PinnedFlow returns the server that a query of this host was steered to last, by the slot that it took in dns_flows
// below pinDir: a slot keeps what it held until another query takes it. client is the socket that asked, id the DNS ID.
func PinnedFlow(pinDir string, client netip.AddrPort, id uint16) (server netip.AddrPort, found bool, err error) {
	flows, err := ebpf.LoadPinnedMap(filepath.Join(pinDir, "maps", dnsbpfMapDnsFlows), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return server, false, fmt.Errorf("open map dns_flows: %w", err)
	}
	defer flows.Close()
	keys, slots := make([]uint32, natPortsMax), make([]dnsbpfDnsFlow, natPortsMax)
	var cursor ebpf.MapBatchCursor
	n, err := flows.BatchLookup(&cursor, keys, slots, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // which says that there are no more
		return server, false, fmt.Errorf("read map dns_flows: %w", err)
	}
	address := client.Addr().As16()
	for _, slot := range slots[:n] {
		if slot.Id == id && slot.ClientPort == client.Port() && slot.Client == address {
			return slot.endpoint(), true, nil
		}
	}
	return server, false, nil
}
