package forwarder

import (
	"encoding/binary"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// localOnly has a socket on a loopback address receive only what arrives on lo. With route_localnet, which kube-proxy
// sets, the kernel delivers there what others send to 127.0.0.1 by a wire.
func localOnly(addr netip.AddrPort) func(network, address string, conn syscall.RawConn) error {
	if !addr.Addr().IsLoopback() {
		return nil
	}
	return func(_, _ string, conn syscall.RawConn) error {
		var err error
		if failed := conn.Control(func(fd uintptr) { err = syscall.BindToDevice(int(fd), "lo") }); failed != nil {
			return failed
		}
		return err
	}
}

// tellInterface has the kernel tell with each packet which interface it came in on, and returns the room that this takes
// (ip(7), ipv6(7)).
func tellInterface(conn *net.UDPConn) ([]byte, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	level, option := unix.IPPROTO_IP, unix.IP_PKTINFO
	if unmap(conn.LocalAddr().(*net.UDPAddr).AddrPort()).Addr().Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, 1) }); err != nil {
		return nil, err
	}
	return make([]byte, unix.CmsgSpace(unix.SizeofInet6Pktinfo)), set
}

// toldInterface returns the index of the interface, or 0 if it was not told.
func toldInterface(oob []byte) int {
	for len(oob) > 0 {
		header, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			return 0
		}
		switch {
		case header.Level == unix.IPPROTO_IP && header.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			return int(binary.NativeEndian.Uint32(data)) // before the addresses
		case header.Level == unix.IPPROTO_IPV6 && header.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			return int(binary.NativeEndian.Uint32(data[net.IPv6len:])) // behind the address
		}
		oob = rest
	}
	return 0
}
