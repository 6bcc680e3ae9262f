package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// HostInfo says what the figures were measured on and with.
type HostInfo struct {
	CPU      string
	CPUs     int
	Kernel   string
	Versions []string
}

func describe(ctx context.Context, l *lab.Lab, binary string) (HostInfo, error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return HostInfo{}, err
	}
	host := HostInfo{CPU: "unknown CPU", CPUs: runtime.NumCPU(), Kernel: unix.ByteSliceToString(uts.Release[:])}
	info, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return HostInfo{}, err
	}
	defer info.Close()
	for scanner := bufio.NewScanner(info); scanner.Scan(); {
		if key, value, ok := strings.Cut(scanner.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			host.CPU = strings.TrimSpace(value)
			break
		}
	}
	coredns, err := lab.Helper("coredns")
	if err != nil {
		return HostInfo{}, err
	}
	for _, argv := range [][]string{
		{binary, "version"}, {coredns, "-version"}, {"dnsmasq", "--version"}, {"unbound", "-V"}, {"dnsperf", "-h"},
	} {
		// unbound ends with 1 after it has said its version.
		out, err := l.Host().Command(ctx, argv[0], argv[1:]...).CombinedOutput()
		version := versionLine(string(out))
		if version == "" {
			return HostInfo{}, fmt.Errorf("ask %s for its version: %w: %q", argv[0], err, out)
		}
		if strings.HasPrefix(version, "Version ") { // unbound and dnsperf leave out whose
			version = argv[0] + " " + strings.TrimPrefix(version, "Version ")
		}
		host.Versions = append(host.Versions, version)
	}
	return host, nil
}

// versionLine finds the line that has the version, without what follows it.
func versionLine(out string) string {
	for line := range strings.Lines(out) {
		if line = strings.TrimSpace(line); strings.Contains(line, "ersion ") || strings.HasPrefix(line, "CoreDNS-") || strings.HasPrefix(line, ours) {
			line, _, _ = strings.Cut(line, "  ")
			return line
		}
	}
	return ""
}

// median over the turns of a contestant.
func (c *Contestant) median(of func(Turn) float64) float64 {
	var values []float64
	for _, t := range c.Turns {
		values = append(values, of(t))
	}
	return median(values)
}

// ratio is the median over the rounds of c's figure divided by other's in the same round.
func (c *Contestant) ratio(other *Contestant, of func(Turn) float64) float64 {
	var values []float64
	for i, t := range c.Turns {
		values = append(values, of(t)/of(other.Turns[i]))
	}
	return median(values)
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	middle := len(values) / 2
	if len(values)%2 == 1 {
		return values[middle]
	}
	return (values[middle-1] + values[middle]) / 2
}

var (
	rate      = func(t Turn) float64 { return t.Rate }
	mean      = func(t Turn) float64 { return microseconds(t.Latency) }
	front     = func(t Turn) float64 { return t.Front }
	back      = func(t Turn) float64 { return t.Back }
	generator = func(t Turn) float64 { return t.Generator }
	sum       = Turn.Sum
	machine   = func(t Turn) float64 { return t.Machine }
)

// other tells how far the machine was from quiet: above some per cent, no single rate means much.
func (r *Results) other() float64 {
	var values []float64
	for _, contest := range r.Contests {
		for _, one := range contest.Contestants {
			for _, turn := range one.Turns {
				values = append(values, turn.Other)
			}
		}
	}
	return median(values)
}

func (r *Results) write(w io.Writer) error {
	fmt.Fprintf(w, "%s, %d CPUs, Linux %s; %.0f %% of their time went to other work (median over the turns)\n",
		r.Host.CPU, r.Host.CPUs, r.Host.Kernel, 100*r.other())
	fmt.Fprintf(w, "%s\n", strings.Join(r.Host.Versions, "; "))
	fmt.Fprintf(w, "%d rounds (external names: %d) of %v each, in turn; dnsperf -e -c 8 -T 1 -q %d; medians; took %.0f s\n",
		r.Options.Rounds, (r.Options.Rounds+1)/2, r.Options.Time, r.Options.Outstanding, r.Took.Seconds())
	fmt.Fprint(w, `CPU us/query: server, on the host; behind it, or asked directly; generator, with most of the kernel's own work
(softirq is charged to who was running, so steering shows there); their sum; whole machine, other work included
`)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, contest := range r.Contests {
		fmt.Fprintf(w, "\n%s (%s)\n", contest.Title, contest.Note)
		first := contest.Contestants[0]
		fmt.Fprintln(t, "\tq/s\tleast\tmost\tof direct\tmean us\tlost\twrong\tCPU: server\tbehind\tgenerator\tsum\tmachine\t")
		for _, c := range contest.Contestants {
			var rates []float64
			lost, wrong := 0, 0
			for _, turn := range c.Turns {
				rates = append(rates, turn.Rate)
				lost += turn.Lost
				wrong += turn.Wrong
			}
			fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%.0f\t%.2f\t%.0f\t%d\t%d\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t\n", c.Name,
				c.median(rate), slices.Min(rates), slices.Max(rates), c.ratio(first, rate), c.median(mean), lost, wrong,
				c.median(front), c.median(back), c.median(generator), c.median(sum), c.median(machine))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		our := contest.firstOurs()
		fmt.Fprintf(w, "%s against each, medians of the rounds' ratios:\n", our.Name)
		fmt.Fprintln(t, "\tq/s\tmean latency\tCPU sum\tCPU machine\t")
		for _, c := range contest.Contestants {
			if c != our {
				fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t\n", c.Name,
					our.ratio(c, rate), our.ratio(c, mean), our.ratio(c, sum), our.ratio(c, machine))
			}
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	if l := r.Loopback; l != nil {
		fmt.Fprintf(w, "\n%s (%d pairs)\n   detached %.0f MB/s, attached %.0f MB/s; attached over detached, median of the pairs: %.3f\n",
			loopbackTitle, 2*r.Options.Rounds, l.Without/1e6, l.With/1e6, l.Ratio)
	}
	if l := r.Latency; l != nil {
		fmt.Fprintf(w, "\n%s (%d queries each, in %d batches)\n", latencyTitle, l.Direct.Queries, r.Options.LatencyBatches)
		fmt.Fprintln(t, "\tp50 us\tp90\tp99\t")
		for _, row := range []struct {
			name string
			Percentiles
		}{{"direct", l.Direct}, {ours + ", steered", l.Steered}} {
			fmt.Fprintf(t, "%s\t%.1f\t%.1f\t%.1f\t\n", row.name, microseconds(row.P50), microseconds(row.P90), microseconds(row.P99))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		fmt.Fprintf(w, "steered minus direct, median over the batches: p50 %+.1f us, p99 %+.1f us\n",
			microseconds(l.DifferenceP50), microseconds(l.DifferenceP99))
	}
	return nil
}
