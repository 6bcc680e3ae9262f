package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// Options of a run.
type Options struct {
	Full           bool // all contests; otherwise those that tell most
	Rounds         int
	Time           time.Duration // of one turn
	Warm           time.Duration // before a turn with more names than a moment fills a cache with
	Outstanding    int           // queries that the generator keeps in flight
	Pace           int           // queries a second where the latency at a fixed rate is measured
	LatencyBatches int
	LatencyQueries int // in one batch
	Blocks         int // of turns of two TCP connections, half of them attached
	Only           string
	Progress       func(string) `json:"-"`
}

var (
	shortOptions = Options{
		Rounds: 3, Time: 300 * time.Millisecond, Warm: time.Second, Outstanding: 64, Pace: 20_000,
		LatencyBatches: 20, LatencyQueries: 500, Blocks: 8,
	}
	fullOptions = Options{
		Full: true, Rounds: 5, Time: 500 * time.Millisecond, Warm: 2 * time.Second, Outstanding: 64, Pace: 20_000,
		LatencyBatches: 40, LatencyQueries: 500, Blocks: 40,
	}
	// Enough to run every line once.
	smokeOptions = Options{
		Full: true, Rounds: 1, Time: 100 * time.Millisecond, Warm: 100 * time.Millisecond, Outstanding: 8, Pace: 1000,
		LatencyBatches: 1, LatencyQueries: 20, Blocks: 2,
	}
)

// labOptions: CoreDNS is asked for names outside the cluster too, as by pods.
var labOptions = lab.Options{CoreDNSForwards: true}

// Results of a run.
type Results struct {
	Host     HostInfo
	Options  Options
	Contests []*Contest
	Latency  []*Latency
	Loopback *Loopback
	Took     time.Duration
}

// Contest is one kind of load with all who take part. The first one is what the others are compared with.
type Contest struct {
	Title, Note string
	From        *vantage
	Threads     int  // of the generator
	Paced       bool // the latency at a fixed rate instead of the highest rate
	Load        *load
	Contestants []*Contestant

	full         bool        // only in a full run
	endpoints    int         // of CoreDNS; one if it is 0
	setup        preparation // for all its turns; may be nil
	expectations []string    // the answers to what is checked, from the first contestant
}

// Contestant takes part in a contest.
type Contestant struct {
	Name    string
	Targets []string // one generator for each
	Turns   []Turn

	blind   bool        // it answers without records: nothing to verify
	prepare preparation // for its turns only; may be nil
	front   func() ([]int, error)
}

// preparation does something for a while; undo ends it.
type preparation func(context.Context) (undo func() error, err error)

// with runs f after a preparation, which may be nil, and undoes that whatever f returned.
func (p preparation) with(ctx context.Context, f func() error) (err error) {
	if p == nil {
		return f()
	}
	undo, err := p(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if undoErr := undo(); err == nil {
			err = undoErr
		}
	}()
	return f()
}

// bench is a run.
type bench struct {
	lab     *lab.Lab
	options Options
	binary  string
	dir     string
	peers   *peers
	unique  int // names made so far
}

// measure runs all contests and comparisons. With an error it returns those that had been done.
func measure(ctx context.Context, l *lab.Lab, options Options) (*Results, error) {
	if options.Progress == nil {
		options.Progress = func(string) {}
	}
	b := &bench{lab: l, options: options}
	var err error
	if b.binary, err = lab.Binary(); err != nil {
		return nil, err
	}
	if b.dir, err = os.MkdirTemp("", "k2s-bench-"); err != nil {
		return nil, err
	}
	defer os.RemoveAll(b.dir)
	if err := addNames(ctx, l); err != nil {
		return nil, err
	}
	if b.peers, err = startPeers(ctx, l, b.dir); err != nil {
		return nil, err
	}
	results := &Results{Options: options}
	if results.Host, err = describe(ctx, b); err != nil {
		return nil, err
	}
	for _, contest := range b.contests() {
		if !strings.Contains(contest.Title, options.Only) || contest.full && !options.Full {
			continue
		}
		if err := contest.setup.with(ctx, func() error { return b.hold(ctx, contest) }); err != nil {
			return results, fmt.Errorf("%s: %w", contest.Title, err)
		}
		results.Contests = append(results.Contests, contest)
	}
	if strings.Contains(latencyTitle, options.Only) {
		if results.Latency, err = b.latencies(ctx); err != nil {
			return results, fmt.Errorf("%s: %w", latencyTitle, err)
		}
	}
	if strings.Contains(loopbackTitle, options.Only) {
		if results.Loopback, err = b.loopback(ctx); err != nil {
			return results, fmt.Errorf("%s: %w", loopbackTitle, err)
		}
	}
	return results, nil
}

// hold lets the contestants take turns: A B C, B C A, C A B, so that none has always the same one before it.
func (b *bench) hold(ctx context.Context, contest *Contest) error {
	for round := range b.options.Rounds {
		for i := range contest.Contestants {
			one := contest.Contestants[(i+round)%len(contest.Contestants)]
			b.options.Progress(fmt.Sprintf("%s: round %d of %d: %s", contest.Title, round+1, b.options.Rounds, one.Name))
			// Only for its own turns is k2s-dnsbpf attached: the others pass none of our programs.
			err := one.prepare.with(ctx, func() error {
				turn, err := b.turn(ctx, contest, one)
				one.Turns = append(one.Turns, turn)
				return err
			})
			if err != nil {
				return fmt.Errorf("%s: %w", one.Name, err)
			}
		}
	}
	return nil
}

// turn measures one contestant once.
func (b *bench) turn(ctx context.Context, contest *Contest, one *Contestant) (turn Turn, err error) {
	lost := 0
	if !one.blind {
		if lost, err = b.verify(ctx, contest, one); err != nil {
			return Turn{}, err
		}
	}
	// What is asked again may be kept, and connections to the servers behind are up.
	warm := 100 * time.Millisecond
	if contest.Load.many {
		warm = b.options.Warm
	}
	if !contest.Load.once {
		if _, err := b.load(ctx, contest, one, warm); err != nil {
			return Turn{}, err
		}
	}
	if contest.Paced {
		turn, err = b.pace(ctx, contest, one)
	} else {
		turn, err = b.load(ctx, contest, one, b.options.Time)
	}
	turn.Lost += lost
	return turn, err
}

// attachWith makes the preparation that attaches with these settings.
func (b *bench) attachWith(settings ...string) preparation {
	return func(ctx context.Context) (func() error, error) {
		host := b.lab.Host()
		if err := host.Run(ctx, b.binary, append([]string{"attach"}, settings...)...); err != nil {
			return nil, err
		}
		return func() error { return host.Run(context.WithoutCancel(ctx), b.binary, "detach", "--linger", "0") }, nil
	}
}
