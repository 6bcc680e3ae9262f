//go:build linux

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// kernelAnswers are the answers of the programs that are loaded, if any are. It implements answers.Kernel.
type kernelAnswers struct {
	loaded atomic.Pointer[datapath.Datapath]
}

// Answers to cluster names are for whoever asks; those to others come from this host's resolver, and are for who asks that.
var (
	everyScope    = []datapath.Scope{datapath.ScopeHost, datapath.ScopeKubeSwitch, datapath.ScopePod, datapath.ScopeTransparent, datapath.ScopeShared}
	resolverScope = []datapath.Scope{datapath.ScopeHost, datapath.ScopeKubeSwitch}
)

// Put implements answers.Kernel.
func (k *kernelAnswers) Put(answer *ready.Answer, given answers.Given) (ok bool, err error) {
	d := k.loaded.Load()
	if d == nil {
		return false, nil
	}
	scopes := resolverScope
	if given.Cluster {
		scopes = everyScope
	}
	err = d.Answers().Put(answer, datapath.Given{
		Scopes: scopes, Stored: given.Stored, Life: given.Life, Vouched: given.Cluster, OPTSize: given.OPTSize,
	})
	if errors.Is(err, datapath.ErrNoRoom) {
		return false, nil
	}
	return err == nil, err
}

// Drop implements answers.Kernel.
func (k *kernelAnswers) Drop(key ready.Key) error {
	if d := k.loaded.Load(); d != nil {
		return d.Answers().Drop(key)
	}
	return nil
}

// Uses implements answers.Kernel.
func (k *kernelAnswers) Uses(key ready.Key) uint64 {
	if d := k.loaded.Load(); d != nil {
		return d.Answers().Uses(key)
	}
	return 0
}

// Switch implements answers.Kernel.
func (k *kernelAnswers) Switch(on bool, generation uint32) error {
	if d := k.loaded.Load(); d != nil {
		return d.AnswerQueries(on, generation)
	}
	return nil
}

// now is the kernel's clock. That it can't be read has been ruled out when the programs were loaded.
func (k *kernelAnswers) now() time.Duration {
	d := k.loaded.Load()
	if d == nil {
		return 0
	}
	now, err := d.Now()
	if err != nil {
		return 0
	}
	return now
}

// newStore returns the cache of answers, which is off.
func (d *Daemon) newStore() *answers.Store {
	return answers.New(answers.Options{
		Kernel: &d.kernel, Now: d.kernel.now, Entries: datapath.SizeOfAnswers(d.now.config.CacheEntries).Entries(), Small: datapath.SmallAnswer(),
		Limits: datapath.AnswersLimits(), Log: d.log.Named("cache"),
		Ask: func(ctx context.Context, query []byte) []byte { return d.forwarder.Resolve(ctx, query) },
	})
}

// runCache keeps the cache up to date until ctx ends.
func (d *Daemon) runCache(ctx context.Context, running *sync.WaitGroup) {
	if d.datapath == nil {
		return
	}
	d.kernel.loaded.Store(d.datapath)
	d.slept, _ = netdev.Slept()
	d.switchCache()
	running.Go(func() { d.answers.Run(ctx) })
	running.Go(func() {
		err := d.datapath.Offers(ctx, func(o datapath.Offer) { d.answers.OfferRaw(o.Asked, o.Message, o.Replied, o.Generation) })
		if err != nil {
			d.log.Error("replies are not kept any more", zap.Error(err))
		}
	})
}

// stopCache ends all answers: nobody is there who would forget them.
func (d *Daemon) stopCache() {
	if err := d.answers.Switch(false); err != nil {
		d.log.Error("the kernel's answers were not switched off; those of the cluster end by themselves", zap.Error(err))
	}
}

// switchCache tells the cache what is in effect now.
func (d *Daemon) switchCache() {
	d.forwarder.SetCache(d.now.config.Cache, d.now.config.CacheOff...)
	if d.kernel.loaded.Load() == nil {
		return
	}
	s := &d.now
	if s.source.state != nil {
		s.source.state.SetZones(clusterZones(s.desired.Zones)...)
	}
	if endpoints := s.snapshot.Addresses(); len(endpoints) > 0 {
		known := func(e netip.AddrPort) bool { return slices.Contains(d.cachedFrom, e) }
		if len(d.cachedFrom) > 0 && !slices.ContainsFunc(endpoints, known) {
			d.answers.ForgetCluster() // not a server of before is among them: perhaps another Deployment
		}
		d.cachedFrom = endpoints
	}
	d.answers.SetState(s.source.state)
	d.answers.SetZones(cachedZones(s))
	d.answers.SetExternal(upstreams(s))
	if err := d.answers.Switch(s.config.Cache); err != nil {
		d.log.Error("the kernel's answers were not switched", zap.Bool("on", s.config.Cache), zap.Error(err))
	}
}

// upstreams names who answers for names outside of the cluster.
func upstreams(s *attachment) string {
	return fmt.Sprint(s.desired.Forward.Upstreams)
}

// clusterZones are those in which Services have names.
func clusterZones(zones []cluster.Zone) (names []string) {
	for _, zone := range zones {
		if zone.Cluster && !zone.Reverse() {
			names = append(names, zone.Name)
		}
	}
	return names
}

// cachedZones says of each zone what may be kept. Another source of it is another Service or, where that is given, another set of
// servers.
func cachedZones(s *attachment) (zones []answers.Zone) {
	source := s.snapshot.Service
	if source == "" {
		source = fmt.Sprint(s.config.DNSEndpoints)
	}
	for _, zone := range s.desired.Zones {
		zones = append(zones, answers.Zone{
			Name: zone.Name, Source: source + " " + zone.Source, Off: zone.Uncached, Unvouched: !zone.Vouched,
		})
	}
	for _, off := range s.config.CacheOff {
		off = strings.ToLower(strings.TrimSuffix(off, "."))
		zones = slices.DeleteFunc(zones, func(z answers.Zone) bool { return cluster.Below(z.Name, off) })
		zones = append(zones, answers.Zone{Name: off, Off: "the setting cacheOff"})
	}
	return zones
}

// following makes the cache follow what a source tells of the cluster, if the settings want one.
func following(c config.Config, store *answers.Store) (*coherence.State, func(cluster.Change)) {
	if store == nil || !c.Cache || !c.BPF {
		return nil, nil
	}
	state := coherence.New()
	return state, func(change cluster.Change) { store.Change(state, change) }
}

// kept takes in an answer of the forwarder.
func (d *Daemon) kept(a forwarder.KeptAnswer) {
	if d.kernel.loaded.Load() != nil {
		d.answers.OfferExternal(answers.External{Answer: a.Answer, Age: a.Age, Life: a.Life, Current: a.Current})
	}
}

// forgetSleep ends all answers after the machine has slept: no clock by which they age went on meanwhile.
func (d *Daemon) forgetSleep() {
	slept, err := netdev.Slept()
	if err != nil {
		return // a kernel that can't sleep
	}
	if slept-d.slept > time.Second {
		d.log.Info("the machine has slept: all answers are forgotten", zap.Duration("for", slept-d.slept))
		d.answers.Flush("")
		d.forwarder.Flush("")
	}
	d.slept = slept
}

// cacheReport is nil where the kernel answers nothing.
func (d *Daemon) cacheReport(s *attachment) *status.Cache {
	if d.kernel.loaded.Load() == nil {
		return nil
	}
	report := d.answers.Summary()
	coherence := s.source.coherence()
	report.Coherence, report.Reason = coherence.State.String(), coherence.Reason
	if loaded := d.kernel.loaded.Load(); loaded != nil {
		report.Lost, _ = loaded.Lost()
	}
	return &report
}

// CacheList implements control.Handler.
func (d *Daemon) CacheList(suffix string) []status.CachedAnswer { return d.answers.List(suffix) }

// CacheFlush implements control.Handler.
func (d *Daemon) CacheFlush(suffix string) int {
	return d.answers.Flush(suffix) + d.forwarder.Flush(suffix)
}
