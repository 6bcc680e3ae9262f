//go:build linux

package daemon

import (
	"fmt"
	"net"
	"sync"
	"time"
)

// Everybody may connect to the sockets in the run directory. These bounds keep the daemon's descriptors and memory for
// DNS, and leave root room to give orders whoever else asks.
const (
	maxPeers     = 64 // connections in all
	maxStrangers = 48 // of them not root's
	maxPerUser   = 8  // of one user other than root

	// minPlace is how long a place is taken at least, if it is not root's: that bounds how often a user may ask, too.
	minPlace = 100 * time.Millisecond
)

// door counts the connections of a socket by user.
type door struct {
	mu     sync.Mutex
	all    int
	byUser map[uint32]int
}

// admit reports whether one more connection of a user is taken. If it is, leave must be called once at its end.
func (d *door) admit(uid uint32) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	strangers := d.all - d.byUser[0]
	if d.all >= maxPeers || uid != 0 && (strangers >= maxStrangers || d.byUser[uid] >= maxPerUser) {
		return false
	}
	if d.byUser == nil {
		d.byUser = make(map[uint32]int)
	}
	d.all++
	d.byUser[uid]++
	return true
}

func (d *door) leave(uid uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all--
	if d.byUser[uid]--; d.byUser[uid] == 0 {
		delete(d.byUser, uid)
	}
}

// accept waits for a connection that the door admits. Others are told, and closed.
func (d *door) accept(listener *net.UnixListener, refusal string) (*guest, error) {
	for {
		conn, err := listener.AcceptUnix()
		if err != nil {
			return nil, err
		}
		peer, err := peerOf(conn)
		if err == nil && d.admit(peer.Uid) {
			return &guest{UnixConn: conn, uid: peer.Uid, door: d, since: time.Now()}, nil
		}
		_, _ = conn.Write([]byte(refusal))
		_ = conn.Close()
	}
}

// guest is a connection that was admitted.
type guest struct {
	*net.UnixConn
	uid   uint32
	door  *door
	since time.Time
	gone  sync.Once
}

// Close implements net.Conn.
func (g *guest) Close() error {
	g.gone.Do(func() {
		if early := minPlace - time.Since(g.since); g.uid != 0 && early > 0 {
			time.AfterFunc(early, func() { g.door.leave(g.uid) })
			return
		}
		g.door.leave(g.uid)
	})
	return g.UnixConn.Close()
}

// doorListener is a listener with a door. It implements net.Listener.
type doorListener struct {
	*net.UnixListener
	door *door
}

const tooMany = "too many ask at once"

// Accept implements net.Listener for HTTP.
func (l doorListener) Accept() (net.Conn, error) {
	return l.door.accept(l.UnixListener, fmt.Sprintf("HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(tooMany), tooMany))
}
