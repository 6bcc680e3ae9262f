//go:build linux

package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// counterpart is what a control socket does with a connection; the rest is up to its closing.
type counterpart func(conn *net.UnixConn)

// after reads the request, says something and closes.
func after(say string) counterpart {
	return func(conn *net.UnixConn) {
		if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
			_, _ = conn.Write([]byte(say))
		}
	}
}

// deaths are the forms in which a daemon's end shows to whoever asks it.
var deaths = map[string]counterpart{
	"it closes at once":           func(*net.UnixConn) {},
	"it closes, unread":           func(conn *net.UnixConn) { _, _ = conn.Read(make([]byte, 1)) },
	"it stops to read":            func(conn *net.UnixConn) { _ = conn.CloseRead(); _, _ = conn.Write([]byte("x")) },
	"no reply":                    after(""),
	"half a status line":          after("HTTP/1.1 2"),
	"half a header":               after("HTTP/1.1 200 OK\r\nContent-Le"),
	"a header":                    after("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"),
	"half a body":                 after("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{\"pid\""),
	"half a body of unknown size": after("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{\"pid\""),
	"half a chunk":                after("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{\"pid\""),
	"a chunk":                     after("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"),
}

// alive answers as a daemon does.
var alive = after("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{\"pid\":7}")

// control has a peer for each connection to come, in their order, and the last for all others.
func control(t *testing.T, peers ...counterpart) config.Config {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the lock is root's")
	}
	c := config.Default()
	dir := t.TempDir()
	c.RunDir, c.StateDir, c.BPFFS, c.ResolvConf = dir, filepath.Join(dir, "state"), filepath.Join(dir, "bpf"), filepath.Join(dir, "resolv.conf")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: rundir.Control(config.Config{RunDir: dir}), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.AcceptUnix()
			if err != nil {
				return
			}
			peers[0](conn)
			_ = conn.Close()
			if len(peers) > 1 {
				peers = peers[1:]
			}
		}
	}()
	t.Cleanup(func() {
		_ = listener.Close()
		<-done
	})
	return c
}

func lockHost(t *testing.T, c config.Config) (unlock func()) {
	t.Helper()
	lock, err := state.TryLock(rundir.Lock(c))
	if err != nil {
		t.Fatal(err)
	}
	unlock = sync.OnceFunc(func() { _ = lock.Unlock() })
	t.Cleanup(unlock)
	return unlock
}

func askStatus(t *testing.T, c config.Config) (pid int, err error) {
	t.Helper()
	var report struct{ PID int }
	err = ask(t.Context(), c, Timeout, http.MethodGet, "/status", nil, &report)
	return report.PID, err
}

// TestDaemonDiesWhileAsked: what follows depends on who has the host's lock then, not on how the connection broke.
func TestDaemonDiesWhileAsked(t *testing.T) {
	for name, death := range deaths {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			t.Run("nobody follows", func(t *testing.T) {
				c := control(t, death)
				if _, err := askStatus(t, c); !errors.Is(err, ErrNoDaemon) {
					t.Errorf("ask: %v", err)
				}
				if report, err := Status(t.Context(), c); !errors.Is(err, ErrNoDaemon) {
					t.Errorf("status: %+v, %v", report, err)
				}
				if _, err := Reload(t.Context(), c, ""); !errors.Is(err, ErrNotServing) {
					t.Errorf("reload: %v", err)
				}
			})
			t.Run("another daemon", func(t *testing.T) {
				c := control(t, death, death, alive)
				lockHost(t, c)
				if pid, err := askStatus(t, c); err != nil || pid != 7 {
					t.Errorf("process %d, %v", pid, err)
				}
				var other *OtherVersionError
				if _, err := Reload(t.Context(), c, "another"); !errors.As(err, &other) || other.PID != 7 {
					t.Errorf("reload of a daemon of another version: %v", err)
				}
			})
			t.Run("it takes time to die", func(t *testing.T) {
				var unlock func()
				locked := make(chan struct{})
				c := control(t, death, death, func(*net.UnixConn) { <-locked; unlock() })
				unlock = lockHost(t, c)
				close(locked)
				if _, err := askStatus(t, c); !errors.Is(err, ErrNoDaemon) {
					t.Error(err)
				}
			})
			t.Run("a command at work", func(t *testing.T) {
				c := control(t, death)
				lockHost(t, c)
				if _, err := askStatus(t, c); !errors.Is(err, ErrNotServing) {
					t.Error(err)
				}
			})
		})
	}
}

// TestNobodyListens: a daemon that was killed leaves its socket behind, one that has ended does not.
func TestNobodyListens(t *testing.T) {
	c := control(t, alive)
	path := filepath.Join(c.RunDir, "left.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	if err := errors.Join(listener.Close(), os.Rename(path, rundir.Control(c))); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := askStatus(t, c); !errors.Is(err, ErrNoDaemon) {
			t.Error(err)
		}
		_ = os.Remove(rundir.Control(c))
	}
}

// TestDaemonHangs: one that accepts and does not read is waited for as long as agreed. It is a daemon as long as it has
// the lock.
func TestDaemonHangs(t *testing.T) {
	for name, hang := range map[string]func(release <-chan struct{}) counterpart{
		"accepted": func(release <-chan struct{}) counterpart { return func(*net.UnixConn) { <-release } },
		"half a reply": func(release <-chan struct{}) counterpart {
			return func(conn *net.UnixConn) { after("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")(conn); <-release }
		},
	} {
		t.Run(name, func(t *testing.T) {
			release := make(chan struct{})
			c := control(t, hang(release))
			t.Cleanup(func() { close(release) })
			unlock := lockHost(t, c)
			if _, err := askStatus(t, c); !errors.Is(err, ErrHangs) {
				t.Errorf("with the lock: %v", err)
			}
			if _, err := Reload(t.Context(), c, ""); err == nil || !strings.Contains(err.Error(), "does not answer within 1s") {
				t.Errorf("new settings: %v", err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := ask(ctx, c, time.Hour, http.MethodGet, "/status", nil, new(json.RawMessage)); !errors.Is(err, context.Canceled) {
				t.Errorf("interrupted: %v", err)
			}
			unlock()
			if _, err := askStatus(t, c); !errors.Is(err, ErrNoDaemon) {
				t.Errorf("without the lock: %v", err)
			}
		})
	}
}

// TestDaemonAnswers: what it says of itself is no sign of its death.
func TestDaemonAnswers(t *testing.T) {
	for reply, want := range map[string]string{
		"HTTP/1.1 403 Forbidden\r\nContent-Length: 3\r\n\r\n\x1b[m":   `403 Forbidden: "\x1b[m"`,
		"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{\"pid\":\"\"}": "another version",
	} {
		c := control(t, after(reply))
		lockHost(t, c)
		if _, err := askStatus(t, c); err == nil || errors.Is(err, ErrNoDaemon) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", reply, err)
		}
	}
}
