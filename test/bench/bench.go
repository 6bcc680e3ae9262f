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
	Rounds         int
	Time           time.Duration // of one turn
	Outstanding    int           // queries that the generator keeps in flight
	LatencyBatches int
	LatencyQueries int // in one batch
	Only           string
	Progress       func(string) `json:"-"`
}

var (
	defaults = Options{Rounds: 8, Time: 600 * time.Millisecond, Outstanding: 64, LatencyBatches: 20, LatencyQueries: 500}
	// Enough to run every line once.
	smokeOptions = Options{Rounds: 1, Time: 100 * time.Millisecond, Outstanding: 8, LatencyBatches: 1, LatencyQueries: 20}
)

// Results of a run; also its JSON form.
type Results struct {
	Host     HostInfo
	Options  Options
	Contests []*Contest
	Latency  *Latency  `json:",omitempty"`
	Loopback *Loopback `json:",omitempty"`
	Took     time.Duration
}

// Contest is one kind of load with all who take part. The first one is what the others are compared with.
type Contest struct {
	Title        string
	Note         string
	Contestants  []*Contestant
	coarse       bool       // fewer rounds will do, for the differences are large
	unique       bool       // each name is asked once only
	questions    []question // otherwise these, in turn
	expectations []string   // the answers to questions, from the first contestant
}

func (c *Contest) rounds(o Options) int {
	if c.coarse {
		return (o.Rounds + 1) / 2
	}
	return o.Rounds
}

// Contestant takes part in a contest.
type Contestant struct {
	Name    string
	Ours    bool     // compared with each other one
	Targets []string // one generator for each
	Turns   []Turn

	prepare func(context.Context) (undo func() error, err error) // for its turns only; may be nil
	front   func() ([]int, error)                                // the processes on the host that answer
	back    func(context.Context) []*lab.Server                  // the servers behind, or those asked directly
}

func (c *Contest) firstOurs() *Contestant {
	for _, one := range c.Contestants {
		if one.Ours {
			return one
		}
	}
	return nil
}

// measure runs all contests and the latency comparison.
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
	peers, err := startPeers(ctx, l, b.dir)
	if err != nil {
		return nil, err
	}
	results := &Results{Options: options}
	if results.Host, err = describe(ctx, l, b.binary); err != nil {
		return nil, err
	}
	for _, contest := range b.contests(peers) {
		if !strings.Contains(contest.Title, options.Only) {
			continue
		}
		if err := b.hold(ctx, contest); err != nil {
			return nil, fmt.Errorf("%s: %w", contest.Title, err)
		}
		results.Contests = append(results.Contests, contest)
	}
	if strings.Contains(latencyTitle, options.Only) {
		options.Progress(latencyTitle)
		if results.Latency, err = b.latency(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", latencyTitle, err)
		}
	}
	if strings.Contains(loopbackTitle, options.Only) {
		if results.Loopback, err = b.loopback(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", loopbackTitle, err)
		}
	}
	return results, nil
}

type bench struct {
	lab     *lab.Lab
	options Options
	binary  string
	dir     string
	unique  int // names made so far
}

// hold lets the contestants take turns: A B C, B C A, C A B, so that none has always the same one before it.
func (b *bench) hold(ctx context.Context, contest *Contest) error {
	rounds := contest.rounds(b.options)
	for round := range rounds {
		for i := range contest.Contestants {
			one := contest.Contestants[(i+round)%len(contest.Contestants)]
			b.options.Progress(fmt.Sprintf("%s: round %d of %d: %s", contest.Title, round+1, rounds, one.Name))
			turn, err := b.turn(ctx, contest, one)
			if err != nil {
				return fmt.Errorf("%s: %w", one.Name, err)
			}
			one.Turns = append(one.Turns, turn)
		}
	}
	return nil
}

// turn measures one contestant once. Only for its own turns is k2s-dnsbpf attached: the others pass none of our programs.
func (b *bench) turn(ctx context.Context, contest *Contest, one *Contestant) (turn Turn, err error) {
	if one.prepare != nil {
		undo, err := one.prepare(ctx)
		if err != nil {
			return Turn{}, err
		}
		defer func() {
			if undoErr := undo(); err == nil {
				err = undoErr
			}
		}()
	}
	// This also fills the caches of those who have one: their answers live for 5 seconds.
	if err := b.verify(ctx, contest, one); err != nil {
		return Turn{}, err
	}
	file, err := b.queryFile(contest)
	if err != nil {
		return Turn{}, err
	}
	return b.load(ctx, contest, one, file)
}

// attachWith makes the preparation that attaches with these settings.
func (b *bench) attachWith(settings ...string) func(context.Context) (func() error, error) {
	return func(ctx context.Context) (func() error, error) {
		host := b.lab.Host()
		if err := host.Run(ctx, b.binary, append([]string{"attach"}, settings...)...); err != nil {
			return nil, err
		}
		return func() error { return host.Run(context.WithoutCancel(ctx), b.binary, "detach", "--linger", "0") }, nil
	}
}

// kubeProxy loads the rules that translate the kube-dns Service address. They cost every packet of the host something.
func (b *bench) kubeProxy(ctx context.Context) (func() error, error) {
	if err := b.lab.LoadKubeProxyLikeRules(ctx); err != nil {
		return nil, err
	}
	return func() error {
		return b.lab.Host().Run(context.WithoutCancel(ctx), "nft", "delete table ip kube-proxy; delete table ip6 kube-proxy")
	}, nil
}
