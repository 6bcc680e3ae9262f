//go:build linux

package datapath

import (
	"encoding/binary"
	"fmt"
	"net"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

func withOPT(size uint16, options ...dns.EDNS0) func(*dns.Msg) {
	return func(m *dns.Msg) {
		opt := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT, Class: size}, Option: options}
		m.Extra = append(m.Extra, opt)
	}
}

var ednsSizes = []uint16{0, 1, 511, 512, 1231, 1232, 1233, 4096, 0x0500, 0xff00, 65535}

func TestEDNS(t *testing.T) {
	cookie := &dns.EDNS0_COOKIE{Cookie: "0102030405060708"}
	forms := map[string][]dns.EDNS0{
		"none":    nil,
		"cookie":  {cookie},
		"ECS":     {&dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: net.IPv4(192, 0, 2, 0)}},
		"NSID":    {&dns.EDNS0_NSID{Code: dns.EDNS0NSID}},
		"padding": {&dns.EDNS0_PADDING{Padding: make([]byte, 128)}},
		"unknown": {&dns.EDNS0_LOCAL{Code: 65001, Data: []byte{1, 2, 3}}},
		"several": {cookie, &dns.EDNS0_NSID{Code: dns.EDNS0NSID}, &dns.EDNS0_PADDING{Padding: make([]byte, 7)}},
	}
	var cases []queryCase
	// Names of either parity, so that the size is at an even and at an odd offset.
	for _, name := range []string{"b.cluster.local", "bb.cluster.local"} {
		for form, options := range forms {
			for _, size := range ednsSizes {
				cases = append(cases, queryCase{
					fmt.Sprintf("%s for %s, size %d", form, name, size), query(t, name, withOPT(size, options...)), "steered",
				})
			}
		}
	}
	cases = append(cases, queryCase{"DO", query(t, inZone, func(m *dns.Msg) { m.SetEdns0(4096, true) }), "steered"})
	opt := query(t, inZone, withOPT(4096, cookie))
	at := referenceQuery(opt).sizeOffset
	last := len(opt) - 1
	cases = append(cases,
		queryCase{"flags are ignored", put(opt, at+4, 0xff, 0xff), "steered"},
		queryCase{"extended RCODE is ignored", put(opt, at+2, 0xff), "steered"},
		queryCase{"version 1", put(opt, at+3, 1), "passed_edns"},
		queryCase{"version 255", put(opt, at+3, 0xff), "passed_edns"},
		queryCase{"name is not the root", put(opt, at-3, 1), "passed_edns"},
		queryCase{"type TSIG", put(opt, at-2, 0, 250), "passed_edns"},
		queryCase{"type 41 the other way round", put(opt, at-2, 41, 0), "passed_edns"},
		queryCase{"rdlength too large", put(opt, at+7, opt[at+7]+1), "passed_malformed"},
		queryCase{"rdlength too small", put(opt, at+7, opt[at+7]-1), "passed_malformed"},
		queryCase{"rdlength 0 with data", put(opt, at+6, 0, 0), "passed_malformed"},
		queryCase{"rdlength 65535", put(opt, at+6, 0xff, 0xff), "passed_malformed"},
		queryCase{"trailing octets", append(put(opt, 0), 0, 0), "passed_malformed"},
		queryCase{"OPT that ARCOUNT denies", put(opt, 10, 0, 0), "passed_malformed"},
		queryCase{"OPT in the answer section", put(opt, 6, 0, 1, 0, 0, 0, 0), "passed_counts"},
		queryCase{"two OPT", query(t, inZone, withOPT(512), withOPT(512)), "passed_counts"},
		queryCase{"outside of the zone", query(t, "example.com", withOPT(4096, cookie)), "passed_external"},
		queryCase{"rest of the option cut off", opt[:last], "passed_malformed"},
		queryCase{"A record in the additional section", query(t, inZone, func(m *dns.Msg) {
			m.Extra = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(192, 0, 2, 1)}}
		}), "passed_edns"},
		queryCase{"longest name", append(rawQueryWithOPT(many(120)), 0, 0, 41, 0xff, 0xff, 0, 0, 0, 0, 0, 0), "steered"},
	)
	testQueries(t, newHarness(t), cases)
}

// rawQueryWithOPT is a raw query that announces an additional record.
func rawQueryWithOPT(name string) []byte { return put(rawQuery(name), 10, 0, 1) }

// The checksum is updated, not computed: try sums that carry, and both parities, with and without one.
func TestEDNSChecksum(t *testing.T) {
	h := newHarness(t)
	none := func(frame *pktgen.Frame) { frame.NoUDPChecksum = true }
	count := 0
	for _, f := range families {
		for _, name := range []string{"b.cluster.local", "bb.cluster.local"} {
			message := query(t, name, withOPT(4096))
			at := referenceQuery(message).sizeOffset
			for size := 0; size <= 0xffff; size += 257 {
				binary.BigEndian.PutUint16(message[at:], uint16(size))
				h.forget(t, h.steer(t, FromHost, f, f.query(message)))
				count++
			}
			if f.name == "IPv4" {
				binary.BigEndian.PutUint16(message[at:], 4096)
				h.forget(t, h.steer(t, FromHost, f, f.query(message, none)))
			}
		}
	}
	t.Logf("%d sizes", count)
}
