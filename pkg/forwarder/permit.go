package forwarder

import (
	"net"
	"net/netip"
)

// Permit lets the clients of a prefix ask.
type Permit struct {
	Prefix netip.Prefix
	// Interface is the index of the one that queries of these clients come in on, or 0 for any. It is looked at in queries by
	// UDP, whose source can be forged, and on Linux.
	Interface int
}

// loopbackInterface is the index of lo on Linux, by which this host's own queries come.
const loopbackInterface = 1

// SetPermitted says who may ask at which listen address; of two permits that a client falls under, the one with the longer
// prefix counts. Others get no answer at all, so that this server amplifies nothing for a forged source. An address without
// an entry serves everyone. It is safe for concurrent use, before or after Listen.
func (s *Server) SetPermitted(permitted map[netip.Addr][]Permit) {
	s.permitted.Store(&permitted)
}

// permits reports whether a client may ask at a listen address, with a query that came in on an interface; 0 is for one that
// is not known.
func (s *Server) permits(listen net.Addr, client netip.Addr, ifindex int) bool {
	permitted := s.permitted.Load()
	if permitted == nil {
		return true
	}
	address, ok := netip.AddrFromSlice(addrIP(listen))
	if !ok {
		return true
	}
	permits, restricted := (*permitted)[address.Unmap()]
	if !restricted {
		return true
	}
	client = client.Unmap().WithZone("")
	best := Permit{}
	for _, p := range permits {
		if p.Prefix.Contains(client) && (!best.Prefix.IsValid() || p.Prefix.Bits() > best.Prefix.Bits()) {
			best = p
		}
	}
	if !best.Prefix.IsValid() {
		return false
	}
	return best.Interface == 0 || ifindex == 0 || ifindex == loopbackInterface || ifindex == best.Interface
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
