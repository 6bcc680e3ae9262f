package main

import (
	"bufio"
	"context"
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

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

func describe(ctx context.Context, b *bench) (HostInfo, error) {
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
		{b.binary, "version"}, {coredns, "-version"}, {"dnsmasq", "--version"}, {"unbound", "-V"}, {"kresd", "--version"}, {"dnsperf", "-h"},
	} {
		// unbound ends with 1 after it has said its version.
		out, err := b.lab.Host().Command(ctx, argv[0], argv[1:]...).CombinedOutput()
		version := versionLine(string(out))
		if version == "" {
			return HostInfo{}, fmt.Errorf("ask %s for its version: %w: %q", argv[0], err, out)
		}
		if strings.HasPrefix(version, "Version ") { // unbound and dnsperf leave out whose
			version = argv[0] + " " + strings.TrimPrefix(version, "Version ")
		}
		host.Versions = append(host.Versions, version)
	}
	systemd, err := b.lab.Resolvectl(ctx, "--version")
	if err != nil {
		return HostInfo{}, err
	}
	systemd, _, _ = strings.Cut(systemd, "\n")
	host.Versions = append(host.Versions, systemd)
	return host, nil
}

// versionLine finds the line that has the version, without what follows it.
func versionLine(out string) string {
	for line := range strings.Lines(out) {
		if line = strings.TrimSpace(line); strings.Contains(line, "ersion ") || strings.HasPrefix(line, "CoreDNS-") || strings.HasPrefix(line, "k2s-dnsbpf") {
			line, _, _ = strings.Cut(line, "  ")
			return line
		}
	}
	return ""
}

// other tells how far the machine was from quiet: above some per cent, no single rate means much.
func (r *Results) other() float64 {
	var values []float64
	for _, contest := range r.Contests {
		if contest.Paced { // its generator is not counted
			continue
		}
		for _, one := range contest.Contestants {
			for _, turn := range one.Turns {
				values = append(values, turn.Other)
			}
		}
	}
	return median(values)
}

// write leaves the report, each turn's figures and the plot in a directory.
func (r *Results) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, write := range map[string]func(io.Writer) error{"bench.md": r.markdown, "bench.csv": r.csv, "bench.svg": r.plot} {
		var text strings.Builder
		if err := write(&text); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text.String()), 0o644); err != nil {
			return err
		}
	}
	return nil
}

const legend = `q/s: median of the rounds, as many as are answered with few in flight, and the least and the most of all rounds. Rate and CPU of ours: ours
divided by this one's, median of the rounds. Sent on: queries that reached a server behind for each answer, or that was asked directly.
CPU in us for one query: of the server's processes on the host; of the servers behind, or asked directly; of the generator, with most of the kernel's
own work (softirq is charged to who was running, so what is done in the kernel shows there); of the whole machine, other work included; and that less
the floor's, and so less the generator's own. Memory in MiB: resident, and of BPF maps.
`

func (r *Results) markdown(w io.Writer) error {
	fmt.Fprintf(w, "# k2s-dnsbpf beside other servers\n\n%s, %d CPUs, Linux %s; %.0f %% of their time went to other work (median of the turns).\n",
		r.Host.CPU, r.Host.CPUs, r.Host.Kernel, 100*r.other())
	fmt.Fprintf(w, "%s.\n", strings.Join(r.Host.Versions, "; "))
	fmt.Fprintf(w, "`%s`: %d interleaved rounds of %v each, dnsperf -e -c 8 -q %d; took %.0f s.\n\n![Plot](bench.svg)\n\n",
		r.Options.command(), r.Options.Rounds, r.Options.Time, r.Options.Outstanding, r.Took.Seconds())
	if goals := r.goals(); len(goals) > 0 {
		fmt.Fprint(w, "## To reach\n\n")
		rows := [][]string{{"", "measured", "to reach", ""}}
		for _, g := range goals {
			bound, verdict := "at most", "missed"
			if g.least {
				bound = "at least"
			}
			if g.reached() {
				verdict = "reached"
			}
			rows = append(rows, []string{g.what, fmt.Sprintf("%.3f", g.got), fmt.Sprintf("%s %v", bound, g.bound), verdict})
		}
		writeTable(w, rows)
	}
	fmt.Fprintf(w, "## Contests\n\n%s", legend)
	for _, contest := range r.Contests {
		fmt.Fprintf(w, "\n### %s\n\n", contest.Title)
		if contest.Note != "" {
			fmt.Fprintf(w, "%s\n\n", contest.Note)
		}
		if contest.Paced {
			writeTable(w, contest.pacedRows())
		} else {
			writeTable(w, contest.rows())
		}
	}
	r.comparisons(w)
	return nil
}

func (o Options) command() string {
	if o.Full {
		return "make bench-full"
	}
	return "make bench"
}

// whole rounds to an integer, tenth to one digit, and hundredth to two.
func whole(v float64) string     { return strconv.FormatFloat(v, 'f', 0, 64) }
func tenth(v float64) string     { return strconv.FormatFloat(v, 'f', 1, 64) }
func hundredth(v float64) string { return strconv.FormatFloat(v, 'f', 2, 64) }

func (c *Contest) rows() [][]string {
	rows := [][]string{{
		"", "q/s", "least", "most", "of direct", "rate of ours", "CPU of ours", "mean us", "lost", "wrong", "sent on",
		"CPU: server", "behind", "generator", "machine", "above floor", "MiB", "maps",
	}}
	for _, one := range c.Contestants {
		rates := one.figures(rate)
		lost, wrong := 0, 0
		for _, turn := range one.Turns {
			lost += turn.Lost
			wrong += turn.Wrong
		}
		ratioOfOurs, cpuOfOurs, above := "", "", ""
		if ours := c.ours(); ours != one {
			ratioOfOurs, cpuOfOurs = hundredth(ours.ratio(one, rate)), hundredth(ours.ratio(one, machine))
		}
		if c.contestant(theFloor) != nil {
			above = tenth(median(c.aboveFloor(one)))
		}
		rows = append(rows, []string{
			one.Name, whole(median(rates)), whole(slices.Min(rates)), whole(slices.Max(rates)), hundredth(one.ratio(c.Contestants[0], rate)),
			ratioOfOurs, cpuOfOurs, whole(one.median(mean)), strconv.Itoa(lost), strconv.Itoa(wrong), hundredth(one.median(behind)),
			tenth(one.median(func(t Turn) float64 { return t.Front })), tenth(one.median(func(t Turn) float64 { return t.Back })),
			tenth(one.median(func(t Turn) float64 { return t.Generator })), tenth(one.median(machine)), above,
			tenth(one.median(func(t Turn) float64 { return float64(t.Resident) / (1 << 20) })),
			tenth(one.median(func(t Turn) float64 { return float64(t.Maps) / (1 << 20) })),
		})
	}
	return rows
}

func (c *Contest) pacedRows() [][]string {
	rows := [][]string{{"", "p50 us", "p99 us", "least", "most", "p99.9 us", "lost", "wrong"}}
	for _, one := range c.Contestants {
		lost, wrong := 0, 0
		for _, turn := range one.Turns {
			lost += turn.Lost
			wrong += turn.Wrong
		}
		values := one.figures(p99)
		rows = append(rows, []string{
			one.Name, tenth(one.median(p50)), tenth(median(values)), tenth(slices.Min(values)), tenth(slices.Max(values)),
			tenth(one.median(p999)), strconv.Itoa(lost), strconv.Itoa(wrong),
		})
	}
	return rows
}

// comparisons are what is measured otherwise than in contests.
func (r *Results) comparisons(w io.Writer) {
	for _, l := range r.Latency {
		fmt.Fprintf(w, "\n### %s, endpoints: %d\n\n%d queries each, in %d batches.\n\n",
			latencyTitle, l.Endpoints, l.Direct.Queries, r.Options.LatencyBatches)
		rows := [][]string{{"", "p50 us", "p90", "p99"}}
		for _, row := range []struct {
			name string
			Percentiles
		}{{directly, l.Direct}, {steered, l.Steered}} {
			rows = append(rows, []string{row.name, tenth(microseconds(row.P50)), tenth(microseconds(row.P90)), tenth(microseconds(row.P99))})
		}
		writeTable(w, rows)
		fmt.Fprintf(w, "Steered minus direct, median of the batches: p50 %+.1f us, p99 %+.1f us.\n",
			microseconds(l.DifferenceP50), microseconds(l.DifferenceP99))
	}
	if l := r.Loopback; l != nil {
		low, high := medianInterval(l.Ratios)
		fmt.Fprintf(w, "\n### %s\n\nDetached %.0f MB/s, attached %.0f MB/s; attached over detached, median of %d pairs of blocks: %.4f (95 %% confidence: %.4f to %.4f).\n",
			loopbackTitle, l.Without/1e6, l.With/1e6, len(l.Ratios), median(l.Ratios), low, high)
	}
}

// writeTable aligns the columns, so that the source can be read too. The first row is the head.
func writeTable(w io.Writer, rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell), 2)
		}
	}
	for i, row := range rows {
		for k, cell := range row {
			padding := strings.Repeat(" ", widths[k]-utf8.RuneCountInString(cell))
			if k == 0 {
				fmt.Fprintf(w, "| %s%s ", cell, padding)
			} else {
				fmt.Fprintf(w, "| %s%s ", padding, cell)
			}
		}
		fmt.Fprintln(w, "|")
		if i == 0 {
			for k, width := range widths {
				fmt.Fprintf(w, "|%s%s", strings.Repeat("-", width+1), map[bool]string{true: "-", false: ":"}[k == 0])
			}
			fmt.Fprintln(w, "|")
		}
	}
	fmt.Fprintln(w)
}

// csv has a row for each turn. Times are in microseconds, memory is in octets.
func (r *Results) csv(w io.Writer) error {
	out := csv.NewWriter(w)
	rows := [][]string{{
		"load", "from", "threads", "endpoints", "paced", "contestant", "round", "rate", "mean", "p50", "p99", "p99.9", "answers", "lost", "wrong", "behind",
		"cpu server", "cpu behind", "cpu generator", "cpu machine", "other", "resident", "maps",
	}}
	exact := func(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
	for _, c := range r.Contests {
		for _, one := range c.Contestants {
			for i, t := range one.Turns {
				rows = append(rows, []string{
					c.Load.name, c.From.name, strconv.Itoa(c.Threads), strconv.Itoa(max(1, c.endpoints)), strconv.FormatBool(c.Paced), one.Name, strconv.Itoa(i + 1),
					exact(t.Rate), exact(mean(t)), exact(p50(t)), exact(p99(t)), exact(p999(t)),
					strconv.Itoa(t.Completed), strconv.Itoa(t.Lost), strconv.Itoa(t.Wrong), exact(t.Behind),
					exact(t.Front), exact(t.Back), exact(t.Generator), exact(t.Machine), exact(t.Other), strconv.Itoa(t.Resident), strconv.Itoa(t.Maps),
				})
			}
		}
	}
	return out.WriteAll(rows)
}
