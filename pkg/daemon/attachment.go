//go:build linux

package daemon

import (
	"maps"
	"net/netip"
	"reflect"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// attachment is what a daemon knows and what it made of it. The loop has one that it changes; everybody else gets
// the last one published, which is immutable.
type attachment struct {
	config config.Config
	source source
	// inspection is of the resolver file before it was taken over, or as its owner has rewritten it since.
	inspection resolvconf.Inspection
	// resolvers are the host's own resolvers on loopback, in transparent mode.
	resolvers []netip.Addr
	snapshot  cluster.Snapshot
	holder    portHolder // of the KubeSwitch address
	desired   plan.Desired
	started   time.Time
	problems  map[plan.ProblemKind]string
	events    []status.KernelEvent
}

// clone returns a copy that can be changed independently.
func (s attachment) clone() attachment {
	s.problems = maps.Clone(s.problems)
	return s
}

// publish makes the loop's state visible to others.
func (d *Daemon) publish() {
	seen := d.now.clone()
	d.seen.Store(&seen)
}

// note records a problem; an empty text clears it.
func (d *Daemon) note(kind plan.ProblemKind, text string) {
	if text == d.now.problems[kind] {
		return
	}
	if text == "" {
		delete(d.now.problems, kind)
	} else {
		d.now.problems[kind] = text
	}
	d.publish()
}

// plan computes the desired state of this host.
func (d *Daemon) plan(s attachment) (plan.Desired, error) {
	facts, err := d.looker.Look(s.config, s.inspection, s.snapshot)
	if err != nil {
		return plan.Desired{}, err
	}
	facts.KubeSwitch.Holder = s.holder.name
	facts.Resolver.Loopback = s.resolvers
	return plan.Make(plan.Input{Settings: s.config, Facts: facts, Snapshot: s.snapshot, Health: d.health.view()})
}

// enter applies the plan of a state. After an error the previous state stays current, and the host is between the two until a
// replan, which the loop does soon.
func (d *Daemon) enter(next attachment) error {
	desired, err := d.plan(next)
	if err != nil {
		d.between = true
		return err
	}
	return d.realize(next, desired)
}

// realize is enter for an existing plan.
func (d *Daemon) realize(next attachment, desired plan.Desired) error {
	next.desired = desired
	d.between = true
	if err := d.apply(&next); err != nil {
		return err
	}
	d.between = false
	d.logChanges(d.now.desired, desired)
	d.now = next
	d.publish()
	d.switchCache()
	return nil
}

// apply applies a state to forwarder and kernel. The forwarder comes first: it handles what the kernel passes while the
// maps change.
func (d *Daemon) apply(next *attachment) error {
	desired := next.desired
	if err := d.forwarder.SetRoutes(forwarder.Routes(desired.Forward)); err != nil {
		return err
	}
	permitted := make(map[netip.Addr][]forwarder.Permit, len(desired.Permits))
	for address, permits := range desired.Permits {
		for _, p := range permits {
			permitted[address] = append(permitted[address], forwarder.Permit(p))
		}
	}
	d.forwarder.SetPermitted(permitted)
	problems, err := d.host.Apply(desired.Kernel)
	if err != nil {
		return err
	}
	for _, kind := range []plan.ProblemKind{plan.ProblemIngressFilter, plan.ProblemZones} {
		delete(next.problems, kind)
	}
	for _, p := range problems {
		next.problems[p.Kind] = p.Text
	}
	return d.listenAtMore(desired.Listen)
}

// keep checks and restores what is in the kernel.
func (d *Daemon) keep(now time.Time) {
	problem := d.host.Keep(now)
	if events := d.host.Events(); !reflect.DeepEqual(events, d.now.events) {
		d.now.events = events
		d.publish()
	}
	d.note(plan.ProblemKernel, problem)
}

func (d *Daemon) logChanges(old, now plan.Desired) {
	known := make(map[plan.Endpoint]bool)
	for _, e := range old.Endpoints {
		known[e] = true
	}
	for _, e := range now.Endpoints {
		if !known[e] {
			d.log.Info("endpoint", zap.Stringer("backend", e.Address), zap.String("source", e.Source),
				zap.String("iface", e.Way.Interface), zap.Bool("dead", e.Dead), zap.Bool("severed", e.Severed), zap.String("reason", e.Note))
		}
	}
	if !reflect.DeepEqual(old.Zones, now.Zones) {
		d.log.Info("zones", zap.Strings("zones", plan.ZoneNames(now.Zones)))
	}
}

// update enters a state that follows from an event. A failure leaves the old one in effect and appears in status.
func (d *Daemon) update(next attachment) { d.settle(d.enter(next)) }

// settle records the result of entering a state.
func (d *Daemon) settle(err error) {
	if err != nil {
		if err.Error() != d.now.problems[plan.ProblemUpdate] { // it is tried again and again
			d.log.Error("a change could not be applied, the old state stays in effect", zap.Error(err))
		}
		d.note(plan.ProblemUpdate, err.Error())
		return
	}
	d.note(plan.ProblemUpdate, "")
}

// replan inspects the host again and acts only if the desired state has changed or may not be in effect: a busy
// host changes its routes often, but rarely those to endpoints.
func (d *Daemon) replan() {
	desired, err := d.plan(d.now)
	switch {
	case err != nil:
		d.settle(err)
	case d.between || !reflect.DeepEqual(desired, d.now.desired):
		d.settle(d.realize(d.now.clone(), desired))
	}
}
