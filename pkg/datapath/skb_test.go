//go:build linux

package datapath

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// What a socket buffer has beside the octets of its frame.

const (
	skbMark     skbField = 8
	skbPriority skbField = 32
)

// grows is in the names of packets that become longer.
const grows = ", cached"

// way is a packet that a program rewrites.
type way struct {
	name    string
	program *ebpf.Program
	verdict string
	frame   []byte
}

// eachWay visits a query each way in with its reply, and a query that becomes its own failure or is answered from the
// cache; over both IP versions,
// with and without an OPT record that changes, and without a checksum. The flow of a reply is open.
func eachWay(t *testing.T, visit func(t *testing.T, w way)) {
	t.Helper()
	h, failing, cached, truncated := newHarness(t), newHarness(t), newHarness(t), newHarness(t)
	failing.replaceScope(t, ScopeShared)
	failing.replaceAllowed(t, netip.PrefixFrom(client4.Addr(), 32), netip.PrefixFrom(client6.Addr(), 128))
	failing.replaceZones(t, []string{testZone})
	run := func(name string, h *harness, program Program, verdict string, frame []byte) {
		loaded, err := h.program(program)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name+"/"+string(program), func(t *testing.T) { visit(t, way{name, loaded, verdict, frame}) })
		h.countedSince(t)
	}
	none := func(frame *pktgen.Frame) { frame.NoUDPChecksum = true }
	for _, f := range families {
		for name, message := range map[string][]byte{
			"plain": query(t, inZone), "EDNS": query(t, inZone, withOPT(4096)), "EDNS at an odd offset": query(t, "odd."+inZone, withOPT(4096)),
		} {
			name = f.name + "/" + name
			for _, program := range queryPrograms {
				run(name, h, program, "redirect", f.query(message))
				q := h.steer(t, program, f, f.query(message))
				run(name+", reply", h, FromBackend, "redirect", replyFrame(q, answer(t, q)))
				if f.client.Addr().Is4() {
					run(name+", no checksum", h, program, "redirect", f.query(message, none))
					q := h.steer(t, program, f, f.query(message))
					run(name+", no checksum, reply", h, FromBackend, "redirect", replyFrame(q, answer(t, q), none))
				}
			}
			var asked dns.Msg
			if err := asked.Unpack(message); err != nil {
				t.Fatal(err)
			}
			cached.give(t, made(t, message, asked.Question[0].Name+" 5 IN A 172.21.0.10"))
			truncated.give(t, made(t, message, addresses(strings.TrimSuffix(asked.Question[0].Name, "."), 60)...))
			for program, verdict := range map[Program]string{FromHost: "ok", FromClient: "redirect"} {
				run(name+", failure", failing, program, verdict, f.query(message))
				run(name+grows, cached, program, verdict, f.query(message))
				if asked.IsEdns0() == nil {
					run(name+", truncated", truncated, program, verdict, f.query(message))
				}
				if f.client.Addr().Is4() {
					run(name+", no checksum, failure", failing, program, verdict, f.query(message, none))
					run(name+", no checksum"+grows, cached, program, verdict, f.query(message, none))
					if asked.IsEdns0() == nil {
						run(name+", no checksum, truncated", truncated, program, verdict, f.query(message, none))
					}
				}
			}
		}
	}
}

// The asker's mark would choose our route, and its priority our queue.
func TestForgetSender(t *testing.T) {
	marked := skbContext(skbMark, 0x2a)
	binary.NativeEndian.PutUint32(marked[skbPriority:], 6)
	run := func(t *testing.T, w way) (mark, priority uint32) {
		t.Helper()
		after := make([]byte, len(marked))
		code, err := w.program.Run(&ebpf.RunOptions{Data: w.frame, DataOut: make([]byte, len(w.frame)+2048), Context: marked, ContextOut: after})
		if err != nil {
			t.Fatal(err)
		}
		if verdict := verdictName(code); verdict != w.verdict {
			t.Errorf("verdict %s, want %s", verdict, w.verdict)
		}
		return binary.NativeEndian.Uint32(after[skbMark:]), binary.NativeEndian.Uint32(after[skbPriority:])
	}
	eachWay(t, func(t *testing.T, w way) {
		if mark, priority := run(t, w); mark != 0 || priority != 0 {
			t.Errorf("mark %#x, priority %d", mark, priority)
		}
	})
	t.Run("passed", func(t *testing.T) {
		external := pktgen.UDP(client4, listener4, query(t, "www.example.com"))
		if mark, priority := run(t, way{"", newHarness(t).objects.DnsFromHost, "pass", external}); mark != 0x2a || priority != 6 {
			t.Errorf("mark %#x, priority %d", mark, priority)
		}
	})
}

// testChecksumComplete is BPF_F_TEST_SKB_CHECKSUM_COMPLETE of BPF_PROG_TEST_RUN (include/uapi/linux/bpf.h): the frame
// is summed up as a device may do it, and the run fails with EBADMSG if the sum is not right any more afterwards.
const testChecksumComplete = 1 << 2

// A device's sum over the whole packet stays right.
func TestChecksumComplete(t *testing.T) {
	run := func(program *ebpf.Program, frame []byte) (verdict string, err error) {
		code, err := program.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+2048), Flags: testChecksumComplete})
		return verdictName(code), err
	}
	frame := families[0].query(nil)
	if _, err := run(newHarness(t).objects.DnsFromHost, frame); errors.Is(err, unix.EINVAL) {
		t.Skip("a test run of this kernel does not sum up a frame: that came with 6.15")
	}
	eachWay(t, func(t *testing.T, w way) {
		if strings.HasSuffix(w.name, grows) {
			return // the kernel lets go of a device's sum then, but a test run compares what is left of it
		}
		verdict, err := run(w.program, w.frame)
		switch {
		case errors.Is(err, unix.EBADMSG):
			t.Error("the sum is wrong")
		case err != nil:
			t.Fatal(err)
		case verdict != w.verdict:
			t.Errorf("verdict %s, want %s", verdict, w.verdict)
		}
	})
}
