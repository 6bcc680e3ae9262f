//go:build linux

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/control"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/guardian"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/handover"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// errInterrupted is returned by an attach that was cut short by a signal or a detach.
var errInterrupted = errors.New("attach: interrupted, all changes undone")

const (

	// stopTimeout limits a complete stop: what is not undone by then stays in the journal for the next one.
	stopTimeout = 10 * time.Second
)

// Daemon is one attachment of this host. Make it with New, use it with one call of Run.
//
// Only the goroutine of Run changes what is attached. Others see what it publishes, and send it events.
type Daemon struct {
	// Manager is nil if no service manager runs this process. Set it before Run.
	Manager Manager

	version string
	log     *zap.Logger

	owned     *rundir.Owned
	journal   *state.Journal
	resolver  *resolvconf.Manager
	keeper    *resolvconf.Keeper // once attached
	evidence  *evidence          // of the keeper
	forwarder *forwarder.Server
	looker    host.Looker
	host      *host.Host
	datapath  *datapath.Datapath // nil without BPF
	health    *health
	answers   *answers.Store
	kernel    kernelAnswers
	guardian  *guardian.Handle // nil if the resolver file is left alone

	reloads      chan *reload
	detaches     chan detaching
	replacements chan chan struct{}

	predecessor *handover.Predecessor // from which the forwarder has its sockets; nil if there is none
	linger      time.Duration         // after the end, if a detach asked for it
	replaced    bool                  // by a successor that is about to start
	lingering   *handover.Lingering

	seen    atomic.Pointer[attachment]
	leaving atomic.Bool // it is making way for a successor and accepts no other orders

	// For the goroutine of Run alone.
	now        attachment
	between    bool             // the host may differ from now: a change has failed half-way
	slept      time.Duration    // of the machine, since it was started
	cachedFrom []netip.AddrPort // the servers whose answers are kept
	unclaimed  time.Time        // since when the port of a new KubeSwitch address has been free
}

// memoryLimit is where the garbage collector starts to work harder, in octets: well above what a busy forwarder needs, and
// below MemoryMax of the unit. The environment variable GOMEMLIMIT overrides it.
const memoryLimit = 256 << 20

// New prepares a Daemon and touches nothing. The configuration must be valid.
func New(c config.Config, version string, log *zap.Logger) *Daemon {
	d := &Daemon{
		version: version, log: log, reloads: make(chan *reload), detaches: make(chan detaching),
		replacements: make(chan chan struct{}), health: newHealth(),
		now: attachment{config: c, problems: make(map[plan.ProblemKind]string)},
	}
	d.answers = d.newStore()
	d.publish()
	return d
}

// Run attaches, calls ready with the report, serves until ctx ends or a detach is ordered, and detaches. After a
// detach it lingers for as long as that is useful, or until ctx ends. An error before ready means that nothing has changed on the host, or that all
// changes have been undone; what could not be undone is in the error and stays in the journal.
func (d *Daemon) Run(ctx context.Context, ready func(status.Report)) error {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimit)
	}
	rundir.SetName(rundir.Name)
	for {
		err := d.run(ctx, ready)
		var successor int
		if d.replaced && d.Manager != nil {
			var startErr error
			successor, startErr = d.Manager.StartSuccessor()
			err = errors.Join(err, startErr)
		}
		taken, lingerErr := d.lingering.Run(ctx)
		err = errors.Join(err, lingerErr)
		if !d.replaced {
			return err
		}
		if taken {
			d.guardian.Dismiss()
			if d.Manager != nil {
				d.Manager.Succeeded(successor)
			}
			return err
		}
		d.log.Warn("no successor has started: attaching again", zap.Error(err))
		d.guardian.Dismiss()
		d.reset()
		ready = func(status.Report) {}
	}
}

// reset prepares a daemon that was to be replaced for attaching again.
func (d *Daemon) reset() {
	d.leaving.Store(false)
	d.replaced, d.guardian, d.lingering, d.predecessor, d.linger = false, nil, nil, nil, 0
	d.datapath, d.forwarder, d.host, d.health, d.looker = nil, nil, nil, newHealth(), host.Looker{}
	d.kernel.loaded.Store(nil)
	d.answers = d.newStore()
	d.now = attachment{config: d.now.config, problems: make(map[plan.ProblemKind]string)}
	d.publish()
}

func (d *Daemon) run(ctx context.Context, ready func(status.Report)) (err error) {
	if err := d.acquire(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.release()) }()

	undoRedirect := discovery.RedirectKlog(d.log.Named("kubernetes"))
	defer undoRedirect()
	defer func() { d.now.source.stop() }()
	defer d.dismissGuardian()
	defer func() {
		if d.replaced {
			err = errors.Join(err, d.giveWay(context.WithoutCancel(ctx)))
		} else {
			err = errors.Join(err, d.detach(context.WithoutCancel(ctx)))
		}
	}()
	defer func() { d.predecessor.Close() }()

	if err := d.attach(ctx); err != nil {
		if ctx.Err() != nil {
			return errInterrupted
		}
		return err
	}
	// Before ready, because its receiver may ask for the status at once.
	d.keepResolver()
	server, err := control.Listen(d.now.config, d, d.version, d.log)
	if err != nil {
		return err
	}
	defer server.Close()
	if err := d.predecessor.Succeed(d.now.config.RunDir); err != nil {
		d.log.Warn("handover", zap.Error(err))
	}
	d.log.Info("attached", zap.Strings("zones", plan.ZoneNames(d.now.desired.Zones)), zap.Stringers("upstreams", d.now.desired.Forward.Upstreams))
	ready(d.Report())
	return d.serve(ctx)
}

// acquire takes the host's locks, and undoes what an attachment that died without detaching left behind.
func (d *Daemon) acquire() error {
	if err := rundir.CheckPrivilege("attach"); err != nil {
		return err
	}
	owned, err := rundir.Acquire(d.now.config)
	if err != nil {
		return err
	}
	d.owned = owned
	if lacks := host.Lacks(d.now.config); len(lacks) > 0 {
		return errors.Join(lacks[0], d.release()) // before anything is undone
	}
	// What a guardian did after an earlier daemon is no longer of interest.
	if err := os.Remove(rundir.Guardian(d.now.config)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return errors.Join(fmt.Errorf("remove a guardian's record: %w", err), d.release())
	}
	if err := handover.ForgetDead(d.now.config.RunDir); err != nil {
		return errors.Join(err, d.release())
	}
	d.journal, err = host.OpenJournal(d.now.config, d.log)
	if err != nil {
		return errors.Join(err, d.release())
	}
	if d.journal.Empty() {
		return nil
	}
	same, err := host.SameNetwork(d.journal)
	if err != nil {
		return errors.Join(err, d.release())
	}
	if same && d.canAdopt(d.journal.Header()) {
		// Its programs keep steering until ours replace them, and its resolver file stays: clients notice nothing.
		d.log.Warn("taking over from a daemon that died", zap.Time("since", d.journal.Header().Since))
		return nil
	}
	d.log.Warn("undoing what an earlier attachment left", zap.Time("since", d.journal.Header().Since))
	if _, err := host.Undo(d.now.config, d.journal, d.log); err != nil {
		return errors.Join(fmt.Errorf("undo an earlier attachment: %w", err), d.release())
	}
	return nil
}

// canAdopt reports whether a dead daemon's attachment is where ours will be. If not, it must be undone.
func (d *Daemon) canAdopt(header state.Header) bool {
	old, err := config.FromJournal(header.Params)
	if err != nil {
		return false
	}
	return config.CanAdopt(old, d.now.config)
}

// release releases the locks and removes the directories if they are empty.
func (d *Daemon) release() error { return d.owned.Release() }

// poke wakes a receiver that checks everything anyway, so one pending value is enough.
func poke(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// beat tells the kernel programs that this daemon is alive.
func (d *Daemon) beat() {
	if d.datapath == nil {
		return
	}
	if err := d.datapath.Heartbeat(host.HeartbeatLimit); err != nil {
		d.log.Error("heartbeat to the kernel programs failed", zap.Error(err))
	}
}

// serve handles events until ctx ends or a detach is ordered.
func (d *Daemon) serve(ctx context.Context) error {
	var watching sync.WaitGroup
	ctx, stop := context.WithCancel(ctx)
	defer func() {
		d.stopCache()
		stop()
		watching.Wait()
	}()
	changes, err := netdev.Changes(ctx)
	if err != nil {
		return err
	}
	beat := time.NewTicker(guardian.Heartbeat)
	defer beat.Stop()
	revived := make(chan struct{}, 1)
	watching.Go(func() { d.watchHealth(ctx, func() { poke(revived) }) })
	d.runCache(ctx, &watching)
	d.guardian.Beat()
	resolver := d.watchResolver()
	defer resolver.close()
	for {
		select {
		case <-ctx.Done():
			return nil
		case replied := <-d.replacements:
			d.replaced = true
			awaitReply(replied)
			return nil
		case request := <-d.detaches:
			if d.startDetach(request) {
				d.linger = request.linger
				return nil
			}
		case now := <-beat.C:
			d.eachSecond(now)
			resolver.check()
		case <-d.guardian.Awakened():
			d.guardian.Beat() // first, so that the guardian restarts its count
			d.retake()
			resolver.check()
		case <-resolver.wake:
			resolver.check()
		case <-resolver.due.C:
			resolver.check()
		case <-revived:
			d.replan()
			d.keep(time.Now())
		case snapshot := <-d.now.source.Snapshots():
			d.follow(ctx, snapshot)
		case request := <-d.reloads:
			request.done <- d.commit(request)
		case _, open := <-changes:
			if !open {
				changes = nil
				continue
			}
			d.replan()
			d.keep(time.Now())
		}
	}
}

func (d *Daemon) eachSecond(now time.Time) {
	if d.between {
		d.replan()
	}
	d.keep(now)
	d.beat()
	d.forgetSleep()
	d.followResolver()
	d.followHolder(now)
	d.guardian.Beat()
}

// follow applies a set of endpoints.
func (d *Daemon) follow(ctx context.Context, snapshot cluster.Snapshot) {
	if snapshot.Stale {
		d.log.Warn("endpoints can't be confirmed, the last good ones stay in use", zap.String("reason", snapshot.Reason))
	}
	d.greet(ctx, snapshot)
	d.now.snapshot = snapshot // even if it can't be applied now: it is not sent a second time
	d.update(d.now.clone())
}
