//go:build linux

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

// controlTimeout bounds a request to the daemon: one that is stopped must not hang its asker.
const controlTimeout = time.Second

// maxOrder bounds what is read from the control socket, in bytes.
const maxOrder = 1 << 20

type peerKey struct{}

// listenControl serves the report, to every user since it holds no secret, and takes new settings from root.
func (d *Daemon) listenControl() (*http.Server, error) {
	path := filepath.Join(d.config.RunDir, controlFile)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove stale control socket: %w", err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on control socket: %w", err)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(fmt.Errorf("open control socket to all users: %w", err), listener.Close())
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { d.reply(w, d.report()) })
	mux.HandleFunc("POST /reload", func(w http.ResponseWriter, r *http.Request) {
		var c config.Config
		if acceptOrder(w, r, &c) {
			d.reply(w, d.handleReload(r.Context(), c))
		}
	})
	mux.HandleFunc("POST /detach", func(w http.ResponseWriter, r *http.Request) {
		var order detachOrder
		if acceptOrder(w, r, &order) {
			d.reply(w, struct{}{})
			d.handleDetach(w, order)
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: controlTimeout, ConnContext: withPeer}
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			d.log.Error("control socket failed", zap.Error(err))
		}
	}()
	return server, nil
}

// acceptOrder reads an order to the daemon. It answers one of anybody but root, and one that it can't read, by itself.
func acceptOrder(w http.ResponseWriter, r *http.Request, order any) bool {
	if uid, ok := r.Context().Value(peerKey{}).(uint32); !ok || uid != 0 {
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
	socket, ok := connection.(*net.UnixConn)
	if !ok {
		return ctx
	}
	peer, err := peerOf(socket)
	if err != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, peer.Uid)
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

// callDaemon asks the daemon over the control socket. A daemon that is not there is os.ErrNotExist or ECONNREFUSED.
func callDaemon(ctx context.Context, c config.Config, method, path string, body io.Reader, into any) error {
	if method == http.MethodGet {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, controlTimeout)
		defer cancel()
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(c.RunDir, controlFile))
		},
	}}
	request, err := http.NewRequestWithContext(ctx, method, "http://k2s-dnsbpf"+path, body)
	if err != nil {
		return fmt.Errorf("ask the daemon: %w", err)
	}
	response, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("ask the daemon: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("ask the daemon: %s", response.Status)
	}
	if err := json.NewDecoder(response.Body).Decode(into); err != nil {
		return fmt.Errorf("ask the daemon: %w", err)
	}
	return nil
}
