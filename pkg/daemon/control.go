//go:build linux

package daemon

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// controlTimeout bounds a request to the daemon: one that is stopped must not hang its asker.
const controlTimeout = time.Second

// lookAgain is how often a daemon that is gone, and the lock that it had, are looked for.
const lookAgain = 20 * time.Millisecond

// What is read from the control socket at most, in bytes.
const (
	maxHeader = 4 << 10
	maxOrder  = 1 << 20
	maxReply  = 64 << 20
)

// publishedFor is how old a report may be that an ordinary user gets.
const publishedFor = time.Second

type peerKey struct{}

// listenControl serves the report, to every user since it holds no secret, and takes new settings from root.
func (d *Daemon) listenControl() (*http.Server, error) {
	path := rundir.Control(d.now.config)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove stale control socket: %w", err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on control socket: %w", err)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(fmt.Errorf("open control socket to all users: %w", err), listener.Close())
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) {
		if isRoot(r) {
			d.reply(w, d.report())
		} else {
			d.reply(w, d.published.get(d.report))
		}
	})
	mux.HandleFunc("POST /reload", func(w http.ResponseWriter, r *http.Request) {
		var c config.Config
		if acceptOrder(w, r, &c) {
			allow(w, c.Wait+controlTimeout)
			d.reply(w, d.handleReload(r.Context(), c))
		}
	})
	mux.HandleFunc("POST /detach", func(w http.ResponseWriter, r *http.Request) {
		var order detachOrder
		if acceptOrder(w, r, &order) {
			allow(w, detachLimit+controlTimeout)
			d.handleDetach(w, r, order)
		}
	})
	return serveControl(listener, mux, d.log), nil
}

// serveControl serves requests, one to a connection, and none that takes its time to come or to be taken.
func serveControl(listener *net.UnixListener, handler http.Handler, log *zap.Logger) *http.Server {
	server := &http.Server{
		Handler: handler, ReadTimeout: controlTimeout, WriteTimeout: controlTimeout, MaxHeaderBytes: maxHeader, ConnContext: withPeer,
		ErrorLog: zap.NewStdLog(zap.NewNop()), // what peers do need not fill our log
	}
	server.SetKeepAlivesEnabled(false)
	go func() {
		if err := server.Serve(doorListener{listener, new(door)}); !errors.Is(err, http.ErrServerClosed) {
			log.Error("control socket failed", zap.Error(err))
		}
	}()
	return server
}

// allow gives an order more time until its reply.
func allow(w http.ResponseWriter, limit time.Duration) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(limit))
}

// published is the report for users who may not make the daemon work: at most a second old, however many ask.
type published struct {
	mu     sync.Mutex
	at     time.Time
	report status.Report
}

func (p *published) get(anew func() status.Report) status.Report {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.at.IsZero() || time.Since(p.at) > publishedFor {
		p.report, p.at = anew(), time.Now()
	}
	return p.report
}

func isRoot(r *http.Request) bool {
	uid, ok := r.Context().Value(peerKey{}).(uint32)
	return ok && uid == 0
}

// acceptOrder reads an order to the daemon. It answers one of anybody but root, and one that it can't read, by itself.
func acceptOrder(w http.ResponseWriter, r *http.Request, order any) bool {
	if !isRoot(r) {
		http.Error(w, "only root may give orders", http.StatusForbidden)
		return false
	}
	if err := json.NewDecoder(io.LimitReader(r.Body, maxOrder)).Decode(order); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return false
	}
	return true
}

func (d *Daemon) reply(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(value); err != nil {
		d.log.Debug("reply not sent", zap.Error(err))
	}
}

// withPeer notes the user on the other side of a connection.
func withPeer(ctx context.Context, connection net.Conn) context.Context {
	peer, ok := connection.(*guest)
	if !ok {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, peer.uid)
}

// peerOf returns who is on the other side of a connection (SO_PEERCRED, unix(7)): for a client, who began to listen.
func peerOf(connection *net.UnixConn) (*unix.Ucred, error) {
	raw, err := connection.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	var peerErr error
	err = raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return peer, errors.Join(err, peerErr)
}

// How asking a daemon may fail, other than that it says so.
var (
	// errNoDaemon: nobody has the host's lock. The daemon has ended or died, perhaps while it was asked.
	errNoDaemon = errors.New("no daemon")
	// ErrNotServing: somebody has the lock and takes no orders: a daemon on its way up or down, another command, a
	// guardian at work.
	ErrNotServing = errors.New("another attach or detach is at work: wait for it, or end it with k2s-dnsbpf detach")
	// errHangs: who has the lock does not answer in time.
	errHangs = errors.New("the daemon does not answer")
	// errGone is of one try: nobody listens, or who did is gone before the reply was whole.
	errGone = errors.New("gone")
)

// askDaemon asks the daemon over the control socket, and waits for the reply for as long as limit. A daemon that dies or
// ends meanwhile, in whatever form that shows, is looked for again, until it is known what is there in its place: see the
// errors above. That takes controlTimeout more at most.
func askDaemon(ctx context.Context, c config.Config, limit time.Duration, method, path string, body []byte, into any) error {
	begin := time.Now()
	for {
		err := callDaemon(ctx, c, limit, method, path, body, into)
		if !errors.Is(err, errGone) && !errors.Is(err, errHangs) {
			return err
		}
		hangs := errors.Is(err, errHangs)
		if os.Geteuid() != 0 {
			// The lock is root's: what accepts a connection counts as a daemon.
			if hangs {
				return err
			}
			return fmt.Errorf("ask the daemon: %w", errNoDaemon)
		}
		if _, held := state.Holder(rundir.Lock(c)); !held {
			return fmt.Errorf("ask the daemon: %w", errNoDaemon)
		}
		if hangs {
			return err
		}
		if time.Since(begin) > controlTimeout {
			return ErrNotServing
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("ask the daemon: %w", ctx.Err())
		case <-time.After(lookAgain):
		}
	}
}

// callDaemon is one try of askDaemon.
func callDaemon(ctx context.Context, c config.Config, limit time.Duration, method, path string, body []byte, into any) error {
	asking, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	reply, err := exchange(asking, rundir.Control(c), method, path, body)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return fmt.Errorf("ask the daemon: %w", ctx.Err())
	case asking.Err() != nil:
		return fmt.Errorf("%w within %s", errHangs, limit)
	default:
		return fmt.Errorf("ask the daemon: %w", err)
	}
	err = json.Unmarshal(reply, into)
	var cut *json.SyntaxError
	if errors.As(err, &cut) {
		return fmt.Errorf("ask the daemon: %w: %w", errGone, err)
	}
	if err != nil {
		return fmt.Errorf("ask the daemon: %w: is it of another version?", err)
	}
	return nil
}

// exchange sends one request over a Unix socket and reads the reply to its end. All that a connection can break with is
// errGone.
func exchange(ctx context.Context, socket, method, path string, body []byte) ([]byte, error) {
	conn, err := dialControl(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	request, err := http.NewRequest(method, "http://k2s-dnsbpf"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Close = true
	// Who does not want to hear it all may have answered still.
	sent := request.Write(conn)
	response, err := http.ReadResponse(bufio.NewReader(conn), request)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errGone, errors.Join(sent, err))
	}
	defer response.Body.Close()
	reply, err := io.ReadAll(io.LimitReader(response.Body, maxReply))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errGone, err)
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %q", response.Status, strings.TrimSpace(string(reply)))
	}
	return reply, nil
}

// dialControl waits while the queue of connections is full, which connect(2) does not.
func dialControl(ctx context.Context, socket string) (net.Conn, error) {
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		switch {
		case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET):
			return nil, fmt.Errorf("%w: %w", errGone, err)
		case !errors.Is(err, unix.EAGAIN):
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(lookAgain):
		}
	}
}
