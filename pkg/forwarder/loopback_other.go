//go:build !linux

package forwarder

import (
	"net/netip"
	"syscall"
)

// localOnly is nothing that other systems need: they take what comes by a wire for a loopback address for a martian.
func localOnly(netip.AddrPort) func(network, address string, conn syscall.RawConn) error { return nil }
