package forwarder

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"
)

const (
	// idleTimeout bounds the wait for a client's next query, and for the rest
	// of one that has begun: "a few seconds", RFC 7766 section 6.2.3.
	idleTimeout = 10 * time.Second

	// writeTimeout bounds the writing of one reply to a client.
	writeTimeout = 5 * time.Second

	// maxPipelined bounds the queries of one connection that are answered at
	// a time. Further ones are left in the socket: TCP slows the client down.
	maxPipelined = 64
)

// serveTCP accepts connections until l is closed or, at Shutdown, its deadline
// has come.
func (s *Server) serveTCP(l *net.TCPListener) {
	for {
		conn, err := l.AcceptTCP()
		switch {
		case err == nil && !s.permits(conn.LocalAddr(), conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(), 0):
			s.counters.forbidden.Add(1)
			conn.Close()
		case err == nil:
			s.takeTCP(conn)
		case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
			return
		default: // out of file descriptors, or the client has gone
			s.log.Debug("tcp accept failed", zap.Stringer("listen", l.Addr()), zap.Error(err))
			time.Sleep(retryDelay)
		}
	}
}

// takeTCP serves one connection in a goroutine of its own.
func (s *Server) takeTCP(conn *net.TCPConn) {
	from := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	place := s.connPlaces.take(from.Addr(), 1, func() {
		s.counters.connsClosed.Add(1)
		conn.Close()
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns[conn] = struct{}{}
	s.wg.Go(func() {
		defer s.connPlaces.giveBack(place)
		c := &clientConn{s: s, conn: conn, from: from, place: place}
		c.serve()
		s.mu.Lock()
		delete(s.conns, conn)
		s.mu.Unlock()
		conn.Close()
	})
}

// clientConn is a client's TCP connection. Queries on it are answered
// concurrently, each as soon as its answer is there (RFC 7766 section 7).
type clientConn struct {
	s    *Server
	conn *net.TCPConn
	from netip.AddrPort

	place   *place
	writeMu sync.Mutex
	queries sync.WaitGroup
}

// serve returns when the client has closed its side or is idle, and all its
// queries are answered.
func (c *clientConn) serve() {
	defer c.queries.Wait()
	r := bufio.NewReader(c.conn)
	pipeline := make(chan struct{}, maxPipelined)
	for {
		_ = c.conn.SetReadDeadline(time.Now().Add(idleTimeout))
		if c.s.closing.Load() { // Shutdown's deadline may have been overwritten
			_ = c.conn.SetReadDeadline(c.s.drainEnd)
		}
		query, done, err := c.read(r)
		if err != nil {
			return
		}
		c.s.counters.tcp.Add(1)
		c.s.connPlaces.renew(c.place)
		pipeline <- struct{}{}
		gone := make(chan struct{})
		place := c.s.inFlight.take(c.from.Addr(), 1, func() { close(gone) })
		c.queries.Go(func() {
			defer func() { <-pipeline }()
			defer c.s.inFlight.giveBack(place)
			defer done()
			c.reply(c.s.handle(c.s.queryCtx, &clientQuery{raw: query, from: c.from, tcp: true, gone: gone}))
		})
	}
}

// read reads one message. It is kept until done is called.
func (c *clientConn) read(r io.Reader) (msg []byte, done func(), err error) {
	var prefix [2]byte
	if _, err := io.ReadFull(r, prefix[:]); err != nil {
		return nil, nil, err
	}
	n := int(binary.BigEndian.Uint16(prefix[:]))
	if n <= bufferSize {
		buf := getBuffer()
		msg, done = (*buf)[:n], func() { putBuffer(buf) }
	} else {
		place := c.s.octets.take(c.from.Addr(), n, func() { c.conn.Close() })
		msg, done = make([]byte, n), func() { c.s.octets.giveBack(place) }
	}
	if _, err := io.ReadFull(r, msg); err != nil {
		done()
		return nil, nil, err
	}
	return msg, done, nil
}

func (c *clientConn) reply(msg []byte) {
	if msg == nil {
		return
	}
	if len(msg) > bufferSize { // it waits for its turn, and for a client that may not read
		place := c.s.octets.take(c.from.Addr(), len(msg), func() { c.conn.Close() })
		defer c.s.octets.giveBack(place)
	}
	framed := net.Buffers{binary.BigEndian.AppendUint16(nil, uint16(len(msg))), msg}
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	_ = c.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := framed.WriteTo(c.conn); err != nil {
		// Half a reply may be out: the stream is of no use any more.
		c.s.log.Debug("tcp reply failed", zap.Stringer("client", c.from), zap.Error(err))
		c.conn.Close()
	}
}
