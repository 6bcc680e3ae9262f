package forwarder

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"
)

// retryDelay keeps a socket that fails again and again from taking a whole CPU.
const retryDelay = 5 * time.Millisecond

// readBuffer is the size in octets that is asked for a listening socket's
// queue, to take a burst. The kernel may grant less.
const readBuffer = 4 << 20

// serveUDP reads queries from conn until it is closed or, at Shutdown, its
// read deadline has come. It closes conn when all its queries are answered.
func (s *Server) serveUDP(conn *net.UDPConn) {
	var queries sync.WaitGroup
	defer func() {
		queries.Wait()
		conn.Close()
	}()
	_ = conn.SetReadBuffer(readBuffer)
	buf := make([]byte, maxMessage)
	oob, err := tellInterface(conn)
	if err != nil {
		s.log.Warn("queries' interfaces are not known, sources are judged by their address alone", zap.Stringer("listen", conn.LocalAddr()), zap.Error(err))
	}
	for {
		n, told, _, from, err := conn.ReadMsgUDPAddrPort(buf, oob)
		switch {
		case err == nil && !s.permits(conn.LocalAddr(), from.Addr(), toldInterface(oob[:told])):
			s.counters.forbidden.Add(1)
		case err == nil:
			s.takeUDP(conn, &queries, buf[:n], from)
		case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
			return
		default:
			// On Windows a read reports that an earlier reply found its
			// client gone. No error of one packet ends the service.
			s.log.Debug("udp read failed", zap.Stringer("listen", conn.LocalAddr()), zap.Error(err))
			time.Sleep(retryDelay)
		}
	}
}

// takeUDP answers one datagram: from the cache at once, else in a goroutine of its own.
func (s *Server) takeUDP(conn *net.UDPConn, queries *sync.WaitGroup, packet []byte, from netip.AddrPort) {
	s.counters.udp.Add(1)
	if len(packet) > bufferSize {
		s.replyUDP(conn, s.refuse(packet, failTooLong(len(packet))), from)
		return
	}
	c := &clientQuery{raw: packet, from: from}
	if reply := s.fromCache(c); reply != nil {
		s.replyUDP(conn, reply, from)
		return
	}
	buf := getBuffer()
	c.raw = append((*buf)[:0], packet...)
	gone := make(chan struct{})
	c.gone = gone
	place := s.inFlight.take(from.Addr(), 1, func() { close(gone) })
	queries.Go(func() {
		defer s.inFlight.giveBack(place)
		defer putBuffer(buf)
		s.replyUDP(conn, s.handle(s.queryCtx, c), from)
	})
}

func (s *Server) replyUDP(conn *net.UDPConn, reply []byte, to netip.AddrPort) {
	if reply == nil {
		return
	}
	if _, err := conn.WriteToUDPAddrPort(reply, to); err != nil {
		s.log.Debug("udp reply failed", zap.Stringer("client", to), zap.Error(err))
	}
}
