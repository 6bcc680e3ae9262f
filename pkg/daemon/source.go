//go:build linux

package daemon

import (
	"context"
	"math"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
)

// source is a source of endpoints, and how to stop it.
type source struct {
	discovery.Source
	kubeconfig string // empty for a static source
	watcher    *discovery.Watcher
	state      *coherence.State // of the cluster's objects, as far as they are followed; nil for none
	end        func()
}

// coherence says whether changes of the cluster's objects are known.
func (s source) coherence() cluster.Coherence {
	if s.watcher == nil {
		return cluster.Coherence{Reason: "the servers are given, so the cluster is not watched"}
	}
	return s.watcher.Coherence()
}

// newSource starts the source of endpoints that the settings ask for. The store, nil for none, hears of changes.
func newSource(c config.Config, store *answers.Store, log *zap.Logger) (s source, err error) {
	if len(c.DNSEndpoints) > 0 {
		s.Source = discovery.Static(c.DNSEndpoints)
	} else {
		options := discoveryOptions(c, log)
		s.state, options.Changes = following(c, store)
		watcher, err := discovery.New(options)
		if err != nil {
			return s, err
		}
		s.watcher = watcher
		s.kubeconfig, _ = watcher.Kubeconfig()
		s.Source = watcher
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := s.Run(ctx); err != nil {
			log.Error("discovery ended", zap.Error(err))
		}
	}()
	s.end = func() {
		cancel()
		<-ended
	}
	return s, nil
}

// stop ends the source and waits for that. It may be called on nil and repeatedly.
func (s source) stop() {
	if s.end != nil {
		s.end()
	}
}

// discoveryOptions says what to discover: not what the settings already give.
func discoveryOptions(c config.Config, log *zap.Logger) discovery.Options {
	options := discovery.Options{
		Kubeconfig:     c.Kubeconfig,
		ConfigMap:      c.CorefileConfigMap,
		StubZones:      c.StubZones,
		NoCorefile:     len(c.Zones) > 0,
		NoServiceCIDRs: len(c.ServiceCIDRs) > 0,
		NoPodCIDRs:     len(c.PodCIDRs) > 0,
		Prefer:         discovery.Preference(c.EndpointPreference),
		NodeName:       c.NodeName,
		Logger:         log.Named("discovery"),
	}
	options.Namespace, options.Service, _ = strings.Cut(c.DNSService, "/")
	return options
}

// socketLimit is the forwarder's share of the limit on open files; the rest is for maps, links and the control socket.
func socketLimit() int {
	const others = 512
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > math.MaxInt32 {
		return 0
	}
	return max(int(limit.Cur)-others, int(limit.Cur)/2)
}
