//go:build linux

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
)

// selfTestTry is how long one query of the self-test waits. Further ones follow until the attach times out.
const selfTestTry = time.Second

// selfTest sends queries over the path that will be used. Any answer will do, since it proves both directions; a refusal or
// failure to answer does not. Meanwhile dead endpoints and broken paths are detected, so that one
// of those does not prevent the attach.
func (d *Daemon) selfTest(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	changed := make(chan struct{}, 1)
	watching.Go(func() { d.watchHealth(ctx, func() { poke(changed) }) })
	tested := make(chan error, 1)
	c, n := d.now.config, d.now.desired
	watching.Go(func() {
		if plan.IsTransparent(c) {
			tested <- d.testTransparent(ctx, n)
		} else {
			tested <- d.awaitAnswer(ctx, n.Listen[0], n)
		}
	})
	for {
		select {
		case <-changed:
			d.replan()
		case err := <-tested:
			if i := slices.IndexFunc(d.now.desired.Problems, isWay); err != nil && i >= 0 {
				return fmt.Errorf("%w: %s", err, d.now.desired.Problems[i].Text)
			}
			return err
		}
	}
}

func isWay(p plan.Problem) bool { return p.Kind == plan.ProblemWay }

// awaitAnswer asks a server for the first zone's SOA until it answers or ctx ends.
func (d *Daemon) awaitAnswer(ctx context.Context, server netip.AddrPort, n plan.Desired) error {
	name := dns.Fqdn(n.Zones[0].Name)
	reason := context.Cause(ctx)
	for ctx.Err() == nil {
		err := askSOA(ctx, server, name)
		if err == nil && d.someLives() {
			return nil
		}
		if err == nil {
			// A daemon that lingers has answered, with its own endpoints: until ours is ready it serves the same sockets.
			err = errNoneLives
			select {
			case <-ctx.Done():
			case <-time.After(selfTestTry):
			}
		}
		if ctx.Err() == nil || reason == nil {
			reason = err
		}
	}
	return fmt.Errorf("self-test: %s does not answer for %s within %s: %w: %s",
		server, name, d.seen.Load().config.Wait, reason, d.selfTestRemedy(context.WithoutCancel(ctx), name))
}

// selfTestRemedy distinguishes an endpoint that can't be reached from one that only steered queries don't reach.
func (d *Daemon) selfTestRemedy(ctx context.Context, name string) string {
	if d.datapath != nil {
		for _, e := range d.seen.Load().desired.Endpoints {
			if e.Steerable() && askSOA(ctx, e.Address, name) == nil {
				return fmt.Sprintf("CoreDNS at %s answers when it is asked directly, so what the kernel steers, or the reply to it, "+
					"is lost on the way: look for a firewall at %s, or attach with --no-bpf", e.Address, e.Way.Interface)
			}
		}
	}
	return "check that CoreDNS runs and that this host reaches it"
}

func (d *Daemon) someLives() bool {
	return slices.ContainsFunc(d.seen.Load().desired.Endpoints, plan.Endpoint.Lives)
}

var errNoneLives = errors.New("no endpoint answers")

var errUnhelpful = errors.New("unhelpful answer")

// notCached makes a query one that is answered by a server in any case: it asks for that server's name (NSID, RFC 5001), which no answer
// of the kernel's cache has.
func notCached(query *dns.Msg) {
	query.SetEdns0(dns.DefaultMsgSize, false)
	opt := query.IsEdns0()
	opt.Option = append(opt.Option, &dns.EDNS0_NSID{Code: dns.EDNS0NSID})
}

func askSOA(ctx context.Context, server netip.AddrPort, name string) error {
	ctx, cancel := context.WithTimeout(ctx, selfTestTry)
	defer cancel()
	message := new(dns.Msg)
	message.SetQuestion(name, dns.TypeSOA)
	notCached(message)
	client := dns.Client{Timeout: selfTestTry}
	reply, _, err := client.ExchangeContext(ctx, message, server.String())
	if err != nil {
		return err
	}
	if reply.Rcode != dns.RcodeSuccess && reply.Rcode != dns.RcodeNameError {
		// To avoid a busy loop: an error comes back at once.
		<-ctx.Done()
		return fmt.Errorf("%w: %s", errUnhelpful, dns.RcodeToString[reply.Rcode])
	}
	return nil
}
