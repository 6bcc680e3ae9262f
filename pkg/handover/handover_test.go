//go:build linux

package handover

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/peer/peertest"
)

func TestLingersUntil(t *testing.T) {
	begun := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, test := range map[string]struct{ lastQuery, want time.Duration }{
		"never asked":      {0, 10 * time.Second},
		"asked early":      {4 * time.Second, 10 * time.Second},
		"asked late":       {9 * time.Second, 14 * time.Second},
		"asked on and on":  {57 * time.Second, time.Minute},
		"asked at the end": {time.Minute, time.Minute},
	} {
		l := &Lingering{begun: begun, least: 10 * time.Second}
		lastQuery := begun.Add(test.lastQuery)
		l.lastQuery.Store(&lastQuery)
		if got := l.until().Sub(begun); got != test.want {
			t.Errorf("%s: lingers for %s, want %s", name, got, test.want)
		}
	}
}

// startLingering has a server on a free port linger in this process.
func startLingering(t *testing.T) (l *Lingering, runDir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may have the sockets")
	}
	runDir = t.TempDir()
	server, err := forwarder.New(forwarder.Options{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ShutDown(t.Context(), server, zap.NewNop()) })
	if err := server.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	l, err = Linger(runDir, server, time.Minute, false, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.listener.Close() })
	return l, runDir
}

func TestLingerSockets(t *testing.T) {
	l, runDir := startLingering(t)
	asker, err := dial(runDir)
	if err != nil || asker == nil {
		t.Fatalf("no daemon lingers: %v", err)
	}
	defer asker.Close()
	if asker.pid != os.Getpid() {
		t.Errorf("process %d, want %d", asker.pid, os.Getpid())
	}
	reply, fds, err := asker.ask(lingerSockets)
	if err != nil || len(reply.Listen) != 1 || len(fds) != 2 {
		t.Fatalf("reply %+v, descriptors %v: %v", reply, fds, err)
	}
	sockets, err := adopt(fds)
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets %v: %v", sockets, err)
	}
	defer sockets[0].UDP.Close()
	defer sockets[0].TCP.Close()
	if got := sockets[0].UDP.LocalAddr().String(); got != l.listen[0].String() {
		t.Errorf("a socket of %s, want %s", got, l.listen[0])
	}
	if n := l.heirs.Load(); n != 1 {
		t.Errorf("%d heirs, want 1", n)
	}
}

// TestLingererDies: one that ends while it is asked, in whatever form, is none any more. One that hangs is.
func TestLingererDies(t *testing.T) {
	packet := func(say string) func(*net.UnixConn) {
		return func(conn *net.UnixConn) {
			_, _ = conn.Read(make([]byte, maxLingerMessage))
			_, _ = conn.Write([]byte(say))
		}
	}
	release := make(chan struct{})
	defer close(release)
	for name, test := range map[string]struct {
		peer func(*net.UnixConn)
		want error
	}{
		"it closes at once": {func(*net.UnixConn) {}, errGone},
		"it stops to read":  {func(conn *net.UnixConn) { _ = conn.CloseRead() }, errGone},
		"no reply":          {func(conn *net.UnixConn) { _, _ = conn.Read(make([]byte, maxLingerMessage)) }, errGone},
		"half a reply":      {packet(`{"until":`), errGone},
		"it hangs":          {func(*net.UnixConn) { <-release }, errHangs},
	} {
		runDir := t.TempDir()
		listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(runDir, lingerFile), Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				conn, err := listener.AcceptUnix()
				if err != nil {
					return
				}
				test.peer(conn)
				_ = conn.Close()
			}
		}()
		asker, err := dial(runDir)
		if err != nil || asker == nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, _, err := asker.ask(lingerStatus); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
		asker.Close()
		if from, _, _, err := Inherit(runDir); errors.Is(test.want, errGone) && err != nil || from != nil {
			t.Errorf("%s: inherit: %v, %v", name, err, from)
		}
		_ = listener.Close()
	}
}

// TestLingerTrustsRoot: anybody may ask for the status, and nobody else for the sockets.
func TestLingerTrustsRoot(t *testing.T) {
	_, runDir := startLingering(t)
	for _, dir := range []string{runDir, filepath.Dir(runDir)} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const nobody = 65534
	peertest.AsUser(t, nobody, func() {
		asker, err := dial(runDir)
		if err != nil || asker == nil {
			t.Errorf("nobody may not even ask: %v", err)
			return
		}
		defer asker.Close()
		if reply, _, err := asker.ask(lingerStatus); err != nil || reply.Until.IsZero() {
			t.Errorf("status: %+v: %v", reply, err)
		}
		for _, do := range []string{lingerSockets, lingerTaken, "dance"} {
			if _, fds, err := asker.ask(do); err == nil || len(fds) > 0 {
				t.Errorf("%s: nobody got %v", do, fds)
			}
		}
	})
}

// TestDeadLingerer: the socket that a killed daemon leaves is removed, that of a living one is not.
func TestDeadLingerer(t *testing.T) {
	l, runDir := startLingering(t)
	path := filepath.Join(runDir, lingerFile)
	if err := ForgetDead(runDir); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the socket of a living one is gone: %v", err)
	}
	if err := l.listener.Close(); err != nil {
		t.Fatal(err)
	}
	if err := ForgetDead(runDir); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket of a dead one is there: %v", err)
	}
}
