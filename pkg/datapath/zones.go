//go:build linux

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
)

// ErrBadZone is wrapped by errors about a zone name that the kernel programs can't match.
var ErrBadZone = errors.New("not a usable zone name")

const (
	nameMax       = 255    // octets of a name on the wire, RFC 1035 section 3.1
	labelMax      = 63     // octets of a label, RFC 1035 section 2.3.4
	zoneShapesMax = 32     // DNS_ZONE_SHAPES_MAX
	zoneFallback  = 1      // DNS_ZONE_FALLBACK
	backendV6     = 0x8000 // DNS_BACKEND_V6
)

// Backend is an endpoint that queries are steered to.
type Backend struct {
	// Address is the endpoint's.
	Address netip.AddrPort
	// NATAddress is the source that it sees: an address of this host, of the same family.
	NATAddress netip.Addr
	// Ifindex is the interface towards it.
	Ifindex uint32
}

// zoneKey is one zone in the form that the kernel compares.
type zoneKey struct {
	dotted [256]int8 // lower-case, a dot before each label, NUL-padded
	wire   [256]byte // the same with each label's length for the dot (RFC 1035 section 3.1)
	length uint32    // octets of either, with one final NUL
	labels uint32    // without the root
}

// newZoneKey converts a zone name, with or without its final dot.
func newZoneKey(zone string) (zoneKey, error) {
	var key zoneKey
	name := strings.TrimSuffix(zone, ".")
	var dotted, wire string
	if name != "" {
		for label := range strings.SplitSeq(name, ".") {
			if label == "" || len(label) > labelMax {
				return key, fmt.Errorf("zone %q: %w: a label has 1 to %d octets", zone, ErrBadZone, labelMax)
			}
			for _, octet := range []byte(label) {
				if octet <= ' ' || octet > '~' || octet == '\\' {
					return key, fmt.Errorf("zone %q: %w: write it in printable ASCII, without escapes", zone, ErrBadZone)
				}
			}
			dotted += "." + strings.ToLower(label)
			wire += string(rune(len(label))) + strings.ToLower(label)
			key.labels++
		}
	}
	if len(dotted)+1 > nameMax {
		return key, fmt.Errorf("zone %q: %w: it is longer than %d octets", zone, ErrBadZone, nameMax)
	}
	for i := range len(dotted) {
		key.dotted[i] = int8(dotted[i])
	}
	copy(key.wire[:], wire)
	key.length = uint32(len(dotted) + 1)
	return key, nil
}

// hash is hash_name() of dns.h, seeded by the length.
func (k zoneKey) hash() uint64 {
	hash := uint64(k.length)
	for offset := uint32(0); offset < k.length; offset += 8 {
		hash = hashWord(hash, binary.LittleEndian.Uint64(k.wire[offset:]))
	}
	return hash
}

// hashWord is hash_word() of dns.h.
func hashWord(hash, word uint64) uint64 {
	hash = (hash ^ word) * 0x9e3779b97f4a7c15
	return hash ^ hash>>32
}

// ReplaceZones makes the given zones the steered ones, and backends the endpoints of all of them. Each zone switches
// in one step from its old group of endpoints to the new one. A zone without a backend of the query's address family
// is passed to the stack. Names outside the zones are steered to fallback, if there is any, while the daemon is dead.
// Each of trials is a zone that has one endpoint for itself, so that the way to it can be tried.
func (d *Datapath) ReplaceZones(zones []string, backends, fallback []Backend, trials map[string]Backend) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	now := steered{slices.Clone(zones), slices.Clone(backends), slices.Clone(fallback), maps.Clone(trials)}
	if d.written.steered != nil && d.written.steered.equal(now) {
		return nil
	}
	d.written.steered = nil
	err := d.replaceZones(now)
	if err == nil {
		d.written.steered = &now
	}
	return errors.Join(err, remember[uint64, dnsbpfDnsZone](d, d.objects.DnsZones), remember[dnsbpfDnsBackendKey, dnsbpfDnsBackend](d, d.objects.DnsBackends))
}

func (d *Datapath) replaceZones(now steered) error {
	tried := slices.Sorted(maps.Keys(now.trials))
	keys, shapes, err := zoneKeys(slices.Concat(now.zones, tried))
	if err != nil {
		return err
	}
	cluster, rescue := d.group+1, d.group+2
	d.group = rescue + uint32(len(tried))
	write := func(zones []string, group uint32, backends []Backend, flags uint16) error {
		switched, _, err := zoneKeys(zones)
		if err == nil {
			err = d.writeZones(switched, group, backends, flags)
		}
		if err != nil {
			return errors.Join(err, d.dropUnusedGroups())
		}
		maps.Copy(keys, switched)
		return nil
	}
	if err := write(now.zones, cluster, now.backends, 0); err != nil {
		return err
	}
	for i, zone := range tried {
		if err := write([]string{zone}, rescue+1+uint32(i), []Backend{now.trials[zone]}, 0); err != nil {
			return err
		}
	}
	root := zoneKey{length: 1}
	if _, steered := keys[root.hash()]; len(now.fallback) > 0 && !steered {
		if err := write([]string{""}, rescue, now.fallback, zoneFallback); err != nil {
			return err
		}
	}
	config, err := d.readConfig()
	if err != nil {
		return err
	}
	config.ZoneShapesCount = uint16(copy(config.ZoneShapes[:], shapes))
	if err := d.writeConfig(config); err != nil {
		return err
	}
	err = deleteUnless(d.objects.DnsZones, func(hash uint64) bool { _, keep := keys[hash]; return keep })
	if err != nil {
		return err
	}
	return d.dropUnusedGroups()
}

// written is what the maps were written from last; nil where that failed, or was never done. The same again is not written.
type written struct {
	listeners []Listener
	sources   []Source
	steered   *steered
}

// steered are the arguments of ReplaceZones.
type steered struct {
	zones              []string
	backends, fallback []Backend
	trials             map[string]Backend
}

func (s steered) equal(o steered) bool {
	return slices.Equal(s.zones, o.zones) && slices.Equal(s.backends, o.backends) && slices.Equal(s.fallback, o.fallback) &&
		maps.Equal(s.trials, o.trials)
}

// writeZones writes a new group and has the zones switch to it.
func (d *Datapath) writeZones(keys map[uint64]zoneKey, group uint32, backends []Backend, flags uint16) error {
	counts, err := d.writeGroup(group, backends)
	if err != nil {
		return err
	}
	for hash, key := range keys {
		value := dnsbpfDnsZone{
			Group: group, Backends4: counts.v4, Backends6: counts.v6,
			Length: key.length, Labels: uint16(key.labels), Flags: flags, Name: key.dotted,
		}
		if err := d.objects.DnsZones.Put(hash, value); err != nil {
			return fmt.Errorf("write map dns_zones: %w", err)
		}
	}
	return nil
}

// zoneKeys returns the zones by their key in dns_zones, and their shapes, longest first: the longest zone wins.
func zoneKeys(zones []string) (map[uint64]zoneKey, []dnsbpfDnsZoneShape, error) {
	keys := make(map[uint64]zoneKey, len(zones))
	var shapes []dnsbpfDnsZoneShape
	for _, zone := range zones {
		key, err := newZoneKey(zone)
		if err != nil {
			return nil, nil, err
		}
		hash := key.hash()
		if other, ok := keys[hash]; ok && other != key {
			return nil, nil, fmt.Errorf("zone %q: %w: its hash is that of another zone", zone, ErrBadZone)
		}
		keys[hash] = key
		if shape := key.shape(); !slices.Contains(shapes, shape) {
			shapes = append(shapes, shape)
		}
	}
	if len(shapes) > zoneShapesMax {
		return nil, nil, fmt.Errorf("zones are of %d different lengths and label counts: %w: at most %d",
			len(shapes), ErrBadZone, zoneShapesMax)
	}
	slices.SortFunc(shapes, func(a, b dnsbpfDnsZoneShape) int { return int(b.Length) - int(a.Length) })
	return keys, shapes, nil
}

func (k zoneKey) shape() dnsbpfDnsZoneShape {
	return dnsbpfDnsZoneShape{Length: uint8(k.length), Labels: uint8(k.labels)}
}

type backendCounts struct{ v4, v6 uint16 }

func (d *Datapath) writeGroup(group uint32, backends []Backend) (counts backendCounts, err error) {
	for _, backend := range backends {
		address := backend.Address.Addr().Unmap()
		if address.Is4() != backend.NATAddress.Unmap().Is4() {
			return counts, fmt.Errorf("endpoint %s: NAT address %s is of another family", backend.Address, backend.NATAddress)
		}
		key := dnsbpfDnsBackendKey{Group: group}
		if address.Is4() {
			key.Index = uint32(counts.v4)
			counts.v4++
		} else {
			key.Index = backendV6 | uint32(counts.v6)
			counts.v6++
		}
		value := dnsbpfDnsBackend{
			Addr:       address.As16(),
			NatAddr:    backend.NATAddress.As16(),
			OutIfindex: backend.Ifindex,
			Port:       backend.Address.Port(),
		}
		if err := d.objects.DnsBackends.Put(key, value); err != nil {
			return counts, fmt.Errorf("write endpoint %s to map dns_backends: %w", backend.Address, err)
		}
	}
	return counts, nil
}

// dropUnusedGroups removes the groups that no zone points to.
func (d *Datapath) dropUnusedGroups() error {
	var (
		hash uint64
		zone dnsbpfDnsZone
	)
	used := make(map[uint32]bool)
	entries := d.objects.DnsZones.Iterate()
	for entries.Next(&hash, &zone) {
		used[zone.Group] = true
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("walk map dns_zones: %w", err)
	}
	return deleteUnless(d.objects.DnsBackends, func(key dnsbpfDnsBackendKey) bool { return used[key.Group] })
}

func newestGroup(backends *ebpf.Map) (newest uint32, err error) {
	var (
		key   dnsbpfDnsBackendKey
		value dnsbpfDnsBackend
	)
	entries := backends.Iterate()
	for entries.Next(&key, &value) {
		newest = max(newest, key.Group)
	}
	if err := entries.Err(); err != nil {
		return 0, fmt.Errorf("walk map dns_backends: %w", err)
	}
	return newest, nil
}
