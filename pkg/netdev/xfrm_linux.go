package netdev

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Of linux/xfrm.h.
const (
	xfrmPolicyIn    = 0
	xfrmPolicyOut   = 1
	xfrmPolicyBlock = 1
	xfrmGetDefault  = 0x28 // XFRM_MSG_GETDEFAULT, since Linux 5.16
)

// Flow is the UDP packets from some addresses and ports to others, without a mark.
type Flow struct {
	From, To           netip.Prefix
	FromPorts, ToPorts PortRange
	// Ifindex is the interface that they leave through, 0 for packets that come in.
	Ifindex int
}

// Reverse returns the replies, which come in.
func (f Flow) Reverse() Flow {
	return Flow{From: f.To, To: f.From, FromPorts: f.ToPorts, ToPorts: f.FromPorts}
}

// IPsec is the security policy database of a network namespace (RFC 4301 section 4.4.1): what the stack does with packets
// that it sends and delivers, and a redirect does not.
type IPsec struct {
	policies []ipsecPolicy // in the order in which the kernel looks at them
	// blocksByDefault says, by direction, that what no policy is about is dropped.
	blocksByDefault [2]bool
}

type ipsecPolicy struct {
	nl.XfrmUserpolicyInfo
	mark, ifID uint32
	protects   bool // has a template of a transformation, so packets don't go in the clear
	optional   bool // all of its templates are, so a packet in the clear is accepted
}

// LookUpIPsec reads the policies. A kernel without IPsec has none. It needs CAP_NET_ADMIN.
func LookUpIPsec() (db IPsec, err error) {
	messages, err := retryInterrupted(func() ([][]byte, error) {
		return nl.NewNetlinkRequest(nl.XFRM_MSG_GETPOLICY, unix.NLM_F_DUMP).Execute(unix.NETLINK_XFRM, nl.XFRM_MSG_NEWPOLICY)
	})
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return db, nil
	}
	if err != nil {
		return db, fmt.Errorf("list IPsec policies: %w", err)
	}
	for _, message := range messages {
		policy, err := newIPsecPolicy(message)
		if err != nil {
			return db, fmt.Errorf("list IPsec policies: %w", err)
		}
		// Those of another mark or an xfrm interface are not about our packets.
		if policy.mark == 0 && policy.ifID == 0 {
			db.policies = append(db.policies, policy)
		}
	}
	slices.SortFunc(db.policies, func(a, b ipsecPolicy) int {
		return cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(a.Index, b.Index))
	})
	request := nl.NewNetlinkRequest(xfrmGetDefault, 0)
	request.AddRawData(make([]byte, 4))
	// Older kernels, which know no default, refuse.
	if reply, err := request.Execute(unix.NETLINK_XFRM, xfrmGetDefault); err == nil && len(reply) == 1 && len(reply[0]) >= 3 {
		const in, out = 0, 2 // of struct xfrm_userpolicy_default
		db.blocksByDefault[xfrmPolicyIn] = reply[0][in] == xfrmPolicyBlock
		db.blocksByDefault[xfrmPolicyOut] = reply[0][out] == xfrmPolicyBlock
	}
	return db, nil
}

func newIPsecPolicy(message []byte) (policy ipsecPolicy, err error) {
	if len(message) < nl.SizeofXfrmUserpolicyInfo {
		return policy, unix.EBADMSG
	}
	policy.XfrmUserpolicyInfo = *nl.DeserializeXfrmUserpolicyInfo(message)
	attributes, err := nl.ParseRouteAttr(message[nl.SizeofXfrmUserpolicyInfo:])
	if err != nil {
		return policy, err
	}
	for _, attribute := range attributes {
		switch attribute.Attr.Type {
		case nl.XFRMA_TMPL:
			policy.protects, policy.optional = true, true
			for template := range slices.Chunk(attribute.Value, nl.SizeofXfrmUserTmpl) {
				if len(template) < nl.SizeofXfrmUserTmpl {
					return policy, unix.EBADMSG
				}
				policy.optional = policy.optional && nl.DeserializeXfrmUserTmpl(template).Optional != 0
			}
		case nl.XFRMA_MARK:
			policy.mark = nl.DeserializeXfrmMark(attribute.Value).Value
		case nl.XFRMA_IF_ID:
			policy.ifID = binary.NativeEndian.Uint32(attribute.Value)
		}
	}
	return policy, nil
}

// Sends says why the stack would not send packets in the clear, nor does it let them pass with an IPsec header; empty if it
// sends them as they are.
func (db IPsec) Sends(f Flow) (not string) { return db.judge(xfrmPolicyOut, f) }

// Accepts says why the stack would not take packets that come in the clear; empty if it does.
func (db IPsec) Accepts(f Flow) (not string) { return db.judge(xfrmPolicyIn, f) }

func (db IPsec) judge(direction uint8, f Flow) string {
	for _, policy := range db.policies {
		touches, covers := policy.selects(f)
		if policy.Dir != direction || !touches {
			continue
		}
		switch {
		case policy.Action == xfrmPolicyBlock:
			return "blocked by an IPsec policy"
		case policy.protects && (direction == xfrmPolicyOut || !policy.optional):
			return "under an IPsec policy"
		case covers:
			return ""
		}
	}
	if db.blocksByDefault[direction] {
		return "blocked by the default IPsec policy"
	}
	return ""
}

// selects reports whether the policy is about any packet of a flow, and whether it is about all of them.
func (p ipsecPolicy) selects(f Flow) (touches, covers bool) {
	s := &p.Sel
	to, from := selected(s.Daddr, s.PrefixlenD, s.Family), selected(s.Saddr, s.PrefixlenS, s.Family)
	toTouched, toCovered := selectsPorts(s.Dport, s.DportMask, f.ToPorts)
	fromTouched, fromCovered := selectsPorts(s.Sport, s.SportMask, f.FromPorts)
	touches = to.Overlaps(f.To) && from.Overlaps(f.From) && toTouched && fromTouched &&
		(s.Proto == 0 || s.Proto == unix.IPPROTO_UDP) && (s.Ifindex == 0 || f.Ifindex == 0 || int(s.Ifindex) == f.Ifindex)
	covers = touches && to.Bits() <= f.To.Bits() && from.Bits() <= f.From.Bits() && toCovered && fromCovered &&
		(s.Ifindex == 0 || f.Ifindex != 0)
	return touches, covers
}

func selected(address nl.XfrmAddress, bits uint8, family uint16) netip.Prefix {
	if family == unix.AF_INET {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte(address[:4])), int(bits)).Masked()
	}
	return netip.PrefixFrom(netip.AddrFrom16(address), int(bits)).Masked()
}

// selectsPorts compares a port and its mask, both in network byte order, with a range.
func selectsPorts(port, mask uint16, ports PortRange) (any, all bool) {
	all = true
	for p := int(ports.First); p <= int(ports.Last); p++ {
		same := (nl.Swap16(uint16(p))^port)&mask == 0
		any, all = any || same, all && same
		if mask == 0 {
			break
		}
	}
	return any, all
}
