package forwarder

import (
	"context"
	"encoding/binary"
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

// bindDeadline makes calls on conn end with ctx. The caller calls stop when
// it is done with conn.
func bindDeadline(ctx context.Context, conn net.Conn) (stop func() bool) {
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline) // fails on a closed conn only, and so will the next call
	}
	return context.AfterFunc(ctx, func() { _ = conn.SetDeadline(past) })
}

// askUDP sends one datagram and waits for the reply until ctx ends. Each query
// has a socket of its own: the kernel draws an ephemeral source port for it, a
// connected socket takes replies from the server only, and a port that nobody
// listens on is reported at once.
func (s *Server) askUDP(ctx context.Context, u *upstream, out *outgoing) (*response, error) {
	conn, err := net.DialUDP("udp", nil, u.udpAddr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer bindDeadline(ctx, conn)()

	id := randomID()
	socket := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	defer s.loops.back(s.loops.leaves(out.hash, socket, u.addr.Addr()))
	buf := getBuffer()
	query := append((*buf)[:0], out.msg...)
	setMessageID(query, id)
	if _, err := conn.Write(query); err != nil {
		putBuffer(buf)
		return nil, err
	}
	for {
		n, err := conn.Read(*buf)
		if err != nil {
			putBuffer(buf)
			return nil, err
		}
		msg := (*buf)[:n]
		if !out.accepts(msg, id) {
			continue // forged or late: the right one may still come
		}
		if n == len(*buf) {
			setFlags(msg, flags(msg)|flagTC)
		}
		res, err := out.read(msg, buf)
		if err != nil {
			putBuffer(buf)
		}
		return res, err
	}
}

// askTCP asks over a connection of its own and waits until ctx ends.
func (s *Server) askTCP(ctx context.Context, u *upstream, out *outgoing) (*response, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", u.tcp.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer bindDeadline(ctx, conn)()

	id := randomID()
	socket := conn.LocalAddr().(*net.TCPAddr).AddrPort()
	defer s.loops.back(s.loops.leaves(out.hash, socket, u.addr.Addr()))
	query := make([]byte, 0, 2+len(out.msg))
	query = append(binary.BigEndian.AppendUint16(query, uint16(len(out.msg))), out.msg...)
	setMessageID(query[2:], id)
	if _, err := conn.Write(query); err != nil {
		return nil, err
	}
	buf := getBuffer()
	for {
		msg, err := readTCP(conn, buf)
		if err != nil {
			putBuffer(buf)
			return nil, err
		}
		if !out.accepts(msg, id) {
			continue
		}
		res, err := out.read(msg, buf)
		if err != nil {
			putBuffer(buf)
		}
		return res, err
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
