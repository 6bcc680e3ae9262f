package main

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// The benchmark must not rot: every contest is held once, for a moment. Its figures mean nothing, and none is judged.
func TestSmoke(t *testing.T) {
	l := lab.Start(t, labOptions)
	results, err := measure(t.Context(), l, smokeOptions)
	if err != nil {
		t.Fatal(err)
	}
	for _, contest := range results.Contests {
		for _, one := range contest.Contestants {
			if len(one.Turns) != smokeOptions.Rounds {
				t.Errorf("%s: %s had %d turns, want %d", contest.Title, one.Name, len(one.Turns), smokeOptions.Rounds)
			}
			for _, turn := range one.Turns {
				if turn.Wrong > 0 {
					t.Errorf("%s: %s gave %d answers other than NOERROR, of %d", contest.Title, one.Name, turn.Wrong, turn.Completed)
				}
			}
		}
	}
	var report strings.Builder
	if err := results.markdown(&report); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"dnsmasq", "unbound", "CoreDNS, cache", "Knot", "systemd-resolved", "NodeLocal", "Steered minus direct", "confidence"} {
		if !strings.Contains(report.String(), want) {
			t.Errorf("%q is not in the report:\n%s", want, report.String())
		}
	}
	if testing.Verbose() {
		t.Log("\n" + report.String())
	}
}

func TestParse(t *testing.T) {
	const out = `Statistics:

  Queries sent:         1003
  Queries completed:    1000 (99.70%)
  Queries lost:         3 (0.30%)

  Response codes:       NOERROR 998 (99.80%), SERVFAIL 2 (0.20%)
  Average packet size:  request 58, response 120
  Run time (s):         0.040000
  Queries per second:   25000.500000

  Average Latency (s):  0.000250 (min 0.000100, max 0.012345)
`
	got, err := parse(out, false)
	if err != nil {
		t.Fatal(err)
	}
	want := Turn{Rate: 25000.5, Latency: 250 * time.Microsecond, Completed: 1000, Lost: 3, Wrong: 2}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, err := parse("dnsperf: unable to open the query file\n", false); err == nil {
		t.Error("output without figures was taken for a measurement")
	}
}

func TestMedianAndPercentile(t *testing.T) {
	if got := median([]float64{9, 1, 5}); got != 5 {
		t.Errorf("median of three: %v, want the middle one, 5", got)
	}
	if got := median([]float64{4, 1, 2, 9}); got != 3 {
		t.Errorf("median of four: %v, want 3, between the middle ones", got)
	}
	var times []time.Duration
	for i := range 100 {
		times = append(times, time.Duration(100-i))
	}
	for part, want := range map[float64]time.Duration{0: 1, 0.5: 51, 0.99: 100} {
		if got := percentile(times, part); got != want {
			t.Errorf("percentile %v of 1..100: %d, want %d", part, got, want)
		}
	}
}

// A list of a frequent name and rare ones, two queries a second: what is kept, and for how long, decides.
func TestIdealHits(t *testing.T) {
	asked := []question{{"a", 1}, {"b", 1}, {"a", 1}, {"c", 1}}
	for _, c := range []struct {
		size      int
		ttl, warm time.Duration
		want      float64
	}{
		{3, time.Hour, 2 * time.Second, 1},
		{3, time.Hour, 0, 5.0 / 8},                  // each name is fetched once
		{1, time.Hour, 2 * time.Second, 0.5},        // only the frequent one fits
		{3, 2 * time.Second, 2 * time.Second, 0.25}, // at 0 s all of a round, at 2 s again
		{0, time.Hour, 2 * time.Second, 0},
	} {
		if got := idealHits(asked, c.size, c.ttl, c.warm, 4*time.Second, 2); got != c.want {
			t.Errorf("%d names for %v after %v: %v hits, want %v", c.size, c.ttl, c.warm, got, c.want)
		}
	}
}

func TestGoals(t *testing.T) {
	turns := func(rates ...float64) (all []Turn) {
		for _, r := range rates {
			all = append(all, Turn{Rate: r, Machine: 1000 / r, Completed: 1})
		}
		return all
	}
	contest := &Contest{
		Title: "hot", Load: hot, From: fromHost, Threads: 1,
		Contestants: []*Contestant{
			{Name: directly, Turns: turns(10, 20, 40)}, {Name: theFloor, Turns: turns(100, 100, 100)},
			{Name: answered, Turns: turns(95, 50, 95)}, {Name: steered, Turns: turns(9, 20, 39)},
			{Name: "dnsmasq", Turns: turns(40, 40, 40)}, {Name: "unbound", Turns: turns(50, 50, 50)}, {Name: corednsName, Turns: turns(20, 20, 20)},
		},
	}
	results := &Results{Contests: []*Contest{contest}, Loopback: &Loopback{Ratios: []float64{0.98, 0.99, 0.97}}}
	got := make(map[string]bool)
	for _, g := range results.goals() {
		what, _, _ := strings.Cut(g.what, ":")
		got[what] = g.reached()
	}
	want := map[string]bool{
		"answered, rate of the floor's": true, "answered, rate of dnsmasq's": true, "answered, rate of unbound's": false,
		"answered, CPU above the floor's, of dnsmasq's": true, "answered, CPU above the floor's, of CoreDNS with cache's": true,
		"steered, rate of direct": true, "steered, CPU of direct": true, "attached, rate of detached": false,
	}
	if !maps.Equal(want, got) {
		t.Errorf("reached: %v, want %v", got, want)
	}
}

func TestMedianInterval(t *testing.T) {
	var values []float64
	for i := range 100 {
		values = append(values, float64(99-i))
	}
	if low, high := medianInterval(values); low != 40 || high != 60 {
		t.Errorf("of 0 to 99: %v to %v, want 40 to 60", low, high)
	}
	if low, high := medianInterval([]float64{3}); low != 3 || high != 3 {
		t.Errorf("of one: %v to %v", low, high)
	}
}

func TestTableIsAligned(t *testing.T) {
	var text strings.Builder
	writeTable(&text, [][]string{{"", "q/s"}, {"k2s", "12345"}})
	const want = "|     |   q/s |\n|-----|------:|\n| k2s | 12345 |\n\n"
	if text.String() != want {
		t.Errorf("got\n%swant\n%s", text.String(), want)
	}
}

// A server that gives no answer to each tenth query, two to the next, and SERVFAIL to the one after.
func TestPacer(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		t.Fatal(err)
	}
	const queries = 100
	served := make(chan error, 1)
	go func() {
		var buffer [512]byte
		for i := range queries {
			n, err := unix.Read(fds[1], buffer[:])
			if err != nil {
				served <- err
				return
			}
			buffer[2] |= 0x80
			buffer[3] = 0
			if i%10 == 2 {
				buffer[3] = dns.RcodeServerFailure
			}
			for range []int{0, 2, 1, 1, 1, 1, 1, 1, 1, 1}[i%10] {
				if _, err := unix.Write(fds[1], buffer[:n]); err != nil {
					served <- err
					return
				}
			}
		}
		served <- nil
	}()
	query, err := new(dns.Msg).SetQuestion("a.example.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	p := pacer{fd: fds[0], queries: [][]byte{query}, interval: time.Millisecond}
	turn, err := p.run(queries)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-served; err != nil {
		t.Fatal(err)
	}
	if turn.Completed != 90 || turn.Lost != 10 || turn.Wrong != 10 {
		t.Errorf("%d completed, %d lost, %d wrong: want 90, 10, 10", turn.Completed, turn.Lost, turn.Wrong)
	}
	if turn.P99 < patience {
		t.Errorf("p99 %v: want at least %v, since a tenth was lost", turn.P99, patience)
	}
	for _, fd := range fds {
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	}
}
