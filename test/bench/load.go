package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// Turn is what was measured in one turn of a contestant.
type Turn struct {
	Rate      float64       // answers a second
	Latency   time.Duration // mean, with the queries in flight that the options say
	Completed int
	Lost      int
	Wrong     int     // answers with another rcode than is right for the load
	Behind    float64 // queries that reached a server behind, or that was asked directly, for one answer

	// Paced turns have these instead of the mean.
	P50, P99, P999 time.Duration

	// CPU time for one answer, in microseconds. What a query does in softirq is charged to whoever was running, mostly to
	// the generator: what works in the kernel has no process of its own. So nothing is told by one of them alone.
	Front, Back, Generator float64
	Machine                float64 // the whole machine's, whatever else ran on it included
	Other                  float64 // part of all CPUs' time that went to none of the above three: other work, mostly

	// Octets of the processes on the host that answer: resident ones, and those of their BPF maps.
	Resident, Maps int
}

// Sum is the CPU time of all processes that had to do with it.
func (t Turn) Sum() float64 { return t.Front + t.Back + t.Generator }

// behind are the servers that know the answers.
func (b *bench) behind() []*lab.Server {
	return []*lab.Server{b.lab.CoreDNS(0), b.lab.CoreDNS(1), b.lab.External(0)}
}

func (b *bench) queriesBehind(ctx context.Context) (sum uint64, err error) {
	for _, s := range b.behind() {
		n, err := s.Queries(ctx)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// measured is what a generator did, with the figures of processes and servers around it.
func (b *bench) measured(ctx context.Context, one *Contestant, generate func() (Turn, error)) (Turn, error) {
	front, err := one.front()
	if err != nil {
		return Turn{}, err
	}
	var back []int
	for _, s := range b.behind() {
		back = append(back, s.PID())
	}
	queries, err := b.queriesBehind(ctx)
	if err != nil {
		return Turn{}, err
	}
	before, err := readCPU(front, back)
	if err != nil {
		return Turn{}, err
	}
	turn, err := generate()
	if err != nil {
		return Turn{}, err
	}
	after, err := readCPU(front, back)
	if err != nil {
		return Turn{}, err
	}
	queriesAfter, err := b.queriesBehind(ctx)
	if err != nil {
		return Turn{}, err
	}
	if turn.Completed == 0 {
		return Turn{}, fmt.Errorf("no query was answered, %d were lost", turn.Lost)
	}
	n := float64(turn.Completed)
	turn.Behind = float64(queriesAfter-queries) / n
	turn.Generator /= n
	turn.Front = microseconds(after.front-before.front) / n
	turn.Back = microseconds(after.back-before.back) / n
	turn.Machine = microseconds(after.machine-before.machine) / n
	turn.Other = n * (turn.Machine - turn.Sum()) / microseconds(max(1, after.all-before.all))
	turn.Resident, turn.Maps, err = memory(front)
	return turn, err
}

// load runs the generators, one for each target at the same time, as fast as they are answered.
func (b *bench) load(ctx context.Context, contest *Contest, one *Contestant, length time.Duration) (Turn, error) {
	file, err := b.queryFile(contest.Load, length)
	if err != nil {
		return Turn{}, err
	}
	// A lost query is waited for until the timeout, and whatever else runs until then is counted.
	args := []string{
		"-d", file, "-e", "-c", "8", "-T", strconv.Itoa(contest.Threads), "-t", "0.5",
		"-q", strconv.Itoa(max(1, b.options.Outstanding/len(one.Targets))),
		"-l", strconv.FormatFloat(length.Seconds(), 'f', -1, 64),
	}
	if contest.Load.once {
		args = append(args, "-n", "1")
	}
	return b.measured(ctx, one, func() (sum Turn, err error) {
		turns := make([]Turn, len(one.Targets))
		errs := make([]error, len(one.Targets))
		var group sync.WaitGroup
		for i, target := range one.Targets {
			group.Go(func() {
				turns[i], errs[i] = generate(ctx, contest.From.node(b.lab), append([]string{"-s", target}, args...), contest.Load.nxdomain)
			})
		}
		group.Wait()
		for i, t := range turns {
			if errs[i] != nil {
				return Turn{}, errs[i]
			}
			sum.Rate += t.Rate
			sum.Latency += t.Latency * time.Duration(t.Completed)
			sum.Completed += t.Completed
			sum.Lost += t.Lost
			sum.Wrong += t.Wrong
			sum.Generator += t.Generator
		}
		sum.Latency /= time.Duration(max(1, sum.Completed))
		return sum, nil
	})
}

// generate runs dnsperf once. Generator is its whole CPU time, for it can't be divided by the sum of answers yet.
func generate(ctx context.Context, node *lab.Node, args []string, nxdomain bool) (Turn, error) {
	cmd := node.Command(ctx, "dnsperf", args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return Turn{}, fmt.Errorf("dnsperf %s: %w: %s", strings.Join(args, " "), err, out.String())
	}
	turn, err := parse(out.String(), nxdomain)
	if err != nil {
		return Turn{}, fmt.Errorf("dnsperf %s: %w:\n%s", strings.Join(args, " "), err, out.String())
	}
	turn.Generator = microseconds(cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime())
	return turn, nil
}

// parse reads the statistics that dnsperf ends with. NXDOMAIN may be a right answer.
func parse(out string, nxdomain bool) (Turn, error) {
	// field returns the first word after a label, which every line that is read must have.
	var missing []string
	field := func(label string) float64 {
		_, rest, ok := strings.Cut(out, label+":")
		words := strings.Fields(rest)
		if ok && len(words) > 0 {
			if value, err := strconv.ParseFloat(words[0], 64); err == nil {
				return value
			}
		}
		missing = append(missing, label)
		return 0
	}
	turn := Turn{
		Rate:      field("Queries per second"),
		Latency:   time.Duration(field("Average Latency (s)") * float64(time.Second)),
		Completed: int(field("Queries completed")),
		Lost:      int(field("Queries lost")),
	}
	if len(missing) > 0 {
		return Turn{}, fmt.Errorf("no figure for %s in its output", strings.Join(missing, ", "))
	}
	// "Response codes: NOERROR 998 (99.80%), SERVFAIL 2 (0.20%)"; without any answer there is no such line.
	turn.Wrong = turn.Completed
	for _, rcode := range []string{"NOERROR ", "NXDOMAIN "} {
		right := 0
		if _, rest, ok := strings.Cut(out, rcode); ok && (rcode == "NOERROR " || nxdomain) {
			if _, err := fmt.Sscanf(rest, "%d", &right); err != nil {
				return Turn{}, fmt.Errorf("read the count of %s: %w", rcode, err)
			}
		}
		turn.Wrong -= right
	}
	return turn, nil
}

type cpu struct{ front, back, machine, all time.Duration }

func readCPU(front, back []int) (cpu, error) {
	var c cpu
	for _, group := range []struct {
		pids []int
		sum  *time.Duration
	}{{front, &c.front}, {back, &c.back}} {
		for _, pid := range group.pids {
			used, err := lab.CPUTime(pid)
			if err != nil {
				return cpu{}, err
			}
			*group.sum += used
		}
	}
	var err error
	c.machine, c.all, err = machineCPU()
	return c, err
}

// machineCPU is how long the machine's CPUs have been busy, softirq and interrupts included, and how long in all.
func machineCPU() (busy, all time.Duration, err error) {
	content, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, err
	}
	// cpu user nice system idle iowait irq softirq steal guest guest_nice; guest is part of user.
	fields := strings.Fields(string(content))
	const idle, iowait, steal = 4, 5, 8
	if len(fields) <= steal || fields[0] != "cpu" {
		return 0, 0, fmt.Errorf("read /proc/stat: odd first line %q", fields[:min(len(fields), steal+1)])
	}
	for i := 1; i <= steal; i++ {
		ticks, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("read /proc/stat: %w", err)
		}
		const tick = time.Second / 100 // USER_HZ
		all += time.Duration(ticks) * tick
		if i != idle && i != iowait && i != steal {
			busy += time.Duration(ticks) * tick
		}
	}
	return busy, all, nil
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
