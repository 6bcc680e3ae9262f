// Command bench measures k2s-dnsbpf side by side with what a host would otherwise ask: the CoreDNS endpoint itself, dnsmasq,
// unbound, CoreDNS with `cache`, NodeLocal DNSCache's layout, Knot Resolver, systemd-resolved; and with the floor, a program
// that answers without a look. All are on the lab's host0 and take turns in one run, so that what else the machine does falls
// on each of them alike; compare ratios, not rates.
//
//	bench [-full] [-rounds N] [-time 300ms] [-only TEXT] [-out DIR] [-smoke]
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		if ctx.Err() != nil { // whatever was killed by it is not the reason
			err = errors.New("interrupted")
		}
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	full := flag.Bool("full", false, "all contests, and long enough to tell small differences")
	smoke := flag.Bool("smoke", false, "only see that it works: the figures mean nothing")
	out := flag.String("out", "", "write the report, each turn's figures and a plot into `DIR` too")
	rounds := flag.Int("rounds", 0, "how often each one has its turn; the medians are reported (default 3, with -full 5)")
	length := flag.Duration("time", 0, "how long one turn lasts (default 300ms, with -full 500ms)")
	only := flag.String("only", "", "only contests whose title contains `TEXT`")
	flag.Parse()
	if flag.NArg() > 0 || *rounds < 0 || *length < 0 {
		flag.Usage()
		return errors.New("wrong usage: a positive number of rounds and a positive time, and no arguments")
	}
	options := shortOptions
	switch {
	case *smoke:
		options = smokeOptions
	case *full:
		options = fullOptions
	}
	options.Only = *only
	options.Rounds, options.Time = cmp.Or(*rounds, options.Rounds), cmp.Or(*length, options.Time)
	started := time.Now()
	l, err := lab.New(ctx, labOptions)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	options.Progress = func(text string) { fmt.Fprintf(os.Stderr, "\r\x1b[K%s", text) }
	if info, statErr := os.Stderr.Stat(); statErr != nil || info.Mode()&os.ModeCharDevice == 0 {
		options.Progress = func(string) {}
	}
	results, err := measure(ctx, l, options)
	options.Progress("")
	if results == nil {
		return err
	}
	results.Took = time.Since(started)
	err = errors.Join(err, results.markdown(os.Stdout))
	if *out != "" {
		err = errors.Join(err, results.write(*out))
	}
	return err
}
