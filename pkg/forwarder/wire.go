package forwarder

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// bufferSize holds every message that is expected by UDP: a reply to what we
// ask for has at most maxUDPSize octets. A larger one counts as truncated.
const bufferSize = 4096

var buffers = sync.Pool{New: func() any {
	b := make([]byte, bufferSize)
	return &b
}}

func getBuffer() *[]byte { return buffers.Get().(*[]byte) }

// putBuffer keeps no buffer that has grown for a long TCP message.
func putBuffer(b *[]byte) {
	if len(*b) == bufferSize {
		buffers.Put(b)
	}
}

// past is a deadline that makes a blocked call return at once.
var past = time.Unix(1, 0)

// errNoSocket is for a try beyond Options.MaxSockets.
var errNoSocket = errors.New("no socket left")

// openSocket counts a socket to a server. One that a query can't do without is
// always granted: Options.MaxInFlight bounds them.
func (s *Server) openSocket(needed bool) bool {
	if n := s.sockets.Add(1); n <= s.spareSockets || needed {
		return true
	}
	s.sockets.Add(-1)
	return false
}

func (s *Server) closeSocket() { s.sockets.Add(-1) }

// askTCP asks over a connection of its own and waits for so long.
func (s *Server) askTCP(ctx context.Context, u *upstream, out *outgoing, patience time.Duration, needed bool) (*response, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	res, err := s.converseTCP(ctx, u, out, needed)
	if err != nil {
		return nil, shorten(err)
	}
	return res, nil
}

func (s *Server) converseTCP(ctx context.Context, u *upstream, out *outgoing, needed bool) (*response, error) {
	if !s.openSocket(needed) {
		return nil, errNoSocket
	}
	defer s.closeSocket()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", u.tcp.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(past) })()
	if u.forbidden.Load() { // since the connection was begun, perhaps
		return nil, errForbidden
	}

	id := randomID()
	socket := conn.LocalAddr().(*net.TCPAddr).AddrPort()
	defer s.loops.back(s.loops.leaves(out.hash, socket, u.addr.Addr()))
	head := binary.BigEndian.AppendUint16(nil, uint16(len(out.msg)))
	query := net.Buffers{binary.BigEndian.AppendUint16(head, id), out.msg[2:]} // no copy of what may be long
	if _, err := query.WriteTo(conn); err != nil {
		return nil, err
	}
	buf := getBuffer()
	defer func() { putBuffer(buf) }()
	for {
		msg, err := readTCP(conn, buf)
		if err != nil {
			return nil, err
		}
		if out.accepts(msg, id) {
			return out.read(bytes.Clone(msg))
		}
	}
}

// readTCP reads one message behind its length prefix (RFC 7766 section 8) into
// buf, which grows if it has to.
func readTCP(r io.Reader, buf *[]byte) ([]byte, error) {
	if _, err := io.ReadFull(r, (*buf)[:2]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(*buf))
	if n > len(*buf) {
		*buf = make([]byte, n)
	}
	msg := (*buf)[:n]
	if _, err := io.ReadFull(r, msg); err != nil {
		return nil, err
	}
	return msg, nil
}
