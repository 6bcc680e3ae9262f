//go:build linux

package daemon

import (
	"context"
	"math"
	"net/netip"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
)

// routing says which names go where: what a second attach may change while the first one runs.
type routing struct {
	zones      []discovery.Zone // that the settings name
	upstreams  []netip.AddrPort
	source     discovery.Source
	kubeconfig string // empty for a static source

	// stop ends the source and waits for it. It may be called on a zero routing, and again.
	stopSource func()
}

// newRouting derives the routing of a configuration, and starts nothing.
func (d *Daemon) newRouting(c config.Config) (r routing, err error) {
	if r.zones, err = configuredZones(c); err != nil {
		return r, err
	}
	d.mu.Lock()
	r.upstreams = upstreams(c, d.inspection)
	d.mu.Unlock()
	if len(c.DNSEndpoints) > 0 {
		r.source = discovery.Static(c.DNSEndpoints)
		return r, nil
	}
	options := d.discoveryOptions(c)
	watcher, err := discovery.New(options)
	if err != nil {
		return r, err
	}
	r.kubeconfig, _ = watcher.Kubeconfig()
	r.source = watcher
	return r, nil
}

// upstreams are those that the user named, or else those that the host has.
func upstreams(c config.Config, inspection resolvconf.Inspection) []netip.AddrPort {
	if len(c.Upstreams) > 0 {
		return c.Upstreams
	}
	var list []netip.AddrPort
	for _, upstream := range inspection.Upstreams {
		list = append(list, netip.AddrPortFrom(upstream.Addr, config.DNSPort))
	}
	return list
}

func (r *routing) start(log *zap.Logger) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	source := r.source
	go func() {
		defer close(ended)
		if err := source.Run(ctx); err != nil {
			log.Error("discovery ended", zap.Error(err))
		}
	}()
	r.stopSource = func() {
		cancel()
		<-ended
	}
}

func (r *routing) stop() {
	if r.stopSource != nil {
		r.stopSource()
	}
}

// socketLimit is what the limit of open files leaves to the forwarder: the rest is for maps, links and the control socket.
func socketLimit() int {
	const others = 512
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > math.MaxInt32 {
		return 0
	}
	return max(int(limit.Cur)-others, int(limit.Cur)/2)
}
