//go:build linux

package control

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/peer"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/peer/peertest"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
)

// controlSocket serves a handler to all users.
func controlSocket(t *testing.T, handler http.Handler) (path string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can be others")
	}
	dir := t.TempDir()
	path = rundir.Control(config.Config{RunDir: dir})
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	server := serve(listener, handler, zap.NewNop())
	t.Cleanup(func() { server.Close() })
	for name, mode := range map[string]os.FileMode{path: 0o666, dir: 0o755, filepath.Dir(dir): 0o755} {
		if err := os.Chmod(name, mode); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

// connect returns n connections, each with something sent.
func connect(t *testing.T, path string, n int, send string) (all []net.Conn) {
	t.Helper()
	for range n {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Error(err)
			return all
		}
		t.Cleanup(func() { conn.Close() })
		_, _ = conn.Write([]byte(send))
		all = append(all, conn)
	}
	return all
}

func askRaw(t *testing.T, path string) (reply []byte, err error) {
	t.Helper()
	return exchange(t.Context(), path, http.MethodGet, "/", nil)
}

// TestControlSocketIsShared: whoever holds connections open, or many, has a few; root is served all the time, and each
// connection that says nothing, says it slowly or does not listen is ended.
func TestControlSocketIsShared(t *testing.T) {
	here, _ := filepath.Glob("/proc/self/fd/*")
	path := controlSocket(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "well") }))
	const many = 300
	served, refused := 0, 0
	for uid := 60001; uid < 60010; uid++ {
		peertest.AsUser(t, uid, func() {
			for _, conn := range connect(t, path, many/10, "GET / HTTP/1.1\r\nHost: x\r\n") {
				go func() { _, _ = io.Copy(io.Discard, conn) }()
			}
		})
		if reply, err := askRaw(t, path); err != nil || string(reply) != "well" {
			t.Fatalf("root beside user %d: %q, %v", uid, reply, err)
		}
	}
	now, _ := filepath.Glob("/proc/self/fd/*")
	// The askers' ends are ours, too.
	if held := len(now) - len(here) - 9*many/10; held > peer.MaxPeers+16 {
		t.Errorf("%d descriptors are held for them", held)
	}
	// One user does not stand in for another, and gets in again when its places are free.
	for served == 0 {
		peertest.AsUser(t, 60100, func() {
			reply, err := askRaw(t, path)
			if err == nil && string(reply) == "well" {
				served++
			} else {
				refused++
			}
		})
	}
	t.Logf("another user was refused %d times before", refused)
}

// TestControlSocketRefuses: one that is not let in is told so, and not that the daemon is dead.
func TestControlSocketRefuses(t *testing.T) {
	path := controlSocket(t, http.NotFoundHandler())
	peertest.AsUser(t, 60001, func() {
		connect(t, path, peer.MaxPerUser, "")
		_, err := askRaw(t, path)
		if err == nil || errors.Is(err, ErrGone) || !strings.Contains(err.Error(), tooMany) {
			t.Errorf("%v", err)
		}
	})
}

// TestControlSocketEnds: what is not said, or not listened to, in time.
func TestControlSocketEnds(t *testing.T) {
	endless := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for {
			if _, err := w.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	})
	path := controlSocket(t, endless)
	for name, send := range map[string]string{
		"nothing": "", "half a line": "GET / HT", "half a header": "GET / HTTP/1.1\r\nHost: x\r\n",
		"a header without end": "GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 2*maxHeader),
	} {
		conn := connect(t, path, 1, send)[0]
		if response, err := http.ReadResponse(bufio.NewReader(conn), nil); err == nil && response.StatusCode == http.StatusOK {
			t.Errorf("%s: %s", name, response.Status)
		}
	}
	// Never read: the writer gives up, and its place is free again.
	for range 2 * peer.MaxPeers / peer.MaxPerUser {
		connect(t, path, peer.MaxPerUser, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	}
	reply := connect(t, path, 1, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")[0]
	for {
		response, err := http.ReadResponse(bufio.NewReader(reply), nil)
		if err == nil && response.StatusCode == http.StatusOK {
			return
		}
		reply = connect(t, path, 1, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")[0]
	}
}
