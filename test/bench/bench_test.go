package main

import (
	"strings"
	"testing"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// The benchmark must not rot: every contest is held once, for a moment. Its figures mean nothing, and none is judged.
func TestSmoke(t *testing.T) {
	l := lab.Start(t, lab.Options{})
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
	if err := results.write(&report); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"dnsmasq", "unbound", "CoreDNS with cache", "steered minus direct"} {
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
	got, err := parse(out)
	if err != nil {
		t.Fatal(err)
	}
	want := Turn{Rate: 25000.5, Latency: 250 * time.Microsecond, Completed: 1000, Lost: 3, Wrong: 2}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, err := parse("dnsperf: unable to open the query file\n"); err == nil {
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
