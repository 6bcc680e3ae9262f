//go:build linux

package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/sample"
)

// assembler makes messages at random that are about as often good as bad.
type assembler struct {
	random *rand.Rand
	whole  [][]byte // what mutated starts from
}

func newAssembler(tb testing.TB, random *rand.Rand) assembler {
	tb.Helper()
	whole := slices.DeleteFunc(fuzzSeeds(tb), func(m []byte) bool { return len(m) == 0 })
	return assembler{random, append(whole, query(tb, "a", withOPT(4096)), query(tb, "x.b.a", withOPT(1233)), query(tb, "Local"))}
}

func (a assembler) oneOf(parts ...string) string { return parts[a.random.IntN(len(parts))] }

// mostly gives a bad part seldom enough that about half of all messages have none.
func (a assembler) mostly(good string, bad ...string) string {
	if a.random.IntN(20) > 0 {
		return good
	}
	return a.oneOf(bad...)
}

// assemble puts a message together from good and bad parts, which mutations of whole ones seldom hit.
func (a assembler) assemble() []byte {
	oneOf, mostly := a.oneOf, a.mostly
	header := binary.BigEndian.AppendUint16(nil, uint16(a.random.Uint32()))
	header = append(header, mostly(oneOf("\x01\x00", "\x00\x00", "\x01\x20", "\x07\xff"), "\x81\x00", "\x09\x00", "\x78\x00")...)
	header = append(header, mostly("\x00\x01", "\x00\x00", "\x00\x02", "\x01\x00")...)
	header = append(header, mostly("\x00\x00\x00\x00", "\x00\x01\x00\x00", "\x00\x00\x00\x01")...)
	name := ""
	for range a.random.IntN(4) {
		name += oneOf("\x01a", "\x01b", "\x01A", "\x07cluster", "\x05local", "\x0dcluster.local", "\x01\xae", "\x02\x01a", "\x3f"+strings.Repeat("y", 63))
	}
	name += mostly(oneOf("\x00", "\x07cluster\x05local\x00", "\x07CLUSTER\x05LOCAL\x00", "\x01b\x01a\x00"),
		"\xc0\x0c", "\x40\x00", "\x40"+strings.Repeat("z", 64)+"\x01a\x00", strings.Repeat("\x01a", 60+a.random.IntN(70))+"\x00", "")
	name += oneOf("\x00\x01", "\x00\x1c", "\xff\xff") + mostly("\x00\x01", "\x00\x03", "\x01\x00", "")
	arcount, additional := oneOf("\x00\x00", "\x00\x01"), ""
	if arcount == "\x00\x01" {
		additional = mostly("\x00", "\x01a\x00") + mostly("\x00\x29", "\x00\x01") + oneOf("\x02\x00", "\x10\x00", "\x00\x00") + oneOf("\x00", "\x01") +
			mostly("\x00", "\x01") + oneOf("\x00\x00", "\x80\x00") +
			mostly(oneOf("\x00\x00", "\x00\x04\x00\x03\x00\x00"), "\x00\x05\x00\x03\x00\x00", "\x00\x03\x00\x03\x00\x00", "")
	}
	arcount = mostly(arcount, "\x00\x00", "\x00\x01", "\x00\x02", "\x01\x00")
	return slices.Concat(header, []byte(arcount+name+additional+mostly("", "\x00")))
}

// mutate changes a whole message in one to four places, most of them in its question.
func (a assembler) mutate() []byte {
	random := a.random
	message := slices.Clone(a.whole[random.IntN(len(a.whole))])
	for range 1 + random.IntN(4) {
		if len(message) == 0 {
			break
		}
		at := random.IntN(len(message))
		switch random.IntN(10) {
		case 0:
			message = message[:at]
		case 1:
			message = slices.Insert(message, at, byte(random.Uint32()))
		case 2:
			message = slices.Delete(message, at, at+1)
		case 3:
			other := a.whole[random.IntN(len(a.whole))]
			message = append(message[:at:at], other[min(at, len(other)):]...)
		case 4:
			message[at] = []byte{0, 1, 0x2e, 0x3f, 0x40, 0x80, 0xc0, 0xff}[random.IntN(8)]
		case 5:
			// An octet more or less is what a length is wrong by.
			message[at] += byte(1 - 2*random.IntN(2))
		case 6:
			// Any ID, and another letter case.
			message[random.IntN(min(2, len(message)))] = byte(random.Uint32())
			message[at] ^= 0x20
		default:
			message[at] ^= 1 << random.IntN(8)
		}
	}
	return message
}

// draw returns a message, assembled or mutated.
func (a assembler) draw() []byte {
	if a.random.IntN(2) == 0 {
		return a.assemble()
	}
	return a.mutate()
}

// outcome is what becomes of a message, by the reference.
type outcome struct{ steered, external bool }

func referenceOutcome(payload []byte, zones []string) outcome {
	if !referenceQuery(payload).plain {
		return outcome{}
	}
	steered := referenceSteered(payload, zones)
	return outcome{steered, !steered}
}

// differ runs a frame and compares verdict and octets with the reference. It counts nothing.
func (h *harness) differ(program *ebpf.Program, f family, frame, room []byte, want outcome) error {
	run := ebpf.RunOptions{Data: frame, DataOut: room}
	code, err := program.Run(&run)
	if err != nil {
		return err
	}
	verdict, wanted := verdictName(code), map[bool]string{true: "redirect", false: "pass"}[want.steered]
	if verdict != wanted {
		return fmt.Errorf("kernel: %s, reference: %s", verdict, wanted)
	}
	out := run.DataOut
	if !want.steered {
		if !bytes.Equal(out, frame) {
			return fmt.Errorf("passed, but changed\nout: %s", pktgen.Dump(out))
		}
		return nil
	}
	if len(out) != len(frame) {
		return fmt.Errorf("%d octets became %d", len(frame), len(out))
	}
	natPort := binary.BigEndian.Uint16(out[f.dnsOffset-pktgen.UDPLength:])
	if natPort < h.options.NATPorts.First || natPort > h.options.NATPorts.Last {
		return fmt.Errorf("NAT port %d is outside of %v", natPort, h.options.NATPorts)
	}
	if octets := referenceSteering(frame, f, natPort); !bytes.Equal(out, octets) {
		return fmt.Errorf("steered\ngot: %s\nwant: %s", pktgen.Dump(out), pktgen.Dump(octets))
	}
	// There are more such queries in a test than slots.
	return h.objects.DnsFlows.Put(uint32(natPort-h.options.NATPorts.First), dnsbpfDnsFlow{})
}

// TestDifferential is TestLongRunDifferential with fewer messages.
func TestDifferential(t *testing.T) { differential(t, 20_000) }

// TestLongRunDifferential gives kernel and reference the same messages, in packets of random askers, and compares verdict,
// octets and counters.
func TestLongRunDifferential(t *testing.T) { differential(t, sample.Share(t, 1_000_000)) }

func differential(t *testing.T, messages int) {
	t.Helper()
	const batch = 500 // between two looks at the counters
	random := sample.Random(t)
	zones := []string{testZone, "a", "b.a", "local"}
	h := newHarness(t, zones...)
	programs := []*ebpf.Program{h.objects.DnsFromHost, h.objects.DnsFromClient}
	a := newAssembler(t, random)
	room := make([]byte, 4096)
	none := func(frame *pktgen.Frame) { frame.NoUDPChecksum = true }
	counts, paths := make(map[string]uint64), make(map[string]uint64)
	began := time.Now()
	for done := 0; done < messages; done += batch {
		want := make(map[string]uint64)
		for range min(batch, messages-done) {
			way := random.IntN(4)
			f := families[way%2]
			address := f.client.Addr().AsSlice()
			for i := range 4 { // of IPv6, the last ones
				address[len(address)-1-i] = byte(random.Uint32())
			}
			source, _ := netip.AddrFromSlice(address)
			f.client = netip.AddrPortFrom(source, uint16(random.Uint32()))
			var options []pktgen.Option
			if source.Is4() && random.IntN(8) == 0 {
				options = append(options, none)
			}
			message := a.draw()
			frame := f.query(message, options...)
			result := referenceOutcome(message, zones)
			if err := h.differ(programs[way/2], f, frame, room, result); err != nil {
				t.Fatalf("after %d messages, %s: %v\nin: %s", done, queryPrograms[way/2], err, pktgen.Dump(frame))
			}
			switch {
			case result.steered:
				want["kubeswitch:steered"]++
			case result.external:
				want["kubeswitch:passed_external"]++
			default:
				want["not plain"]++
			}
			paths[fmt.Sprintf("%s over %s", queryPrograms[way/2], f.name)]++
		}
		got := make(map[string]uint64)
		for reason, count := range h.countedSince(t) {
			if reason != "kubeswitch:steered" && reason != "kubeswitch:passed_external" {
				reason = "not plain"
			}
			got[reason] += count
		}
		if !maps.Equal(got, want) {
			t.Fatalf("messages %d to %d: counted %v, want %v", done, done+batch, got, want)
		}
		for reason, count := range want {
			counts[reason] += count
		}
	}
	h.wantInFlight(t, 0)
	t.Logf("no difference: %v; %v; %v", counts, paths, time.Since(began).Round(time.Millisecond))
}
