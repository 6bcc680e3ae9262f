package forwarder

import (
	"net/netip"
	"syscall"
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
