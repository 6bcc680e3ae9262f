package forwarder

import (
	"net"
	"net/netip"
	"slices"
)

// SetPermitted says who may ask at which listen address. A client outside the prefixes of the address that it asks gets no
// answer at all, so that this server amplifies nothing for a forged source. An address without an entry serves everyone.
// It is safe for concurrent use, before or after Listen.
func (s *Server) SetPermitted(permitted map[netip.Addr][]netip.Prefix) {
	s.permitted.Store(&permitted)
}

func (s *Server) permits(listen net.Addr, client netip.Addr) bool {
	permitted := s.permitted.Load()
	if permitted == nil {
		return true
	}
	address, ok := netip.AddrFromSlice(addrIP(listen))
	if !ok {
		return true
	}
	prefixes, restricted := (*permitted)[address.Unmap()]
	client = client.Unmap().WithZone("")
	return !restricted || slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(client) })
}

func addrIP(address net.Addr) net.IP {
	switch address := address.(type) {
	case *net.UDPAddr:
		return address.IP
	case *net.TCPAddr:
		return address.IP
	}
	return nil
}
