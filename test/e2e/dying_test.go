package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestCommandsAndDyingDaemon: each command, while the daemon that it talks to is killed at any moment, does what it would
// do beside one that lives or one that is dead.
func TestCommandsAndDyingDaemon(t *testing.T) {
	commands := []struct {
		args    []string
		allowed []int
		says    string // of status 1, if that is allowed
	}{
		{attachArgs(), []int{0}, ""},
		{append(attachArgs(), "--zone", "cluster.local", "--zone", "other.test"), []int{0}, ""},
		{[]string{"status"}, []int{0, 3}, ""},
		{[]string{"check", lab.Backend}, []int{0, 3}, ""},
		{[]string{"doctor"}, []int{0, 3}, ""},
		{[]string{"restore"}, []int{0, 1}, "the daemon is attached and needs its resolver file"},
		{[]string{"detach"}, []int{0}, ""},
	}
	h := raise(t, lab.Options{})
	before, id := h.snapshot(), h.resolvConf()
	random := rand.New(rand.NewPCG(9, 0))
	for _, c := range commands {
		for range 8 {
			h.attach()
			pid := h.healthy().PID
			delay := time.Duration(random.IntN(60)) * time.Millisecond
			var all sync.WaitGroup
			all.Go(func() {
				r := h.run(c.args...)
				if !slices.Contains(c.allowed, r.code) || r.code == 1 && !strings.Contains(r.stderr, c.says) {
					t.Errorf("killed after %s: %v", delay, r)
				}
			})
			time.Sleep(delay)                                          // any moment is the point
			_ = command(t, h.Host(), "kill", "-KILL", fmt.Sprint(pid)) // it may have ended
			all.Wait()
		}
	}
	h.detach()
	h.guardians(0)
	h.unchanged(before)
	h.isStill(id)
}

// TestCommandsAndDeadPeer: where a daemon's socket is there, and who has it does not answer as a daemon does, each command
// does what it would do beside a dead daemon.
func TestCommandsAndDeadPeer(t *testing.T) {
	h := raise(t, lab.Options{})
	before, id := h.snapshot(), h.resolvConf()
	release := make(chan struct{})
	defer close(release)
	for name, peer := range map[string]func(net.Conn){
		"reset": func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1)) },
		"half a reply": func(conn net.Conn) {
			_, _ = conn.Read(make([]byte, 4096))
			_, _ = conn.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{\"pid\""))
		},
		"never read": func(net.Conn) { <-release },
	} {
		t.Run(name, func(t *testing.T) {
			h := h.in(t)
			h.attach()
			h.killBoth()
			listener := h.replaceControl(peer)
			defer listener.Close()
			for _, c := range []struct {
				args []string
				code int
				says string
			}{
				{[]string{"status"}, 3, "the daemon is dead"},
				{[]string{"check", lab.Backend}, 3, "the daemon is dead"},
				{[]string{"doctor"}, 3, "the daemon is dead"},
				{[]string{"restore"}, 0, "restored"},
				{attachArgs(), 0, "attached: 3 zones"},
			} {
				if r := h.run(c.args...); r.code != c.code || !strings.Contains(r.stdout, c.says) {
					t.Errorf("want exit status %d and %q: %v", c.code, c.says, r)
				}
			}
			h.healthy()
			h.killBoth()
			listener = h.replaceControl(peer)
			defer listener.Close()
			h.detach()
			h.unchanged(before)
			h.isStill(id)
		})
	}
}

// TestCheckBesideHang: a daemon that hangs is not well, whatever the kernel does without it.
func TestCheckBesideHang(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	r := h.healthy()
	h.signal("STOP", r.PID, r.Guardian.PID)
	for _, name := range []string{lab.Backend, lab.WWW} {
		if r := h.run("check", name); r.code != 3 || !strings.Contains(r.stdout, "the daemon does not answer") || strings.Contains(r.stdout, "DNS is fine") {
			t.Errorf("%s: %v", name, r)
		}
	}
	h.detach()
	h.unchanged(before)
}

// replaceControl puts somebody else behind the control socket of host0.
func (h *host) replaceControl(peer func(net.Conn)) (listener net.Listener) {
	h.t.Helper()
	const path = "/run/k2s-dnsbpf/control.sock"
	if err := h.Host().Do(func() (err error) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		listener, err = net.Listen("unix", path)
		return err
	}); err != nil {
		h.t.Fatal(err)
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false) // it is in another mount namespace
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				peer(conn)
			}()
		}
	}()
	return listener
}
