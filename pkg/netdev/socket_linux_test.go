package netdev

import (
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// The socket that a datagram reaches, whatever address it is bound to, and nobody else's.
func TestUDPSocket(t *testing.T) {
	newNamespace(t)
	up(t, "lo") // else the net package finds that sockets for both families are not to be had
	index := addInterface(t, "eth0", "192.0.2.1/24", "2001:db8::1/64")
	other := addInterface(t, "eth1", "198.51.100.1/24")
	v4, v6 := netip.MustParseAddrPort("192.0.2.1:53"), netip.MustParseAddrPort("[2001:db8::1]:53")
	for _, c := range []struct {
		name, network, bind, device string
		reaches4, reaches6          bool
	}{
		{"none", "", "", "", false, false},
		{"the address", "udp", "192.0.2.1:53", "", true, false},
		{"the address, IPv6", "udp", "[2001:db8::1]:53", "", false, true},
		{"another address", "udp", "198.51.100.1:53", "", false, false},
		{"another port", "udp", "192.0.2.1:54", "", false, false},
		{"all of IPv4", "udp4", "0.0.0.0:53", "", true, false},
		{"all of IPv6", "udp6", "[::]:53", "", false, true},
		{"all", "udp", "[::]:53", "", true, true},
		{"the interface", "udp", "[::]:53", "eth0", true, true},
		{"another interface", "udp", "[::]:53", "eth1", false, false},
	} {
		func() { // and no subtest, which would be on another thread
			var inode uint64
			if c.network != "" {
				conn, err := net.ListenPacket(c.network, c.bind)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				raw, err := conn.(*net.UDPConn).SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				var stat unix.Stat_t
				var statErr, bindErr error
				err = raw.Control(func(fd uintptr) {
					statErr = unix.Fstat(int(fd), &stat)
					if c.device != "" {
						bindErr = unix.BindToDevice(int(fd), c.device)
					}
				})
				if err != nil || statErr != nil || bindErr != nil {
					t.Fatal(err, statErr, bindErr)
				}
				inode = stat.Ino
			}
			for address, reaches := range map[netip.AddrPort]bool{v4: c.reaches4, v6: c.reaches6} {
				want := uint32(0)
				if reaches {
					want = uint32(inode)
				}
				if got, err := UDPSocket(address, index); got != want || err != nil {
					t.Errorf("%s: %s: socket %d, %v, want %d", c.name, address, got, err, want)
				}
			}
		}()
	}
	if got, err := UDPSocket(v4, other); got != 0 || err != nil {
		t.Errorf("socket %d, %v", got, err)
	}
}
