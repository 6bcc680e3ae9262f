// Command bench measures k2s-dnsbpf side by side with what a host would otherwise ask: the CoreDNS endpoint itself,
// dnsmasq, unbound, and CoreDNS with `cache` as NodeLocal DNSCache runs it. All are on the lab's host0 and take turns
// in one run, so that what else the machine does falls on each of them alike; compare ratios, not rates.
//
//	bench [-rounds 8] [-time 600ms] [-only TEXT] [-json FILE] [-smoke]
package main

import (
	"context"
	"encoding/json"
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
	options := defaults
	smoke := flag.Bool("smoke", false, "only see that it works: the figures mean nothing")
	file := flag.String("json", "", "write all figures to `FILE` too")
	flag.IntVar(&options.Rounds, "rounds", options.Rounds, "how often each one has its turn; the medians are reported")
	flag.DurationVar(&options.Time, "time", options.Time, "how long one turn lasts")
	flag.StringVar(&options.Only, "only", "", "only contests whose title contains `TEXT`")
	flag.Parse()
	if flag.NArg() > 0 || options.Rounds < 1 || options.Time <= 0 {
		flag.Usage()
		return errors.New("wrong usage: a positive number of rounds and a positive time, and no arguments")
	}
	if *smoke {
		options = smokeOptions
	}
	started := time.Now()
	l, err := lab.New(ctx, lab.Options{})
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
	if err != nil {
		return err
	}
	results.Took = time.Since(started)
	if err := results.write(os.Stdout); err != nil {
		return err
	}
	if *file == "" {
		return nil
	}
	content, err := json.MarshalIndent(results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(*file, append(content, '\n'), 0o644)
}
