//go:build linux

package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/peer"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

const (
	// timeout limits how long the other side may take to send or receive something.
	timeout = time.Second

	// cleanUpLimit is how long to wait, at the end, for the host's lock or for a process to end.
	cleanUpLimit = 10 * time.Second

	// DrainTimeout is how long to wait for the forwarder's pending answers when it ends.
	DrainTimeout = 250 * time.Millisecond

	lingerFile = "linger.sock"

	// lingerMost is how many times the minimum a daemon lingers at most, if queries keep arriving.
	lingerMost = 6

	// lingerCheck is how often to check whether the forwarder is still being asked.
	lingerCheck = 100 * time.Millisecond

	// maxLingerMessage limits a message on the socket, in octets.
	maxLingerMessage = 4096
)

// The requests to a daemon that lingers. One connection may carry several requests, each in a packet.
const (
	lingerStatus  = "status"
	lingerSockets = "sockets" // the reply carries duplicates of the sockets, UDP before TCP of each address; for root only
	lingerTaken   = "taken"   // they are served now, so the daemon may end; has no reply
)

type lingerRequest struct {
	Do string `json:"do"`
}

type lingerReply struct {
	Until  time.Time        `json:"until"` // at least
	Listen []netip.AddrPort `json:"listen"`
	Error  string           `json:"error,omitempty"`
}

// Lingering is a daemon after its detach. A nil one has ended.
type Lingering struct {
	server   *forwarder.Server
	listen   []netip.AddrPort
	log      *zap.Logger
	runDir   string
	listener *net.UnixListener
	file     os.FileInfo // of the listener

	begun time.Time
	least time.Duration

	lastQuery atomic.Pointer[time.Time]
	heirs     atomic.Int32 // connections over which the sockets were sent
	taken     chan struct{}
	left      chan struct{} // an heir that got the sockets has gone without taking them over
	replaced  bool          // for a successor, and for nobody else
}

// ShutDown ends a server. Queries that are not answered in time are given up.
func ShutDown(ctx context.Context, server *forwarder.Server, log *zap.Logger) {
	ctx, cancel := context.WithTimeout(ctx, DrainTimeout)
	defer cancel()
	if err := server.Shutdown(ctx); err != nil {
		log.Warn("queries given up", zap.Error(err))
	}
}

// Linger starts to linger with a server, for least or longer. The caller has the host's lock, and calls Run when it has
// released it. A daemon that is replaced lingers for its successor only: it ends when that has taken over, has failed, or does
// not appear in time.
func Linger(runDir string, server *forwarder.Server, least time.Duration, replaced bool, log *zap.Logger) (*Lingering, error) {
	path := filepath.Join(runDir, lingerFile)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	file, err := os.Lstat(path)
	if err == nil {
		err = os.Chmod(path, 0o666) // everybody may ask for the status
	}
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	l := &Lingering{
		server: server, listen: server.Addrs(), log: log, runDir: runDir, listener: listener, file: file,
		begun: time.Now(), least: least, taken: make(chan struct{}, 1), left: make(chan struct{}, 1), replaced: replaced,
	}
	l.lastQuery.Store(&l.begun)
	go l.serve()
	return l, nil
}

// Run lingers until that is no longer useful, a new daemon has taken over the sockets, or ctx ends.
func (l *Lingering) Run(ctx context.Context) (taken bool, err error) {
	if l == nil {
		return false, nil
	}
	l.log.Info("lingering", zap.Duration("atLeast", l.least), zap.Stringers("listen", l.listen))
	if l.wait(ctx) {
		l.log.Info("a new daemon has taken over")
		err := l.listener.Close()
		retirement, cancel := context.WithTimeout(ctx, lingerMost*l.least)
		defer cancel()
		l.server.Retire(retirement)
		ShutDown(context.WithoutCancel(ctx), l.server, l.log)
		return true, err
	}
	ShutDown(context.WithoutCancel(ctx), l.server, l.log)
	return false, errors.Join(l.listener.Close(), l.cleanUp())
}

// wait returns whether the sockets have been taken over.
func (l *Lingering) wait(ctx context.Context) (taken bool) {
	tick := time.NewTicker(lingerCheck)
	defer tick.Stop()
	var queries uint64
	for {
		select {
		case <-ctx.Done():
			return false
		case <-l.taken:
			return true
		case <-l.left:
			if l.replaced {
				return false
			}
		case now := <-tick.C:
			if l.replaced && l.heirs.Load() == 0 && now.Sub(l.begun) >= l.least {
				return false
			}
			if l.replaced {
				continue
			}
			stats := l.server.Stats()
			if sum := stats.UDPQueries + stats.TCPQueries; sum != queries {
				queries = sum
				l.lastQuery.Store(&now)
			}
			if now.Sub(l.begun) >= lingerMost*l.least || l.heirs.Load() == 0 && !now.Before(l.until()) {
				return false
			}
		}
	}
}

// until is when the daemon ends if no more queries arrive: the minimum is over, and nothing arrived for half of it.
func (l *Lingering) until() time.Time {
	until := l.begun.Add(l.least)
	if quiet := l.lastQuery.Load().Add(l.least / 2); quiet.After(until) {
		until = quiet
	}
	if most := l.begun.Add(lingerMost * l.least); until.After(most) {
		until = most
	}
	return until
}

// cleanUp removes what this run has left in the run directory, unless another one has started there.
func (l *Lingering) cleanUp() error {
	path, c := filepath.Join(l.runDir, lingerFile), config.Default()
	c.RunDir = l.runDir
	deadline := time.Now().Add(cleanUpLimit)
	for {
		if now, err := os.Lstat(path); err != nil || !os.SameFile(now, l.file) {
			return nil // the holder of the lock has removed it
		}
		lock, err := state.TryLock(rundir.Lock(c))
		if err == nil {
			return errors.Join(removeLingerFile(l.runDir), rundir.RemoveLock(c, lock))
		}
		if !errors.Is(err, state.ErrLocked) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(lingerCheck)
	}
}

// removeLingerFile removes the socket; the caller holds the lock.
func removeLingerFile(runDir string) error {
	if err := os.Remove(filepath.Join(runDir, lingerFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// serve answers on the socket until that is closed.
func (l *Lingering) serve() {
	var entrance peer.Door
	for {
		conn, err := entrance.Accept(l.listener, fmt.Sprintf(`{"error":%q}`, "too many requests at once"))
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			l.log.Error("linger socket failed", zap.Error(err))
			time.Sleep(lingerCheck)
			continue
		}
		go l.answer(conn)
	}
}

func (l *Lingering) answer(guest *peer.Guest) {
	defer guest.Close()
	conn, trusted := guest.UnixConn, guest.UID == 0
	if !trusted {
		// Nobody else may hold our descriptors.
		_ = conn.SetDeadline(time.Now().Add(timeout))
	}
	for {
		request, err := readLinger[lingerRequest](conn, nil)
		if err != nil {
			return
		}
		switch {
		case request.Do == lingerStatus:
			err = writeLinger(conn, l.reply(), nil)
		case request.Do == lingerSockets && trusted:
			l.heirs.Add(1)
			defer func() {
				l.heirs.Add(-1)
				poke(l.left)
			}()
			err = l.sendSockets(conn)
		case request.Do == lingerTaken && trusted:
			poke(l.taken)
		default:
			err = writeLinger(conn, lingerReply{Error: "not allowed"}, nil)
		}
		if err != nil {
			l.log.Warn("linger socket", zap.String("request", request.Do), zap.Error(err))
			return
		}
	}
}

func (l *Lingering) reply() lingerReply {
	return lingerReply{Until: l.until(), Listen: l.listen}
}

func (l *Lingering) sendSockets(conn *net.UnixConn) error {
	var fds []int
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	for _, sockets := range l.server.Sockets() {
		for _, socket := range []syscall.Conn{sockets.UDP, sockets.TCP} {
			fd, err := duplicate(socket)
			if err != nil {
				return writeLinger(conn, lingerReply{Error: err.Error()}, nil)
			}
			fds = append(fds, fd)
		}
	}
	return writeLinger(conn, l.reply(), unix.UnixRights(fds...))
}

// poke wakes a receiver: one value waiting is as good as many.
func poke(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}
