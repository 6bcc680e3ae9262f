package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// socketQuery is a struct inet_diag_req_v2 (linux/inet_diag.h).
type socketQuery []byte

// Len and Serialize implement nl.NetlinkRequestData.
func (q socketQuery) Len() int          { return len(q) }
func (q socketQuery) Serialize() []byte { return q }

// Offsets in struct inet_diag_req_v2 and, of the inode, in struct inet_diag_msg.
const (
	socketQuerySize  = 56
	socketRemote     = 8 // of the id: ports of two octets, addresses of sixteen
	socketLocalPort  = socketRemote + 2
	socketRemoteAddr = socketRemote + 4
	socketLocalAddr  = socketRemoteAddr + 16
	socketInterface  = socketLocalAddr + 16
	socketCookie     = socketInterface + 4
	socketInode      = 68
	socketReplySize  = 72
)

// UDPSocket returns the inode of the socket that gets a datagram for an address of this host that comes in on an
// interface, 0 if there is none. It is the kernel's own look-up (sock_diag(7)): a socket on the wildcard address counts.
func UDPSocket(address netip.AddrPort, ifindex int) (inode uint32, err error) {
	query := make(socketQuery, socketQuerySize)
	query[0], query[1] = unix.AF_INET, unix.IPPROTO_UDP
	if address.Addr().Is6() {
		query[0] = unix.AF_INET6
	}
	// For UDP the kernel reads source and destination as those of the datagram, and not of the socket.
	binary.BigEndian.PutUint16(query[socketRemote:], address.Port())
	binary.BigEndian.PutUint16(query[socketLocalPort:], address.Port())
	copy(query[socketRemoteAddr:], address.Addr().AsSlice())
	copy(query[socketLocalAddr:], address.Addr().AsSlice())
	binary.NativeEndian.PutUint32(query[socketInterface:], uint32(ifindex))
	for i := range 8 {
		query[socketCookie+i] = 0xff // INET_DIAG_NOCOOKIE
	}
	request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, 0)
	request.AddData(query)
	replies, err := request.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look for the socket at %s: %w", address, err)
	}
	if len(replies) != 1 || len(replies[0]) < socketReplySize {
		return 0, fmt.Errorf("look for the socket at %s: unknown reply", address)
	}
	return binary.NativeEndian.Uint32(replies[0][socketInode:]), nil
}
