package forwarder

import (
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// TestNamesAreReadToTheirEnd: a reply with a name that a client could read for ever, or not at all, is not handed on:
// neither by its owner nor in its data, neither a cluster's server's nor an upstream's.
func TestNamesAreReadToTheirEnd(t *testing.T) {
	// Behind the question of x.cluster.local. or x.example.org. the answer begins at 33 or 31; its data 12 octets later.
	const ttl = "0001 0000003c"
	for _, tt := range []struct {
		name, cluster string // in hexadecimal; @@ is where the answer begins, %% its data, && two octets on
		ok            bool
	}{
		{"owner points to itself", "c0@@ 0001" + ttl + "0004 01020304", false},
		{"owner points ahead", "c0%% 0001" + ttl + "0004 01020304", false},
		{"owner points into the header", "c002 0001" + ttl + "0004 01020304", false},
		{"CNAME points to itself", "c00c 0005" + ttl + "0002 c0%%", false},
		{"CNAME label points to itself", "c00c 0005" + ttl + "0004 0161 c0%%", false},
		{"MX points to itself", "c00c 000f" + ttl + "0006 000a 0161 c0&&", false},
		{"SRV without a name", "c00c 0021" + ttl + "0006 000000000035", false},
		{"SOA with one name", "c00c 0006" + ttl + "0002 c00c", false},
		{"name longer than its record", "c00c 0005" + ttl + "0002 0161 00", false},
		{"label type 01", "c00c 0005" + ttl + "0002 4100", false},
		{"pointer cut", "c00c 0005" + ttl + "0001 c0", false},
		{"CNAME", "c00c 0005" + ttl + "0004 0161 c00e", true},
		{"pointer to a pointer", "c00c 0005" + ttl + "0002 c0@@", true},
		{"unknown type", "c00c ff00" + ttl + "0002 c0%%", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newPeer(t, func(q *peerQuery) {
				m := new(dns.Msg).SetReply(q.msg())
				raw := pack(t, m)
				hex := func(n int) string { return string("0123456789abcdef"[n>>4]) + string("0123456789abcdef"[n&15]) }
				s := strings.NewReplacer("@@", hex(len(raw)), "%%", hex(len(raw)+12), "&&", hex(len(raw)+14)).Replace(tt.cluster)
				raw = append(raw, unhex(t, s)...)
				setCount(raw, sectionAnswer, 1)
				q.reply(raw)
			})
			r := cluster(p)
			r.Upstreams = external(p).Upstreams
			s := start(t, r)
			for _, name := range []string{"x.cluster.local.", "x.example.org."} {
				reply := headerRcode(dial(t, s, "udp").ask(pack(t, query(name, true))))
				if got := reply == dns.RcodeSuccess; got != tt.ok {
					t.Errorf("%s: %s, want an answer: %v", name, dns.RcodeToString[reply], tt.ok)
				}
			}
		})
	}
}

// BenchmarkPointerChains reads the costliest message: each name a pointer to the one before.
func BenchmarkPointerChains(b *testing.B) {
	msg := make([]byte, headerLen, maxMessage)
	msg = append(msg, 0, 0, 1, 0, 1)
	off := len(msg)
	n := 0
	for ; len(msg)+12 <= maxMessage && off < 0x3FFF-2; n++ {
		at := len(msg)
		if n == 0 {
			msg = append(msg, 0)
		} else {
			msg = append(msg, 0xC0|byte(off>>8), byte(off))
		}
		off = at
		msg = append(msg, 0xff, 0, 0, 1, 0, 0, 0, 0, 0, 0)
	}
	setCount(msg, sectionAnswer, n)
	b.ReportAllocs()
	for b.Loop() {
		_, _ = scanRecords(msg, headerLen+5)
	}
}
