//go:build unix

package forwarder

import (
	"context"
	"net"
	"net/netip"
	"testing"
)

// duplicates opens the sockets of a server a second time, as another process has them that was sent them.
func duplicates(t *testing.T, s *Server) (all []Sockets) {
	t.Helper()
	for _, sockets := range s.Sockets() {
		udpFile, err := sockets.UDP.File()
		if err != nil {
			t.Fatal(err)
		}
		defer udpFile.Close()
		tcpFile, err := sockets.TCP.File()
		if err != nil {
			t.Fatal(err)
		}
		defer tcpFile.Close()
		udp, err := net.FilePacketConn(udpFile)
		if err != nil {
			t.Fatal(err)
		}
		tcp, err := net.FileListener(tcpFile)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, Sockets{UDP: udp.(*net.UDPConn), TCP: tcp.(*net.TCPListener)})
	}
	return all
}

// TestHandOver: a second server takes over the sockets of a first one. That goes on serving the connections that it has,
// and answers what it has read.
func TestHandOver(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	old := start(t, external(newPeer(t, func(q *peerQuery) { asked <- struct{}{}; <-release; answerTXT("old")(q) })))
	udp, tcp, idle := dial(t, old, "udp"), dial(t, old, "tcp"), dial(t, old, "tcp")
	m := query("www.example.org.", false)
	udp.send(pack(t, m))
	<-asked
	tcp.send(pack(t, m))
	<-asked
	eventually(t, "both connections are accepted", func() bool { return old.Stats().Conns == 2 })

	addr := old.Addrs()[0]
	heir, err := New(Options{Listen: []netip.AddrPort{addr}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shutdown(t, heir) })
	heir.Adopt(duplicates(t, old))
	if err := heir.SetRoutes(external(newPeer(t, answerTXT("new")))); err != nil {
		t.Fatal(err)
	}
	if err := heir.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := heir.Addrs(); len(got) != 1 || got[0] != addr {
		t.Fatalf("the heir listens on %v, want %v", got, addr)
	}
	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	retired := make(chan struct{})
	go func() {
		defer close(retired)
		old.Retire(ctx)
	}()
	eventually(t, "the old one has left the listener", func() bool {
		_, err := old.Sockets()[0].TCP.File()
		return err != nil
	})
	for range 20 {
		wantText(t, dial(t, heir, "udp").askMsg(m), "new")
		wantText(t, dial(t, heir, "tcp").askMsg(m), "new")
	}
	close(release)
	wantText(t, unpack(t, udp.receive()), "old")
	wantText(t, unpack(t, tcp.receive()), "old")
	go func() { <-asked }()
	wantText(t, idle.askMsg(m), "old")
	tcp.conn.Close()
	giveUp()
	<-retired
	shutdown(t, old)
	idle.wantClosed()
	wantText(t, udp.askMsg(m), "new")
}

// TestAdoptUnused: sockets that the server has no use for are closed, after Listen as after a failure.
func TestAdoptUnused(t *testing.T) {
	for name, listen := range map[string]bool{"listening": true, "shut down before": false} {
		t.Run(name, func(t *testing.T) {
			s, err := New(Options{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}})
			if err != nil {
				t.Fatal(err)
			}
			other, err := listenBoth(t.Context(), netip.MustParseAddrPort("127.0.0.2:0"))
			if err != nil {
				t.Fatal(err)
			}
			s.Adopt([]Sockets{other})
			if !listen {
				shutdown(t, s)
			} else if err := s.Listen(t.Context()); err != nil {
				t.Fatal(err)
			}
			// Another program's connection may have the port for a moment, now that it is free.
			eventually(t, "the address is free", func() bool {
				again, err := listenBoth(t.Context(), other.addr())
				if err == nil {
					again.close()
				}
				return err == nil
			})
			shutdown(t, s)
		})
	}
}

// TestShutdownServesNewcomers: a client that connects just before, and asks just after the beginning of a Shutdown, is
// not turned away.
func TestShutdownServesNewcomers(t *testing.T) {
	s := start(t, external(newPeer(t, answerTXT("x"))))
	c := dial(t, s, "tcp")
	s.beginShutdown()
	wantText(t, c.askMsg(query("www.example.org.", false)), "x")
	wantText(t, dial(t, s, "tcp").askMsg(query("www.example.org.", false)), "x")
	wantText(t, dial(t, s, "udp").askMsg(query("www.example.org.", false)), "x")
	shutdown(t, s)
	c.wantClosed()
}
