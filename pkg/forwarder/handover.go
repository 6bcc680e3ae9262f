package forwarder

import (
	"context"
	"net"
	"net/netip"
)

// Sockets are the two of one address.
type Sockets struct {
	UDP *net.UDPConn
	TCP *net.TCPListener
}

func (s Sockets) addr() netip.AddrPort {
	return unmap(s.TCP.Addr().(*net.TCPAddr).AddrPort())
}

func (s Sockets) close() {
	s.UDP.Close()
	s.TCP.Close()
}

// Sockets returns what the server listens on, in the order of Options.Listen.
// They stay the server's own. Duplicates of them can be adopted by another
// server, which may be in another process: while both serve them, each query
// is answered by one of the two.
func (s *Server) Sockets() []Sockets {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Sockets, len(s.udp))
	for i := range all {
		all[i] = Sockets{UDP: s.udp[i], TCP: s.tcp[i]}
	}
	return all
}

// Adopt gives open sockets to the server, which closes them in the end. Listen
// serves them in place of binding to their addresses.
func (s *Server) Adopt(sockets []Sockets) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, adopted := range sockets {
		s.adopted[adopted.addr()] = adopted
	}
}

// open returns the adopted sockets of an address, or binds to it. It is called
// with mu held.
func (s *Server) open(ctx context.Context, addr netip.AddrPort) (Sockets, error) {
	if adopted, ok := s.adopted[addr]; ok {
		delete(s.adopted, addr)
		return adopted, nil
	}
	return listenBoth(ctx, addr)
}

// Retire leaves the sockets to the server that has adopted duplicates of them,
// and loses nothing: what has been read is answered, and open connections are
// served until their clients close them or leave them idle. It returns then, or
// when ctx ends. What is left to do is Shutdown.
func (s *Server) Retire(ctx context.Context) {
	s.mu.Lock()
	for _, l := range s.tcp {
		l.Close()
	}
	for _, conn := range s.udp {
		_ = conn.SetReadDeadline(past)
	}
	s.mu.Unlock()
	s.cancelSpares()
	s.watchDrained()
	select {
	case <-s.drained:
	case <-ctx.Done():
	}
}
