package forwarder

import (
	"bufio"
	"encoding/binary"
	"errors"
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
		case err == nil && !s.permits(conn.LocalAddr(), conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()):
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

// takeTCP serves one connection in a goroutine of its own, if there may be one
// more.
func (s *Server) takeTCP(conn *net.TCPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.conns) >= s.opts.MaxConns {
		s.counters.connsRefused.Add(1)
		conn.Close()
		return
	}
	s.conns[conn] = struct{}{}
	s.wg.Go(func() {
		c := &clientConn{s: s, conn: conn, from: conn.RemoteAddr().(*net.TCPAddr).AddrPort()}
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
		buf := getBuffer()
		query, err := readTCP(r, buf)
		if err != nil {
			putBuffer(buf)
			return
		}
		c.s.counters.tcp.Add(1)
		pipeline <- struct{}{}
		if !c.s.acquire() {
			c.reply(c.s.overload(query))
			putBuffer(buf)
			<-pipeline
			continue
		}
		c.queries.Go(func() {
			defer func() { <-pipeline }()
			defer c.s.release()
			defer putBuffer(buf)
			c.reply(c.s.handle(c.s.queryCtx, query, c.from, true))
		})
	}
}

func (c *clientConn) reply(msg []byte) {
	if msg == nil {
		return
	}
	framed := make([]byte, 0, 2+len(msg))
	framed = append(binary.BigEndian.AppendUint16(framed, uint16(len(msg))), msg...)
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	_ = c.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := c.conn.Write(framed); err != nil {
		// Half a reply may be out: the stream is of no use any more.
		c.s.log.Debug("tcp reply failed", zap.Stringer("client", c.from), zap.Error(err))
		c.conn.Close()
	}
}
