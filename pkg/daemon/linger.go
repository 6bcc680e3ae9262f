//go:build linux

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
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
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// A program that has read the resolver configuration keeps what it read: Go's resolver for up to five seconds, others
// for longer. So after a detach, when all is put back, the daemon lingers: without the host's lock, with nothing but the
// forwarder's sockets and the routes that it had last, it answers on. An attach in that time is like any other, but
// that it takes duplicates of the open sockets over where it would bind to their addresses.
//
// The socket of the daemon that lingers is made, and removed, by the holder of the host's lock only.

const (
	lingerFile = "linger.sock"

	// lingerMost is how many times over a daemon lingers at most, if it is asked on and on.
	lingerMost = 6

	// lingerCheck is how often the forwarder is looked at, whether it is still asked.
	lingerCheck = 100 * time.Millisecond

	// maxLingerMessage bounds a message of the socket in octets.
	maxLingerMessage = 4096
)

// What can be asked of a daemon that lingers. One connection may carry several requests, each a packet.
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

// lingering is a daemon's life after a detach. A nil one has ended.
type lingering struct {
	server   *forwarder.Server
	listen   []netip.AddrPort
	log      *zap.Logger
	runDir   string
	listener *net.UnixListener
	file     os.FileInfo // of the listener

	begun time.Time
	least time.Duration

	lastQuery atomic.Pointer[time.Time]
	heirs     atomic.Int32 // connections that the sockets were sent over
	taken     chan struct{}
}

// leaveForwarder ends the forwarder, or leaves it to those programs that have yet to read the restored resolver
// configuration, if a detach wants that. The caller holds the lock.
func (d *Daemon) leaveForwarder(ctx context.Context) {
	if d.linger > 0 && d.now.config.Resolver == config.ResolverTakeover {
		var err error
		if d.lingering, err = newLingering(d.now.config.RunDir, d.forwarder, d.forwarder.Addrs(), d.linger, d.log); err == nil {
			return
		}
		d.log.Warn("not lingering", zap.Error(err))
	}
	shutDown(ctx, d.forwarder, d.log)
}

// detachOrder is what the control socket takes, detachResult what it answers: what was done to the resolver file, a line
// each. With an error the daemon stays attached.
type detachOrder struct {
	Linger time.Duration `json:"linger"`
}

type detachResult struct {
	Done  []string `json:"done,omitempty"`
	Error string   `json:"error,omitempty"`
}

// detachLimit is how long the resolver file may take to be put back.
const detachLimit = 3 * time.Second

// errStays is a detach that the daemon refuses.
var errStays = errors.New("still attached")

// requestDetach has the daemon end as at a signal, but linger. It returns what that one did to the resolver file.
func requestDetach(ctx context.Context, c config.Config) (done []string, err error) {
	body, err := json.Marshal(detachOrder{Linger: c.Linger})
	if err != nil {
		return nil, err
	}
	var result detachResult
	err = askDaemon(ctx, c, detachLimit, http.MethodPost, "/detach", body, &result)
	if err == nil && result.Error != "" {
		err = fmt.Errorf("%w: %s", errStays, result.Error)
	}
	return result.Done, err
}

// detaching is an order on its way to serve.
type detaching struct {
	linger  time.Duration
	result  chan detachResult
	replied chan struct{} // closed when the reply is out: with serve, the control socket ends
}

// handleDetach has serve put the resolver file back and end.
func (d *Daemon) handleDetach(w http.ResponseWriter, r *http.Request, order detachOrder) {
	request := detaching{order.Linger, make(chan detachResult, 1), make(chan struct{})}
	defer close(request.replied)
	select {
	case d.detaches <- request:
	case <-r.Context().Done():
		return
	}
	d.reply(w, <-request.result)
	if err := http.NewResponseController(w).Flush(); err != nil {
		d.log.Debug("reply not sent", zap.Error(err))
	}
}

// startDetach puts the resolver file back, which is the first of a detach, and reports whether the rest is to follow: not
// while the file can't be put back, since it would point at nobody then. Whoever asked learns why.
func (d *Daemon) startDetach(request detaching) bool {
	done, err := host.RestoreResolver(d.now.config, d.journal, d.log)
	for _, line := range done {
		d.log.Info(line)
	}
	if err != nil && !d.ours() {
		err = nil // detach tells of it
	}
	result := detachResult{Done: done}
	if err != nil {
		result.Error = err.Error()
	}
	request.result <- result
	select {
	case <-request.replied:
	case <-time.After(controlTimeout):
	}
	return err == nil
}

func shutDown(ctx context.Context, server *forwarder.Server, log *zap.Logger) {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	if err := server.Shutdown(ctx); err != nil {
		log.Warn("queries given up", zap.Error(err))
	}
}

func newLingering(runDir string, server *forwarder.Server, listen []netip.AddrPort, least time.Duration, log *zap.Logger) (*lingering, error) {
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
	l := &lingering{
		server: server, listen: listen, log: log, runDir: runDir, listener: listener, file: file,
		begun: time.Now(), least: least, taken: make(chan struct{}, 1),
	}
	l.lastQuery.Store(&l.begun)
	go l.serve()
	return l, nil
}

// run lingers until that is of no more use, or a new daemon has taken the sockets over, or ctx ends.
func (l *lingering) run(ctx context.Context) error {
	if l == nil {
		return nil
	}
	l.log.Info("lingering", zap.Duration("atLeast", l.least), zap.Stringers("listen", l.listen))
	if l.wait(ctx) {
		l.log.Info("a new daemon has taken over")
		err := l.listener.Close()
		retirement, cancel := context.WithTimeout(ctx, lingerMost*l.least)
		defer cancel()
		l.server.Retire(retirement)
		shutDown(context.WithoutCancel(ctx), l.server, l.log)
		return err
	}
	shutDown(context.WithoutCancel(ctx), l.server, l.log)
	return errors.Join(l.listener.Close(), l.cleanUp())
}

// wait returns whether the sockets have been taken over.
func (l *lingering) wait(ctx context.Context) (taken bool) {
	tick := time.NewTicker(lingerCheck)
	defer tick.Stop()
	var queries uint64
	for {
		select {
		case <-ctx.Done():
			return false
		case <-l.taken:
			return true
		case now := <-tick.C:
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

// until is when the daemon ends if nobody asks it any more: the time is over, and nothing came for half of it.
func (l *lingering) until() time.Time {
	until := l.begun.Add(l.least)
	if quiet := l.lastQuery.Load().Add(l.least / 2); quiet.After(until) {
		until = quiet
	}
	if most := l.begun.Add(lingerMost * l.least); until.After(most) {
		until = most
	}
	return until
}

// cleanUp removes what a run of ours has left in the run directory, unless somebody else has begun one there.
func (l *lingering) cleanUp() error {
	path, c := filepath.Join(l.runDir, lingerFile), config.Config{RunDir: l.runDir}
	deadline := time.Now().Add(stopTimeout)
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
func (l *lingering) serve() {
	var entrance door
	for {
		conn, err := entrance.accept(l.listener, fmt.Sprintf(`{"error":%q}`, tooMany))
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

func (l *lingering) answer(peer *guest) {
	defer peer.Close()
	conn, trusted := peer.UnixConn, peer.uid == 0
	if !trusted {
		// Nobody else is to hold our descriptors.
		_ = conn.SetDeadline(time.Now().Add(controlTimeout))
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
			defer l.heirs.Add(-1)
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

func (l *lingering) reply() lingerReply {
	return lingerReply{Until: l.until(), Listen: l.listen}
}

func (l *lingering) sendSockets(conn *net.UnixConn) error {
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
