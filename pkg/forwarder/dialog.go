package forwarder

import (
	"bytes"
	"context"
	"errors"
	"net"
	"syscall"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/errno"
)

// dialog is a query to one server by UDP. Each has a socket of its own: the
// kernel draws an ephemeral source port for it, a connected socket takes replies
// from the server only, and a port that nobody listens on is reported at once.
// It is not safe for concurrent use.
type dialog struct {
	r    *race
	u    *upstream
	out  *outgoing
	conn *net.UDPConn
	id   uint16
	sent time.Time
	keys [3]loopKey // for the loop guard
}

// dial opens a dialog and sends the query. The caller closes it.
func (r *race) dial(u *upstream, out *outgoing, needed bool) (*dialog, error) {
	if !r.s.openSocket(needed && !r.over.Load()) {
		return nil, errNoSocket
	}
	conn, err := net.DialUDP("udp", nil, u.udpAddr)
	if err != nil {
		r.s.closeSocket()
		return nil, shorten(err)
	}
	d := &dialog{r: r, u: u, out: out, conn: conn, id: randomID(), sent: time.Now()}
	d.keys = r.s.loops.leaves(out.hash, conn.LocalAddr().(*net.UDPAddr).AddrPort(), u.addr.Addr())
	if err := d.send(); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *dialog) close() {
	d.conn.Close()
	d.r.s.loops.back(d.keys)
	d.r.s.closeSocket()
}

func (d *dialog) send() error {
	if d.u.forbidden.Load() {
		return errForbidden
	}
	buf := getBuffer()
	defer putBuffer(buf)
	query := append((*buf)[:0], d.out.msg...)
	setMessageID(query, d.id)
	if _, err := d.conn.Write(query); err != nil {
		return shorten(err)
	}
	return nil
}

// receive waits for the reply. It returns errTimeout at the given time, and
// also when ctx ends.
func (d *dialog) receive(ctx context.Context, until time.Time) (*response, error) {
	_ = d.conn.SetReadDeadline(until)
	if ctx.Err() != nil { // or its deadline was overwritten
		return nil, errTimeout
	}
	buf := getBuffer()
	defer putBuffer(buf)
	for {
		n, err := d.conn.Read(*buf)
		if errno.Is(err, syscall.EMSGSIZE) { // how Windows says that it is longer than the buffer
			n, err = len(*buf), nil
		}
		if err != nil {
			return nil, shorten(err)
		}
		msg := (*buf)[:n]
		if !d.out.accepts(msg, d.id) {
			continue // forged or late: the right one may still come
		}
		if n == len(*buf) {
			setFlags(msg, flags(msg)|flagTC)
		}
		return d.out.read(bytes.Clone(msg))
	}
}

// await waits for the reply as long as a stub resolver would, or somebody waits
// for it, and sends the query again meanwhile.
func (d *dialog) await(ctx context.Context) (*response, error) {
	defer context.AfterFunc(ctx, func() { _ = d.conn.SetReadDeadline(past) })()
	r := d.r
	var (
		resend = d.sent.Add(r.pace.resend)
		judge  = d.sent.Add(r.pace.timeout)
		end    = d.sent.Add(r.pace.whole)
		judged bool
		marked string // a name that shows a loop if it comes here
	)
	defer func() { r.s.loops.unmark(marked) }()
	for {
		res, err := d.receive(ctx, earlier(end, earlier(resend, judge)))
		switch {
		case !errors.Is(err, errTimeout):
			return res, err
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case r.s.loops.isLoop(marked):
			return nil, errLoop
		}
		now := time.Now()
		if !judged && !now.Before(judge) {
			judged, judge = true, end
			r.s.strike(d.u, d.sent, errTimeout)
		}
		switch {
		case !now.Before(end), judged && r.over.Load():
			return nil, errTimeout
		case now.Before(resend):
			continue
		}
		resend = now.Add(2 * r.pace.resend) // no rarer in the end: a client's own tries join this one
		if r.over.Load() {
			continue
		}
		if marked == "" {
			name, query := r.s.loops.mark(d.out.hash)
			if query != nil {
				marked, resend = name, now.Add(r.pace.resend/5) // look soon
				if _, err := d.conn.Write(query); err != nil {
					return nil, shorten(err)
				}
			}
		}
		r.s.counters.retries.Add(1)
		if err := d.send(); err != nil {
			return nil, err
		}
	}
}
