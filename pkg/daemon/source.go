//go:build linux

package daemon

import (
	"context"
	"math"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
)

// source is a source of endpoints, and how to stop it.
type source struct {
	discovery.Source
	kubeconfig string // empty for a static source
	end        func()
}

// newSource starts the source of endpoints that the settings ask for.
func newSource(c config.Config, log *zap.Logger) (s source, err error) {
	if len(c.DNSEndpoints) > 0 {
		s.Source = discovery.Static(c.DNSEndpoints)
	} else {
		watcher, err := discovery.New(discoveryOptions(c, log))
		if err != nil {
			return s, err
		}
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
