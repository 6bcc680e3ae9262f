package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/peer"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// reportFor is the maximum age of a report for an ordinary user.
const reportFor = time.Second

type peerKey struct{}

// Handler is the daemon behind the server. Its methods may be called from several goroutines.
type Handler interface {
	// Report returns the current state.
	Report() status.Report
	// Reload switches to new settings. changed is false if they are already in effect; after an error the old ones stay in effect.
	Reload(ctx context.Context, c config.Config) (changed bool, err error)
	// CacheList returns the answers of a name and of all below it that are kept, all for "".
	CacheList(suffix string) []status.CachedAnswer
	// CacheFlush forgets them, and returns how many they were.
	CacheFlush(suffix string) int
	// Replace ends the daemon and leaves everything attached to its successor. replied is as for Detach.
	Replace(ctx context.Context) (result ReplaceResult, replied func(), err error)
	// Detach starts a detach. replied must be called when the result has been sent, because the server ends with the daemon.
	Detach(ctx context.Context, order DetachOrder) (result DetachResult, replied func(), err error)
}

// server answers requests for a handler.
type server struct {
	handler Handler
	version string
	log     *zap.Logger

	mu     sync.Mutex // guards the following fields: the cached report for ordinary users
	at     time.Time
	report status.Report
}

// Listen serves the control socket of an attachment: the report for every user, since it contains no secrets, and orders from
// root. version is the daemon's, for error messages to other versions.
func Listen(c config.Config, handler Handler, version string, log *zap.Logger) (io.Closer, error) {
	path := rundir.Control(c)
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
	s := &server{handler: handler, version: version, log: log}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+pathStatus, s.status)
	mux.HandleFunc("POST "+pathReload, s.reload)
	mux.HandleFunc("POST "+pathDetach, s.detach)
	mux.HandleFunc("POST "+pathReplace, s.replace)
	mux.HandleFunc("GET "+pathAnswers, s.answers)
	mux.HandleFunc("POST "+pathFlush, s.flush)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, fmt.Sprintf("the daemon, version %s, does not know %s: detach, and attach again", version, r.URL.Path), http.StatusNotFound)
	})
	return serve(listener, mux, log), nil
}

func (s *server) status(w http.ResponseWriter, r *http.Request) {
	if isRoot(r) {
		s.reply(w, s.handler.Report())
		return
	}
	// At most a second old, however many clients there are.
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at.IsZero() || time.Since(s.at) > reportFor {
		s.report, s.at = s.handler.Report(), time.Now()
	}
	s.reply(w, s.report)
}

// answers tells who asked for what, so it is for root.
func (s *server) answers(w http.ResponseWriter, r *http.Request) {
	if !isRoot(r) {
		http.Error(w, "only root may see which names are asked for", http.StatusForbidden)
		return
	}
	s.reply(w, s.handler.CacheList(r.URL.Query().Get("suffix")))
}

func (s *server) flush(w http.ResponseWriter, r *http.Request) {
	var order FlushOrder
	if s.accept(w, r, &order) {
		s.reply(w, FlushResult{s.handler.CacheFlush(order.Suffix)})
	}
}

func (s *server) reload(w http.ResponseWriter, r *http.Request) {
	c := config.Default()
	if !s.accept(w, r, &c) {
		return
	}
	allow(w, c.Wait+Timeout)
	var result ReloadResult
	var err error
	if result.Changed, err = s.handler.Reload(r.Context(), c); err != nil {
		result.Error = err.Error()
	}
	s.reply(w, result)
}

func (s *server) replace(w http.ResponseWriter, r *http.Request) {
	if !s.accept(w, r, new(struct{})) {
		return
	}
	allow(w, DetachLimit+Timeout)
	result, replied, err := s.handler.Replace(r.Context())
	if err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	defer replied()
	s.reply(w, result)
	if err := http.NewResponseController(w).Flush(); err != nil {
		s.log.Debug("reply not sent", zap.Error(err))
	}
}

func (s *server) detach(w http.ResponseWriter, r *http.Request) {
	var order DetachOrder
	if !s.accept(w, r, &order) {
		return
	}
	allow(w, DetachLimit+Timeout)
	result, replied, err := s.handler.Detach(r.Context(), order)
	if err != nil {
		return // the client is gone
	}
	defer replied()
	s.reply(w, result)
	if err := http.NewResponseController(w).Flush(); err != nil {
		s.log.Debug("reply not sent", zap.Error(err))
	}
}

// serve serves requests, one per connection, with time limits for reading and writing.
func serve(listener *net.UnixListener, handler http.Handler, log *zap.Logger) *http.Server {
	server := &http.Server{
		Handler: handler, ReadTimeout: Timeout, WriteTimeout: Timeout, MaxHeaderBytes: maxHeader, ConnContext: withPeer,
		ErrorLog: zap.NewStdLog(zap.NewNop()), // clients must not be able to fill our log
	}
	server.SetKeepAlivesEnabled(false)
	go func() {
		if err := server.Serve(doorListener{listener, new(peer.Door)}); !errors.Is(err, http.ErrServerClosed) {
			log.Error("control socket failed", zap.Error(err))
		}
	}()
	return server
}

// allow gives an order more time until its reply.
func allow(w http.ResponseWriter, limit time.Duration) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(limit))
}

func isRoot(r *http.Request) bool {
	uid, ok := r.Context().Value(peerKey{}).(uint32)
	return ok && uid == 0
}

// accept reads an order. It answers by itself if the client is not root, or if the order can't be read or has parts that this
// version does not know.
func (s *server) accept(w http.ResponseWriter, r *http.Request, order any) bool {
	if !isRoot(r) {
		http.Error(w, "only root may give orders", http.StatusForbidden)
		return false
	}
	body := json.NewDecoder(io.LimitReader(r.Body, maxOrder))
	body.DisallowUnknownFields()
	if err := body.Decode(order); err != nil {
		http.Error(w, fmt.Sprintf("the daemon, version %s, can't read the order: %s: if the command is of another version, detach, and attach again", s.version, err),
			http.StatusBadRequest)
		return false
	}
	return true
}

func (s *server) reply(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(value); err != nil {
		s.log.Debug("reply not sent", zap.Error(err))
	}
}

// withPeer records the user at the other end of a connection.
func withPeer(ctx context.Context, connection net.Conn) context.Context {
	guest, ok := connection.(*peer.Guest)
	if !ok {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, guest.UID)
}

// doorListener is a listener that limits connections. It implements net.Listener.
type doorListener struct {
	*net.UnixListener
	door *peer.Door
}

const tooMany = "too many requests at once"

// Accept implements net.Listener for HTTP.
func (l doorListener) Accept() (net.Conn, error) {
	return l.door.Accept(l.UnixListener, fmt.Sprintf("HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(tooMany), tooMany))
}
