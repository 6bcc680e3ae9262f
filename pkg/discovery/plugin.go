package discovery

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"

	"k8s.io/client-go/rest"
)

// plugin is the transport of a kubeconfig that has credentials from a command
// (exec). client-go runs it within a request and waits for it whatever the
// request's context says. Here a request ends with its context, and says that
// the command was what it waited for.
type plugin struct {
	command   string
	next      http.RoundTripper // client-go's, which runs the command
	waiting   atomic.Int64      // requests that have not come to the network yet
	abandoned atomic.Int64      // of these, those that nobody waits for any more
}

// withPlugin makes the transport of cfg's client, once newClient has made that.
func withPlugin(cfg *rest.Config, newClient func(*rest.Config) (*http.Client, error)) (*http.Client, error) {
	if cfg.ExecProvider == nil {
		return newClient(cfg)
	}
	cfg.Wrap(func(network http.RoundTripper) http.RoundTripper { return credited{network} })
	hc, err := newClient(cfg)
	if err != nil {
		return nil, err
	}
	hc.Transport = &plugin{command: cfg.ExecProvider.Command, next: hc.Transport}
	return hc, nil
}

// pluginOf returns the plugin of a client, nil if it has none.
func pluginOf(hc *http.Client) *plugin {
	if hc == nil {
		return nil
	}
	p, _ := hc.Transport.(*plugin)
	return p
}

// problem is what there is to say while the command runs, nil while it doesn't.
func (p *plugin) problem() *problem {
	if p == nil || p.waiting.Load() == 0 {
		return nil
	}
	return p.hangs()
}

func (p *plugin) hangs() *problem {
	return &problem{
		kind:   ErrUnauthorized,
		why:    fmt.Sprintf("the command %q, which the kubeconfig runs for credentials (exec), does not end", p.command),
		remedy: "run it by hand to see what it waits for, or name another kubeconfig with --kubeconfig",
		err:    errors.New("no credentials"),
	}
}

// creditedKey is the context's key of a function that a request calls when it
// has its credentials.
type creditedKey struct{}

// credited is where requests come to the network.
type credited struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (c credited) RoundTrip(r *http.Request) (*http.Response, error) {
	if done, ok := r.Context().Value(creditedKey{}).(func()); ok {
		done()
	}
	return c.RoundTripper.RoundTrip(r)
}

// WrappedRoundTripper lets idle connections be closed.
func (c credited) WrappedRoundTripper() http.RoundTripper { return c.RoundTripper }

// WrappedRoundTripper lets idle connections be closed.
func (p *plugin) WrappedRoundTripper() http.RoundTripper { return p.next }

// RoundTrip implements http.RoundTripper.
func (p *plugin) RoundTrip(r *http.Request) (*http.Response, error) {
	if p.abandoned.Load() > 0 {
		return nil, p.hangs() // and not one more that waits for it
	}
	type result struct {
		response *http.Response
		err      error
	}
	came, has := make(chan result, 1), make(chan struct{})
	p.waiting.Add(1)
	done := sync.OnceFunc(func() {
		p.waiting.Add(-1)
		close(has)
	})
	go func() {
		response, err := p.next.RoundTrip(r.WithContext(context.WithValue(r.Context(), creditedKey{}, done)))
		done()
		came <- result{response, err}
	}()
	select {
	case <-has: // the network heeds the context
	case <-r.Context().Done():
		p.abandoned.Add(1)
		go func() {
			<-came // its context has ended, so there is no response to close
			p.abandoned.Add(-1)
		}()
		return nil, p.hangs()
	}
	got := <-came
	return got.response, got.err
}
