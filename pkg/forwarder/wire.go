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

// converse sends a query by UDP, again where a stub resolver would, and waits
// for the reply. Each query has a socket of its own: the kernel draws an
// ephemeral source port for it, a connected socket takes replies from the
// server only, and a port that nobody listens on is reported at once.
func (r *race) converse(ctx context.Context, u *upstream, out *outgoing, sent time.Time, needed bool) (*response, error) {
	if !r.s.openSocket(needed && !r.over.Load()) {
		return nil, errNoSocket
	}
	defer r.s.closeSocket()
	conn, err := net.DialUDP("udp", nil, u.udpAddr)
	if err != nil {
		return nil, shorten(err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(past) })()

	id := randomID()
	socket := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	defer r.s.loops.back(r.s.loops.leaves(out.hash, socket, u.addr.Addr()))
	buf := getBuffer()
	defer putBuffer(buf)
	send := func() error {
		query := append((*buf)[:0], out.msg...)
		setMessageID(query, id)
		_, err := conn.Write(query)
		return err
	}
	if err := send(); err != nil {
		return nil, shorten(err)
	}
	var (
		resend = sent.Add(r.pace.resend)
		judge  = sent.Add(r.pace.timeout)
		end    = sent.Add(r.pace.whole)
		judged bool
		marked string // a name that shows a loop if it comes here
	)
	defer func() { r.s.loops.unmark(marked) }()
	for {
		wake := end
		for _, t := range []time.Time{resend, judge} {
			if t.Before(wake) {
				wake = t
			}
		}
		_ = conn.SetReadDeadline(wake)
		if err := ctx.Err(); err != nil { // or its deadline was overwritten
			return nil, err
		}
		n, err := conn.Read(*buf)
		if err == nil {
			msg := (*buf)[:n]
			if !out.accepts(msg, id) {
				continue // forged or late: the right one may still come
			}
			if n == len(*buf) {
				setFlags(msg, flags(msg)|flagTC)
			}
			return out.read(bytes.Clone(msg))
		}
		if err = shorten(err); !errors.Is(err, errTimeout) || ctx.Err() != nil {
			return nil, err
		}
		if r.s.loops.isLoop(marked) {
			return nil, errLoop
		}
		now := time.Now()
		if !judged && !now.Before(judge) {
			judged, judge = true, end
			r.s.strike(u, sent, errTimeout)
		}
		switch {
		case !now.Before(end), judged && r.over.Load():
			return nil, errTimeout
		case !now.Before(resend):
			resend = now.Add(2 * r.pace.resend) // no rarer in the end: a client's own tries join this one
			if r.over.Load() {
				continue
			}
			if marked == "" {
				name, query := r.s.loops.mark(out.hash)
				if query != nil {
					marked, resend = name, now.Add(r.pace.resend/5) // look soon
					if _, err := conn.Write(query); err != nil {
						return nil, shorten(err)
					}
				}
			}
			r.s.counters.retries.Add(1)
			if err := send(); err != nil {
				return nil, shorten(err)
			}
		}
	}
}

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
