package kernel

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// A node that is server and client at once, so that both queries and replies come in through its cable.
var (
	far4, far6   = netip.MustParsePrefix("172.22.0.10/24"), netip.MustParsePrefix("fd00:22::10/64")
	near4, near6 = netip.MustParsePrefix("172.22.0.1/24"), netip.MustParsePrefix("fd00:22::1/64")
)

const nearPort, farPort = "near0", "far0"

// tapCable connects the host and a new node by taps. Edit may change the frames.
func tapCable(t *testing.T, edit func([]byte) []byte) *node {
	t.Helper()
	n := &node{handle: newNamespace(t)}
	near, err := lab.OpenTap(nearPort, true)
	check(t, "open tap", err)
	var far *lab.Tap
	n.do(t, func() {
		var err error
		far, err = lab.OpenTap(farPort, true)
		check(t, "open tap", err)
	})
	t.Cleanup(lab.Carry(near, far, edit))
	return n
}

// nicCable connects them by the two network adapters that the machine has for it.
func nicCable(t *testing.T) *node {
	t.Helper()
	nics := os.Getenv(nicsVariable)
	if nics == "" {
		t.Skip("no network adapters to test with: they are the virtual machine's of make test-kernel")
	}
	names := strings.Split(nics, ",")
	n := &node{handle: newNamespace(t)}
	waitFor(t, "adapter "+names[1], func() bool { _, err := netlink.LinkByName(names[1]); return err == nil })
	near, err := netlink.LinkByName(names[0])
	check(t, "find adapter", err)
	far, err := netlink.LinkByName(names[1])
	check(t, "find adapter", err)
	check(t, "rename adapter", netlink.LinkSetName(near, nearPort))
	check(t, "move adapter", netlink.LinkSetNsFd(far, int(n.handle)))
	n.do(t, func() { check(t, "rename adapter", netlink.LinkSetName(far, farPort)) })
	return n
}

// wire gives both ends of the cable their addresses.
func (n *node) wire(t *testing.T) {
	t.Helper()
	up := func(name string, addresses ...netip.Prefix) {
		t.Helper()
		device, err := netlink.LinkByName(name)
		check(t, "find "+name, err)
		for _, address := range addresses {
			addAddress(t, device, address.String())
		}
		check(t, "set up "+name, netlink.LinkSetUp(device))
	}
	up(nearPort, near4, near6)
	n.addresses = []netip.Prefix{far4, far6}
	n.do(t, func() { up(farPort, far4, far6) })
}

// sizes are asked for as the first label of a name, in octets of the reply.
func wantSize(server netip.AddrPort, querySize, replySize int) error {
	query := new(dns.Msg).SetQuestion(fmt.Sprintf("%d.size.default.svc.cluster.local.", replySize), dns.TypeTXT)
	query.SetEdns0(1232, false)
	if rest := querySize - query.Len() - 4; rest >= 0 {
		query.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_PADDING{Padding: make([]byte, rest)}}
	}
	client := dns.Client{Timeout: 2 * time.Second}
	reply, _, err := client.Exchange(query, server.String())
	if err != nil {
		return err
	}
	reply.Compress = true
	if reply.Len() != replySize {
		return fmt.Errorf("a reply of %d octets", reply.Len())
	}
	return nil
}

// sized makes a reply to a question of wantSize as long as the question says.
func sized(query *dns.Msg, reply *dns.Msg) {
	first, _, _ := strings.Cut(query.Question[0].Name, ".")
	size, err := strconv.Atoi(first)
	if err != nil || query.Question[0].Qtype != dns.TypeTXT {
		return
	}
	reply.Compress = true
	reply.SetEdns0(1232, false)
	txt := &dns.TXT{Hdr: dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: 5}, Txt: []string{""}}
	reply.Answer = []dns.RR{txt}
	for rest := size - reply.Len(); rest > 0; rest-- {
		if last := &txt.Txt[len(txt.Txt)-1]; len(*last) < 255 {
			*last += "x"
		} else {
			txt.Txt = append(txt.Txt, "")
		}
	}
}

// TestCables: drivers leave as little as the Ethernet header in the linear part of a socket buffer, and switches send
// frames with a tag of VLAN 0, which has but a priority. Queries and replies of all sizes get through nevertheless, and
// by the kernel's path.
func TestCables(t *testing.T) {
	tagged := func(frame []byte) []byte { return slices.Insert(frame, 12, 0x81, 0, 0xa0, 0) }
	// Between two sizes. A driver may do with a few sizes what it does with no other.
	const fine, coarse = 8, 64
	for _, c := range []struct {
		name  string
		cable func(t *testing.T) *node
		step  int
	}{
		{"tap", func(t *testing.T) *node { t.Helper(); return tapCable(t, nil) }, coarse},
		{"priority tag", func(t *testing.T) *node { t.Helper(); return tapCable(t, tagged) }, coarse},
		{"network card", nicCable, fine},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			far := c.cable(t)
			far.wire(t)
			serve(t, far, fromCluster)
			for _, family := range []struct {
				name                          string
				endpoint, near, host, service netip.Addr
			}{
				{"IPv4", far4.Addr(), near4.Addr(), hostDNS.Addr(), netip.MustParseAddr("172.21.0.10")},
				{"IPv6", far6.Addr(), near6.Addr(), hostDNS6.Addr(), netip.MustParseAddr("fd00:21::10")},
			} {
				far.do(t, func() { addRoute(t, family.service, family.near) })
				t.Run(family.name, func(t *testing.T) {
					h := h.in(t)
					attach := []string{"--dns-endpoint", family.endpoint.String(), "--wait", "60s", "--no-cache"}
					t.Log(h.must("attach", append(attach, "--pods", nearPort, "--cluster-dns", family.service.String())...))
					h.wantSizes("host", nil, netip.AddrPortFrom(family.host, 53), c.step)
					h.wantSizes("pod", far, netip.AddrPortFrom(family.service, 53), c.step)
					h.must("detach", "--linger", "0")
					// With the ingress filter, for which drivers change what they do.
					t.Log(h.must("attach", append(attach, "--kubeswitch-address", family.near.String())...))
					h.wantSizes("kubeswitch", far, netip.AddrPortFrom(family.near, 53), coarse)
					h.must("detach", "--linger", "0")
				})
			}
		})
	}
}

// wantSizes sweeps over the sizes that queries and replies may have: a reply may be longer than a query by far.
func (h *host) wantSizes(scope string, in *node, server netip.AddrPort, step int) {
	h.t.Helper()
	const smallest, largestQuery, largestReply = 100, 512, 1232
	before := h.status().Counters[scope].Steered
	asked := 0
	var lost []string
	in.do(h.t, func() {
		for size := smallest; size <= largestReply; size += step {
			asked++
			if err := wantSize(server, min(size, largestQuery), size); err != nil {
				lost = append(lost, fmt.Sprintf("%d: %v", size, err))
				if len(lost) == 5 {
					break
				}
			}
		}
	})
	if len(lost) > 0 {
		h.t.Errorf("%s, asked at %s: replies that did not come, by size: %s", scope, server, strings.Join(lost, "; "))
	}
	if steered := h.status().Counters[scope].Steered - before; steered != asked {
		h.t.Errorf("%s, asked at %s: %d queries steered, want %d", scope, server, steered, asked)
	}
}
