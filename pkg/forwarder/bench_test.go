package forwarder

import (
	"testing"
)

func BenchmarkLookup(b *testing.B) {
	tab := testTable(b)
	name := wire(b, "kubernetes.default.svc.cluster.local")
	b.ReportAllocs()
	for b.Loop() {
		tab.lookup(name)
	}
}

func BenchmarkParse(b *testing.B) {
	raw := pack(b, query("kubernetes.default.svc.cluster.local.", true))
	var q question
	b.ReportAllocs()
	for b.Loop() {
		if err := q.parse(raw); err != nil {
			b.Fatal(err)
		}
		if _, err := scanRecords(raw, q.end); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkForward is a whole query, over the loopback interface both times;
// the server that is asked runs in the same process and is counted in.
func BenchmarkForward(b *testing.B) {
	for _, network := range []string{"udp", "tcp"} {
		b.Run(network, func(b *testing.B) {
			s := start(b, external(newPeer(b, answerTXT("x"))))
			raw := pack(b, query("www.example.org.", true))
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				c := dial(b, s, network)
				for pb.Next() {
					c.ask(raw)
				}
			})
		})
	}
}

// BenchmarkRefuse is an answer that is made here: what remains is our part of
// the work.
func BenchmarkRefuse(b *testing.B) {
	s := start(b, external())
	raw := pack(b, query("x.cluster.local.", true))
	from := s.Addrs()[0]
	b.ReportAllocs()
	for b.Loop() {
		s.handle(b.Context(), &clientQuery{raw: raw, from: from})
	}
}
