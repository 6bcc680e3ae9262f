//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Scope says where a query entered. Counters are kept by it.
type Scope uint32

// The scopes, in the order of enum dns_scope.
const (
	ScopeHost        = Scope(dnsbpfDnsScopeDNS_SCOPE_HOST)
	ScopeKubeSwitch  = Scope(dnsbpfDnsScopeDNS_SCOPE_KUBESWITCH)
	ScopePod         = Scope(dnsbpfDnsScopeDNS_SCOPE_POD)
	ScopeTransparent = Scope(dnsbpfDnsScopeDNS_SCOPE_TRANSPARENT)
	ScopeShared      = Scope(dnsbpfDnsScopeDNS_SCOPE_SHARED)
	scopeMax         = Scope(dnsbpfDnsScopeDNS_SCOPE_MAX)
)

// String returns the name that status and logs use.
func (s Scope) String() string {
	names := [scopeMax]string{"host", "kubeswitch", "pod", "transparent", "shared"}
	if s < scopeMax {
		return names[s]
	}
	return fmt.Sprintf("scope(%d)", uint32(s))
}

// Listener is an address that queries are intercepted for. The kernel looks at port 53 only.
type Listener struct {
	Address netip.AddrPort
	Scope   Scope
}

func listenerKey(address netip.AddrPort) dnsbpfDnsListenerKey {
	return dnsbpfDnsListenerKey{Addr: address.Addr().As16(), Port: address.Port()}
}

// ReplaceListeners makes the given addresses the intercepted ones. New ones are added before old ones go.
func (d *Datapath) ReplaceListeners(listeners []Listener) (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	if d.written.listeners != nil && slices.Equal(d.written.listeners, listeners) {
		return nil
	}
	d.written.listeners = nil
	defer func() {
		err = errors.Join(err, remember[dnsbpfDnsListenerKey, dnsbpfDnsListener](d, d.objects.DnsListeners))
	}()
	keep := make(map[dnsbpfDnsListenerKey]bool, len(listeners))
	for _, listener := range listeners {
		key := listenerKey(listener.Address)
		keep[key] = true
		value := dnsbpfDnsListener{Scope: dnsbpfDnsScope(listener.Scope)}
		if err := d.objects.DnsListeners.Put(key, value); err != nil {
			return fmt.Errorf("write listener %s to map dns_listeners: %w", listener.Address, err)
		}
	}
	if err := deleteUnless(d.objects.DnsListeners, func(key dnsbpfDnsListenerKey) bool { return keep[key] }); err != nil {
		return err
	}
	d.written.listeners = slices.Clone(listeners)
	return nil
}
