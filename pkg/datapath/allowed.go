//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
)

// prefixKey is the key of a prefix in dns_allowed.
func prefixKey(prefix netip.Prefix) dnsbpfDnsPrefix {
	prefix = prefix.Masked()
	bits := uint32(prefix.Bits())
	if prefix.Addr().Is4() {
		bits += 96
	}
	return dnsbpfDnsPrefix{Length: bits, Addr: prefix.Addr().As16()}
}

// ReplaceAllowed makes the given prefixes the ones that the guard lets ask. New ones are added before old ones go.
func (d *Datapath) ReplaceAllowed(prefixes []netip.Prefix) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	keep := make(map[dnsbpfDnsPrefix]bool, len(prefixes))
	for _, prefix := range prefixes {
		key := prefixKey(prefix)
		keep[key] = true
		if err := d.objects.DnsAllowed.Put(key, uint32(1)); err != nil {
			return fmt.Errorf("write %s to map dns_allowed: %w", prefix, err)
		}
	}
	return deleteUnless(d.objects.DnsAllowed, func(key dnsbpfDnsPrefix) bool { return keep[key] })
}

// AddReplyVia says for which interfaces replies leave through another one, by index: for a bridge's port the bridge.
func (d *Datapath) AddReplyVia(via map[uint32]uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	for ifindex, out := range via {
		if err := d.objects.DnsReplyVia.Put(ifindex, out); err != nil {
			return fmt.Errorf("write interface %d to map dns_reply_via: %w", ifindex, err)
		}
	}
	return nil
}

// ReplaceReplyVia is AddReplyVia and forgets all others.
func (d *Datapath) ReplaceReplyVia(via map[uint32]uint32) error {
	if err := d.AddReplyVia(via); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return deleteUnless(d.objects.DnsReplyVia, func(ifindex uint32) bool { _, keep := via[ifindex]; return keep })
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
