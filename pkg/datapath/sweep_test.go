//go:build linux

package datapath

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/sample"
)

// steered is what a sweep compares: whether the kernel took a frame, and that it counted it once, or not at all.
func (h *harness) steered(tb testing.TB, program Program, frame []byte) (steered, counted bool) {
	tb.Helper()
	verdict, out := h.run(tb, program, frame, nil)
	delta := h.countedSince(tb)
	switch {
	case len(delta) > 1 || verdict != "pass" && delta["kubeswitch:steered"] != 1 || verdict == "pass" && delta["kubeswitch:steered"] != 0:
		tb.Fatalf("%s: verdict %s, counted %v\n%s", program, verdict, delta, pktgen.Dump(frame))
	case verdict == "pass" && !bytes.Equal(out, frame):
		tb.Fatalf("%s: passed, but changed\nin: %s\nout: %s", program, pktgen.Dump(frame), pktgen.Dump(out))
	}
	for _, count := range delta {
		if count != 1 {
			tb.Fatalf("%s: counted %v\n%s", program, delta, pktgen.Dump(frame))
		}
	}
	if verdict != "redirect" {
		return false, len(delta) == 1
	}
	sent, err := pktgen.Parse(out)
	if err != nil {
		tb.Fatalf("%s: steered packet: %v\nin: %s\nout: %s", program, err, pktgen.Dump(frame), pktgen.Dump(out))
	}
	// There are more such queries in a test than slots.
	h.free(tb, sent.Source.Port())
	return true, len(delta) == 1
}

// free gives the slot of a NAT port back.
func (h *harness) free(tb testing.TB, natPort uint16) {
	tb.Helper()
	if err := h.objects.DnsFlows.Put(uint32(natPort-h.options.NATPorts.First), dnsbpfDnsFlow{}); err != nil {
		tb.Fatal(err)
	}
}

func sweepMessages(t *testing.T) [][]byte {
	t.Helper()
	return [][]byte{
		query(t, "cluster.local"),
		query(t, inZone, withOPT(4096, &dns.EDNS0_COOKIE{Cookie: "0102030405060708"})),
		query(t, "example.com"),
		rawQuery(many(120)),
	}
}

// Each prefix of a frame that the kernel's test run takes: only the whole one is steered, and one that is cut within
// its headers is not even counted.
func TestTruncationSweep(t *testing.T) {
	h := newHarness(t)
	count := 0
	for _, f := range families {
		for _, program := range queryPrograms {
			for _, message := range sweepMessages(t) {
				frame := f.query(message)
				for length := f.shortest; length <= len(frame); length++ {
					steered, counted := h.steered(t, program, slices.Clone(frame[:length]))
					wantSteered := length == len(frame) && referenceSteered(message, []string{testZone})
					if wantCounted := length >= f.dnsOffset; steered != wantSteered || counted != wantCounted {
						t.Errorf("%s, %s, %d of %d octets: steered %v, counted %v; want %v, %v\n%s",
							program, f.name, length, len(frame), steered, counted, wantSteered, wantCounted, pktgen.Dump(frame[:length]))
					}
					count++
				}
			}
		}
	}
	t.Logf("%d frames", count)
}

// Each single bit of the message, and each octet replaced by some that are near a limit.
func TestMutationSweep(t *testing.T) {
	h := newHarness(t)
	counts := make(map[bool]int)
	compare := func(f family, program Program, message []byte) {
		frame := f.query(message)
		steered, counted := h.steered(t, program, frame)
		if want := referenceSteered(message, []string{testZone}); steered != want || !counted {
			t.Errorf("%s: steered %v, counted %v; reference: %v\n%s", program, steered, counted, want, pktgen.Dump(frame))
		}
		counts[steered]++
	}
	random := sample.Random(t)
	for _, f := range families {
		for _, program := range queryPrograms {
			for _, message := range sweepMessages(t) {
				// An ID of its own for each run: no flow is in another's way.
				mutate := func(at int, octet byte) {
					changed := put(message, 0, byte(random.Uint32()), byte(random.Uint32()))
					changed[at] = octet
					compare(f, program, changed)
				}
				for bit := range 8 * len(message) {
					mutate(bit/8, message[bit/8]^1<<(bit%8))
				}
				for at := range message {
					for _, octet := range []byte{0, 1, 0x2e, 0x3f, 0x40, 0x80, 0xae, 0xc0, 0xff} {
						mutate(at, octet)
					}
				}
			}
		}
	}
	t.Logf("steered: %v", counts)
}

// fuzzSeeds are payloads that lie near each of the limits.
func fuzzSeeds(tb testing.TB) [][]byte {
	tb.Helper()
	opt := query(tb, inZone, withOPT(4096, &dns.EDNS0_NSID{Code: dns.EDNS0NSID}))
	return [][]byte{
		nil, []byte(strings.Repeat("\x00", 12)), query(tb, "."), query(tb, testZone), query(tb, inZone), query(tb, "example.com"),
		opt, put(opt, len(opt)-1, 1), rawQuery(many(120)), rawQuery(many(121)), rawQuery("\xc0\x0c"),
		rawQuery(labels("\x07cluster\x05local")), query(tb, "x.a.b"), query(tb, "x.ab", withOPT(512)),
	}
}

// FuzzQuery gives the kernel and the reference the same payload, and compares verdict, octets and the count.
func FuzzQuery(f *testing.F) {
	for _, seed := range fuzzSeeds(f) {
		f.Add(seed, uint8(0))
		f.Add(seed, uint8(3))
	}
	zones := []string{testZone, "b", "ab", "x.a.b"}
	h := newHarness(f, zones...)
	f.Fuzz(func(t *testing.T, payload []byte, path uint8) {
		// The kernel's test run takes frames of up to a page.
		if len(payload) > 2000 {
			t.Skip("too long for a test run")
		}
		family, name := families[path%2], queryPrograms[path/2%2]
		program, err := h.program(name)
		if err != nil {
			t.Fatal(err)
		}
		h.countedSince(t)
		frame, want := family.query(payload), referenceOutcome(payload, zones)
		if err := h.differ(program, family, frame, make([]byte, 4096), want); err != nil {
			t.Errorf("%s: %v\nin: %s", name, err, pktgen.Dump(frame))
		}
		counted := h.countedSince(t)
		for reason, count := range counted {
			if len(counted) != 1 || count != 1 || want != (outcome{reason == "kubeswitch:steered", reason == "kubeswitch:passed_external"}) {
				t.Errorf("%s: counted %v; reference: %+v\n%s", name, counted, want, pktgen.Dump(frame))
			}
		}
		if len(counted) == 0 {
			t.Errorf("%s: not counted\n%s", name, pktgen.Dump(frame))
		}
	})
}

// forgetSteered empties the flow map: the same payload comes again and again.
func (h *harness) forgetSteered(tb testing.TB) {
	tb.Helper()
	slots := make([]uint32, natPortsMax)
	for slot := range slots {
		slots[slot] = uint32(slot)
	}
	if _, err := h.objects.DnsFlows.BatchUpdate(slots, make([]dnsbpfDnsFlow, natPortsMax), nil); err != nil {
		tb.Fatal(err)
	}
}

// Messages put together from good and bad parts, which mutations of whole ones seldom hit.
func TestAssembledMessages(t *testing.T) {
	const runs = 20000
	random := sample.Random(t)
	zones := []string{testZone, "a", "b.a", "local"}
	h := newHarness(t, zones...)
	a := newAssembler(t, random)
	counts := make(map[bool]int)
	for range runs {
		message := a.assemble()
		f, program := families[random.IntN(2)], queryPrograms[random.IntN(2)]
		frame := f.query(message)
		steered, counted := h.steered(t, program, frame)
		if want := referenceSteered(message, zones); steered != want || !counted {
			t.Fatalf("%s: steered %v, counted %v; reference: %v\n%s", program, steered, counted, want, pktgen.Dump(frame))
		}
		counts[steered]++
	}
	t.Logf("steered: %v", counts)
}
