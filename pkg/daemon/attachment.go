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

// attachment is what a daemon knows, and what it made of that. The loop has one that it changes; who else wants to know gets
// the one that was published last, which nobody changes any more.
type attachment struct {
	config config.Config
	source source
	// inspection is of the resolver file as it was before it was taken over, or as its owner has written it since.
	inspection resolvconf.Inspection
	// resolvers are the host's own on loopback, in transparent mode.
	resolvers []netip.Addr
	snapshot  cluster.Snapshot
	holder    portHolder // of the KubeSwitch address
	desired   plan.Desired
	started   time.Time
	problems  map[plan.ProblemKind]string
	events    []status.KernelEvent
}

// clone returns a state that can be changed without changing this one.
func (s attachment) clone() attachment {
	s.problems = maps.Clone(s.problems)
	return s
}

// publish makes the loop's state the one that others see.
func (d *Daemon) publish() {
	seen := d.now.clone()
	d.seen.Store(&seen)
}

// note notes a problem, or that there is none any more, which an empty text says.
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

// plan says what shall be true of this host in a state.
func (d *Daemon) plan(s attachment) (plan.Desired, error) {
	facts, err := d.looker.Look(s.config, s.inspection, s.snapshot)
	if err != nil {
		return plan.Desired{}, err
	}
	facts.KubeSwitch.Holder = s.holder.name
	facts.Resolver.Loopback = s.resolvers
	return plan.Make(plan.Input{Settings: s.config, Facts: facts, Snapshot: s.snapshot, Health: d.health.view()})
}

// enter makes the plan of a state true. After an error the state before counts on, and what is true is between the two until a
// replan, which the loop soon does.
func (d *Daemon) enter(next attachment) error {
	desired, err := d.plan(next)
	if err != nil {
		d.between = true
		return err
	}
	return d.realize(next, desired)
}

// realize is enter with a plan that is made already.
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
	return nil
}

// apply makes forwarder and kernel what a state wants. The forwarder comes first: it takes what the kernel passes while the
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

// keep looks after what is in the kernel.
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

// update enters a state that an event has led to. A failure leaves the old one in effect and shows in status.
func (d *Daemon) update(next attachment) { d.settle(d.enter(next)) }

// settle tells what came of entering a state.
func (d *Daemon) settle(err error) {
	if err != nil {
		if err.Error() != d.now.problems[plan.ProblemUpdate] { // it is tried again and again
			d.log.Error("a change is not in effect, the old state stays", zap.Error(err))
		}
		d.note(plan.ProblemUpdate, err.Error())
		return
	}
	d.note(plan.ProblemUpdate, "")
}

// replan looks at the host again, and does something only if what shall be true has changed, or may not be true: a busy
// host changes its routes often, those to the endpoints seldom.
func (d *Daemon) replan() {
	desired, err := d.plan(d.now)
	switch {
	case err != nil:
		d.settle(err)
	case d.between || !reflect.DeepEqual(desired, d.now.desired):
		d.settle(d.realize(d.now.clone(), desired))
	}
}
