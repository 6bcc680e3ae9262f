//go:build !linux

package forwarder

import (
	"net"
	"net/netip"
	"syscall"
)

// localOnly is nothing that other systems need: they take what comes by a wire for a loopback address for a martian.
func localOnly(netip.AddrPort) func(network, address string, conn syscall.RawConn) error { return nil }

// tellInterface and toldInterface are for bridges that this host routes for, which are Linux's.
func tellInterface(*net.UDPConn) ([]byte, error) { return nil, nil }

func toldInterface([]byte) int { return 0 }
