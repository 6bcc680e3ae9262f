//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
)

// AnyInterface stands for the index of each interface: DNS_ANY_INTERFACE.
const AnyInterface = 0xffffffff

// Source is where queries come from. Of two that an address is in, the one with the longer prefix counts.
type Source struct {
	Prefix netip.Prefix
	// Ifindex is the interface that packets from there come in on, or AnyInterface; 0 is for addresses that nobody else
	// may have.
	Ifindex uint32
	// Allowed sources may ask at the KubeSwitch address.
	Allowed bool
}

func (s Source) entry() (key dnsbpfDnsPrefix, value dnsbpfDnsSource) {
	prefix := s.Prefix.Masked()
	key = dnsbpfDnsPrefix{Length: uint32(prefix.Bits()), Addr: prefix.Addr().As16()}
	if prefix.Addr().Is4() {
		key.Length += 96
	}
	value.Ifindex = s.Ifindex
	if s.Allowed {
		value.Allowed = 1
	}
	return key, value
}

// ReplaceSources makes the given sources the known ones, each prefix once. From others nobody may ask at the KubeSwitch
// address, and everybody at those that pods ask. New ones are added before old ones go, narrow ones before wide ones.
func (d *Datapath) ReplaceSources(sources []Source) (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	if d.written.sources != nil && slices.Equal(d.written.sources, sources) {
		return nil
	}
	given := slices.Clone(sources)
	d.written.sources = nil
	defer func() { err = errors.Join(err, remember[dnsbpfDnsPrefix, dnsbpfDnsSource](d, d.objects.DnsSources)) }()
	sources = slices.Clone(sources)
	slices.SortFunc(sources, func(a, b Source) int { return b.Prefix.Bits() - a.Prefix.Bits() })
	keep := make(map[dnsbpfDnsPrefix]bool, len(sources))
	for _, source := range sources {
		key, value := source.entry()
		keep[key] = true
		if err := d.objects.DnsSources.Put(key, value); err != nil {
			return fmt.Errorf("write %s to map dns_sources: %w", source.Prefix, err)
		}
	}
	if err := deleteUnless(d.objects.DnsSources, func(key dnsbpfDnsPrefix) bool { return keep[key] }); err != nil {
		return err
	}
	d.written.sources = given
	return nil
}

// AddReplyVia says for which interfaces replies leave through another one, by index: for a bridge's port the bridge.
func (d *Datapath) AddReplyVia(via map[uint32]uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.addReplyVia(via), remember[uint32, uint32](d, d.objects.DnsReplyVia))
}

func (d *Datapath) addReplyVia(via map[uint32]uint32) error {
	for ifindex, out := range via {
		if err := d.objects.DnsReplyVia.Put(ifindex, out); err != nil {
			return fmt.Errorf("write interface %d to map dns_reply_via: %w", ifindex, err)
		}
	}
	return nil
}

// ReplaceReplyVia is AddReplyVia and forgets all others.
func (d *Datapath) ReplaceReplyVia(via map[uint32]uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.addReplyVia(via)
	if err == nil {
		err = deleteUnless(d.objects.DnsReplyVia, func(ifindex uint32) bool { _, keep := via[ifindex]; return keep })
	}
	return errors.Join(err, remember[uint32, uint32](d, d.objects.DnsReplyVia))
}

// deleteUnless removes the elements that keep does not want. Keys are collected first: a hash that is changed while
// it is walked may be walked twice.
func deleteUnless[K any](m *ebpf.Map, keep func(K) bool) error {
	var (
		key   K
		value []byte
		stale []K
	)
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		if !keep(key) {
			stale = append(stale, key)
		}
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("walk map %s: %w", m, err)
	}
	for _, key := range stale {
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete from map %s: %w", m, err)
		}
	}
	return nil
}
