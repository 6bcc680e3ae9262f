package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// looker is a program that looks names up at a steady rate, for as long as the test goes.
type looker struct {
	name   string
	rate   int // per second
	cmd    *lab.Cmd
	stdin  io.Closer
	output bytes.Buffer
}

// lookers start 200 lookups a second in sum, of names in the cluster and outside, with all kinds of resolvers.
func (h *host) lookers() []*looker {
	h.t.Helper()
	// While the host is not attached, the outside has an answer for any name.
	names := []string{
		lab.Backend + "=" + lab.Backend4 + "," + lab.OutsideAnswer, lab.WWW + "=" + lab.WWW4,
		lab.Kubernetes + "=" + lab.Kubernetes4 + "," + lab.OutsideAnswer,
	}
	all := []*looker{
		{name: "goloop go", rate: 50}, {name: "goloop go-tcp", rate: 30}, {name: "goloop udp", rate: 30}, {name: "goloop tcp", rate: 30},
		{name: "glibcloop", rate: 30}, {name: "muslloop", rate: 30},
	}
	for _, l := range all {
		words := strings.Fields(l.name)
		path, err := lab.Helper(words[0])
		if err != nil {
			h.t.Fatal(err)
		}
		// Ended by the end of its standard input, which also comes if this process dies.
		l.cmd = h.Host().Command(context.Background(), path, slices.Concat(words[1:], []string{strconv.Itoa(l.rate)}, names)...)
		l.cmd.Dir, l.cmd.Env = "/", environment
		l.cmd.Stdout, l.cmd.Stderr = &l.output, &l.output
		if l.stdin, err = l.cmd.StdinPipe(); err != nil {
			h.t.Fatal(err)
		}
		if err := l.cmd.Start(); err != nil {
			h.t.Fatal(err)
		}
		h.t.Cleanup(func() { _, _ = l.end() })
	}
	return all
}

// end ends the program, for good the first time, and returns what it wrote.
func (l *looker) end() (string, error) {
	l.stdin.Close()
	err := l.cmd.Wait()
	return l.output.String(), err
}

// endLookers ends the programs, and returns how many lookups there were, how many of them failed, and the longest.
func endLookers(t *testing.T, lookers []*looker) (sum, failed int, longest time.Duration) {
	t.Helper()
	for _, l := range lookers {
		out, err := l.end()
		lines := strings.Split(strings.TrimSpace(out), "\n")
		var lookups, failures int
		var us int64
		if _, scanErr := fmt.Sscanf(lines[len(lines)-1], "%d %d %d", &lookups, &failures, &us); err != nil || scanErr != nil {
			t.Errorf("%s: %v: %s", l.name, err, out)
			continue
		}
		took := time.Duration(us) * time.Microsecond
		t.Logf("%-14s %6d lookups, %d failed, the longest took %s", l.name, lookups, failures, took)
		if failures > 0 {
			t.Logf("%s: %d of %d lookups failed:\n%s", l.name, failures, lookups, strings.Join(lines[:min(20, len(lines)-1)], "\n"))
		}
		sum, failed, longest = sum+lookups, failed+failures, max(longest, took)
	}
	return sum, failed, longest
}

// TestNoGap: programs of every kind look names up while the host is attached and detached again and again, and at last
// stays detached until the daemon has lingered. No lookup fails.
func TestNoGap(t *testing.T) { noGap(t, 5) }

// TestLongRunNoGap is TestNoGap with fifty cycles.
func TestLongRunNoGap(t *testing.T) { noGap(t, share(t, 50)) }

func noGap(t *testing.T, cycles int) {
	t.Helper()
	h := raise(t, lab.Options{})
	before := h.snapshot()
	lookers := h.lookers()
	begin := time.Now()
	var attach, detach []time.Duration
	for range cycles {
		r := h.run(attachArgs()...)
		if r.code != 0 || !strings.HasPrefix(r.stdout, "attached: ") {
			t.Fatal(r)
		}
		attach = append(attach, r.took)
		if r = h.run("detach"); r.code != 0 || !strings.Contains(r.stdout, "lingers") {
			t.Fatal(r)
		}
		detach = append(detach, r.took)
	}
	cycling := time.Since(begin)
	h.lingered()
	total := time.Since(begin)

	sum, failed, longest := endLookers(t, lookers)
	if failed > 0 {
		t.Errorf("%d of %d lookups failed", failed, sum)
	}
	slices.Sort(attach)
	slices.Sort(detach)
	t.Logf("%d cycles in %s: %d lookups, %.0f per second, the longest took %s; median of attach %s, of detach %s",
		cycles, cycling.Round(time.Second), sum, float64(sum)/total.Seconds(), longest, attach[cycles/2], detach[cycles/2])
	if sum < 50*cycles {
		t.Errorf("only %d lookups in %s", sum, total)
	}
	h.unchanged(before)
}
