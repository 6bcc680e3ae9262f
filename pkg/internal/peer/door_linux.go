package peer

import (
	"errors"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Everybody may connect to the sockets in the run directory. These bounds keep the daemon's descriptors and memory for
// DNS, and leave root room to give orders whoever else asks.
const (
	// MaxPeers is how many connections there are in all.
	MaxPeers     = 64
	maxStrangers = 48 // of them not root's
	// MaxPerUser is how many one user other than root has.
	MaxPerUser = 8

	// minPlace is how long a place is taken at least, if it is not root's: that bounds how often a user may ask, too.
	minPlace = 100 * time.Millisecond
)

// Door counts the connections of a socket by user.
type Door struct {
	mu     sync.Mutex
	all    int
	byUser map[uint32]int
}

// admit reports whether one more connection of a user is taken. If it is, leave must be called once at its end.
func (d *Door) admit(uid uint32) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	strangers := d.all - d.byUser[0]
	if d.all >= MaxPeers || uid != 0 && (strangers >= maxStrangers || d.byUser[uid] >= MaxPerUser) {
		return false
	}
	if d.byUser == nil {
		d.byUser = make(map[uint32]int)
	}
	d.all++
	d.byUser[uid]++
	return true
}

func (d *Door) leave(uid uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all--
	if d.byUser[uid]--; d.byUser[uid] == 0 {
		delete(d.byUser, uid)
	}
}

// Accept waits for a connection that the door admits. Others are told, and closed.
func (d *Door) Accept(listener *net.UnixListener, refusal string) (*Guest, error) {
	for {
		conn, err := listener.AcceptUnix()
		if err != nil {
			return nil, err
		}
		peer, err := Of(conn)
		if err == nil && d.admit(peer.Uid) {
			return &Guest{UnixConn: conn, UID: peer.Uid, door: d, since: time.Now()}, nil
		}
		_, _ = conn.Write([]byte(refusal))
		_ = conn.Close()
	}
}

// Guest is a connection that was admitted.
type Guest struct {
	*net.UnixConn
	UID   uint32
	door  *Door
	since time.Time
	gone  sync.Once
}

// Close implements net.Conn.
func (g *Guest) Close() error {
	g.gone.Do(func() {
		if early := minPlace - time.Since(g.since); g.UID != 0 && early > 0 {
			time.AfterFunc(early, func() { g.door.leave(g.UID) })
			return
		}
		g.door.leave(g.UID)
	})
	return g.UnixConn.Close()
}

// Of returns the process at the other end of a connection (SO_PEERCRED, unix(7)); for a client, the one that called listen.
func Of(connection *net.UnixConn) (*unix.Ucred, error) {
	raw, err := connection.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	var peerErr error
	err = raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return peer, errors.Join(err, peerErr)
}
