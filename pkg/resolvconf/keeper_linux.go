package resolvconf

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// Policy says what a Keeper does about a file that somebody puts in place of
// ours.
type Policy string

// The policies.
const (
	// PolicyRetake adopts it as the new original and takes over again.
	PolicyRetake Policy = "retake"
	// PolicyYield leaves it in place and follows its servers.
	PolicyYield Policy = "yield"
	// PolicyObserve is for a file that is never taken over: its servers are
	// followed.
	PolicyObserve Policy = "observe"
)

// Standing is how our file stands with the others who write it.
type Standing string

// The standings.
const (
	// StandingKept: everything is as it was left, with ours in place if it should be.
	StandingKept Standing = "kept"
	// StandingUnsettled: there is something else, and it may not be complete.
	StandingUnsettled Standing = "unsettled"
	// StandingYielded: theirs stays, by policy or because it can't be replaced.
	StandingYielded Standing = "yielded"
	// StandingContended: theirs stays until nobody has written for a while.
	StandingContended Standing = "contended"
)

const (
	// settleWhole is how long a file must have been quiet that came complete:
	// a link, or one renamed into place. Managers rename, and then look; two in
	// a row are one change.
	settleWhole = 100 * time.Millisecond
	// settleWritten is the same for a file that was written where it is, or is
	// missing. DHCP clients were seen to pause three seconds in the middle
	// (tailscale issue 18757); meanwhile programs ask the servers in it, or us.
	settleWritten = 4 * time.Second
	// settleLimit ends the wait for a file that is never quiet. It must be
	// longer than a DHCP client that pauses twice.
	settleLimit = 15 * time.Second

	// maxActs within actWindow are allowed, of taking over again above all. A
	// VPN that comes up while the network changes writes three or four times;
	// a program that writes more often than that is reacting to us, and would continue forever.
	maxActs   = 5
	actWindow = time.Minute
	// contendedQuiet is how long the file must be left alone before it is
	// taken over again. It is longer than the pause of a program that puts its
	// file back on a timer of some seconds, and short enough that a host whose
	// network has come to rest resolves cluster names again within a minute.
	contendedQuiet = 30 * time.Second

	// retryFailed is how long after a failed attempt the next one is made.
	retryFailed = 10 * time.Second

	// maxEvents is how many events are kept.
	maxEvents = 10
)

// Event is something that happened to the file while attached.
type Event struct {
	Time   time.Time // when it was first seen
	What   string    // what happened
	By     string    // who did it; "unknown" if it can't be known
	Action string    // what was done about it
	// Count is how often it happened until Last, where it is more than once.
	Count int
	Last  time.Time
}

// Evidence is what a Watcher knows beyond the state of the files. A zero one
// knows nothing, which makes a Keeper slower and no less right.
type Evidence interface {
	// Follow says which names matter from now on.
	Follow(names []string)
	// Renamed reports whether the last change of a name was that a file was
	// renamed to it, which therefore is complete.
	Renamed(name string) bool
	// Writer names the process that changed a name since it was last asked
	// for, "" if it isn't known.
	Writer(name string) string
}

// KeeperOptions are the settings of NewKeeper.
type KeeperOptions struct {
	Manager *Manager
	// TakeOver is how the file was taken over.
	TakeOver TakeOver
	Evidence Evidence
	// Servers is called with what the host's servers are now, before the file
	// is touched and only if they, the search list or the options differ from
	// last time. It returns an error if they can't be used.
	Servers func(Inspection) error
	Logger  *zap.Logger // nil logs nothing
	// Now is the clock, with a monotonic reading; nil is time.Now.
	Now func() time.Time
}

// Keeper looks after a file that is taken over: it adopts what others write, as
// far as its policy lets it, and keeps ours in place. It never adopts a file
// that names no server or may still be being written. Check is called by one
// goroutine, the other methods by any.
type Keeper struct {
	o   KeeperOptions
	log *zap.Logger

	policy   Policy
	seen     sighting    // of the last Check
	changed  time.Time   // when seen began to be what it is, to the inode and the time
	content  string      // of the last sighting that was usable
	became   time.Time   // when that was new
	restless time.Time   // since when the file has not settled; zero: it has
	settled  string      // the identity that needs nothing more
	rested   Standing    // with which it settled
	served   string      // the servers that were last announced
	carried  string      // what our file has from the original
	acts     []time.Time // when something was done, within actWindow
	retryAt  time.Time
	failure  string
	pending  *Event // of the change that has not settled

	mu       sync.Mutex // guards what follows
	standing Standing
	events   []*Event
}

// NewKeeper returns a Keeper of a file that was inspected as now. It looks at
// the first Check.
func NewKeeper(o KeeperOptions, now Inspection) *Keeper {
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	// From here on there are servers to ask, whatever the file says.
	o.TakeOver.UpstreamsGiven, o.TakeOver.LastGood = true, addresses(now)
	return &Keeper{o: o, log: o.Logger, standing: StandingKept, served: servers(now), carried: carried(now)}
}

// Standing says how our file stands.
func (k *Keeper) Standing() Standing {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.standing
}

// Events returns the last events, oldest first.
func (k *Keeper) Events() []Event {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]Event, 0, len(k.events))
	for _, e := range k.events {
		out = append(out, *e)
	}
	return out
}

// servers is what a resolver makes of an inspection, in one text.
func servers(i Inspection) string {
	return fmt.Sprint(addresses(i), carried(i))
}

// carried is what programs find in our file that is the original's. Comments are
// carried too, and no reason to write it again.
func carried(i Inspection) string {
	return fmt.Sprint(i.File.SearchKeyword, i.File.Search, i.File.Options, i.File.Sortlist)
}

func addresses(i Inspection) []netip.Addr {
	out := make([]netip.Addr, 0, len(i.Upstreams))
	for _, u := range i.Upstreams {
		out = append(out, u.Addr)
	}
	return out
}

// sighting is what one look found.
type sighting struct {
	survey
	identity string // differs whenever anything was done to the file or its target
	content  string // differs whenever a resolver would notice
}

// ours: our file, where everybody can read it.
func (s sighting) ours() bool { return s.State == StateOurs && !s.covered() && s.readable() }

// covered: a mount hides the name, and it is not the one whose file was taken
// over in place.
func (s sighting) covered() bool { return s.cur.info.MountRoot && !s.rec.original.InPlace }

// readable: by all, without which only root has DNS. The mode of a file that is
// overwritten in place is its owner's, as before, and can't be made good.
func (s sighting) readable() bool {
	return s.rec.original.InPlace || s.cur.info.Mode.Perm()&0o444 == 0o444
}

// usable: the source that counts names a server to ask. What others remember,
// the journal too, is no reason to touch anything.
func (s sighting) usable() bool {
	if s.State != StateOurs && strands(s.cur, s.rec) {
		return false
	}
	return len(s.File.Nameservers) > 0 &&
		slices.ContainsFunc(s.Upstreams, func(u Upstream) bool { return u.Source != journalSource })
}

// isLink: what is complete by itself, wherever it leads.
func (s sighting) isLink() bool { return s.cur.Type == TypeSymlink }

func (k *Keeper) sight() (sighting, error) {
	m := k.o.Manager
	m.mu.Lock()
	defer m.mu.Unlock()
	found, err := m.inspect(append(slices.Clone(m.opts.Listen), k.o.TakeOver.Nameservers...))
	if err != nil {
		return sighting{}, err
	}
	s := sighting{survey: found}
	target := ""
	if info, err := m.fs.Lstat(s.Target); err == nil {
		target = fmt.Sprint(info.Dev, info.Ino, info.Mtime.UnixNano())
	}
	i := s.cur.info
	s.content = strings.Join([]string{
		string(s.State), string(s.Type), s.cur.link, digest(s.cur.content), s.Target, digest(s.eff.content), servers(s.Inspection),
	}, "\n")
	s.identity = s.content + fmt.Sprint("\n", i.Dev, i.Ino, i.Mtime.UnixNano(), i.Mode, i.MountID, i.Immutable, target)
	return s, nil
}

// Check looks at the file and does what is due. It returns after which time it
// must be called again if nothing wakes it before; 0 is never.
func (k *Keeper) Check(policy Policy) time.Duration {
	now := k.o.Now()
	s, err := k.sight()
	if err != nil {
		k.fail(err)
		return retryFailed
	}
	if policy != k.policy {
		k.policy, k.settled, k.acts = policy, "", nil
		k.setStanding(StandingKept)
	}
	k.follow(s)
	changed := s.identity != k.seen.identity
	if changed {
		k.changed = now
	}
	// A program that writes in place empties the file first, which means nothing.
	if s.usable() && s.content != k.content {
		k.content, k.became = s.content, now
	}
	k.seen = s

	if k.Standing() == StandingContended {
		return k.contended(now, s, changed)
	}
	if s.identity == k.settled {
		if k.pending != nil {
			k.finish(now, s, "none: it was undone at once")
			k.setStanding(k.rested)
		}
		k.restless = time.Time{}
		return 0
	}
	if k.restless.IsZero() {
		k.restless = now
	}
	harmless := s.ours() || k.policy == PolicyObserve
	if !harmless {
		k.notice(now, s)
	}
	if wait := k.settleTime(s) - now.Sub(k.changed); wait > 0 {
		left := settleLimit - now.Sub(k.restless)
		if left <= 0 && !harmless {
			k.contend(now, s, fmt.Sprintf("not at rest for %s", settleLimit))
			return contendedQuiet
		}
		return wait
	}
	if wait := k.retryAt.Sub(now); wait > 0 {
		return wait
	}
	return k.act(now, s)
}

// follow tells the evidence where changes matter: the name itself, the way to
// what counts, and where managers publish their servers.
func (k *Keeper) follow(s sighting) {
	m := k.o.Manager
	names := append([]string{m.path, m.parked, s.Target, m.opts.Root + resolvedUplinks, m.opts.Root + nmUplinks}, s.eff.links...)
	slices.Sort(names)
	k.o.Evidence.Follow(slices.Compact(names))
}

// settleTime is how long the file must have been what it is.
func (k *Keeper) settleTime(s sighting) time.Duration {
	name := s.Path
	if s.State == StateOurs || s.isLink() {
		name = s.Target
	}
	switch {
	case s.covered(), s.State == StateOurs && servers(s.Inspection) == k.served:
		return settleWhole // There is nothing in it that could be half.
	case s.usable() && (s.isLink() && !s.eff.dangling || k.o.Evidence.Renamed(name)):
		return settleWhole
	}
	return settleWritten
}

// notice opens the event of a change, or brings it up to date.
func (k *Keeper) notice(now time.Time, s sighting) {
	if k.pending == nil {
		k.setStanding(StandingUnsettled)
		k.pending = k.event(now, s, "waiting until it is complete")
		return
	}
	by := k.by(s)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pending.What = k.what(s)
	if by != unknownWriter {
		k.pending.By = by
	}
}

// act does what a settled file calls for.
func (k *Keeper) act(now time.Time, s sighting) time.Duration {
	switch {
	case s.ours() || k.policy == PolicyObserve:
		return k.keep(now, s)
	case k.exhausted(now):
		k.contend(now, s, fmt.Sprintf("changed more than %d times within %s", maxActs, actWindow))
		return contendedQuiet
	case s.covered():
		return k.yield(now, s, "left in place: it can't be replaced until it is unmounted")
	case k.policy == PolicyYield && s.State != StateOurs && (s.usable() || s.isLink()):
		return k.yield(now, s, "left in place, as onForeignChange says")
	}
	_, reverted := s.rec.reverted(s.cur)
	switch {
	case reverted:
		return k.retake(now, s, k.o.Manager.TakeOver, "taken over again; the original of before the last change is the original again")
	case !s.rec.known, s.State == StateOriginal, s.State == StateForeign && (s.usable() || s.isLink()):
		// First: they are asked from the moment at which ours is in place.
		k.announce(s)
		return k.retake(now, s, k.o.Manager.TakeOver, "taken over again; theirs is the original now, which detach restores")
	}
	return k.retake(now, s, k.o.Manager.PutBack, "ours put back; the original stays what it was")
}

// keep follows what is behind our file, which is in place, or the file that is
// only observed.
func (k *Keeper) keep(now time.Time, s sighting) time.Duration {
	if s.usable() && servers(s.Inspection) != k.served {
		if k.exhausted(now) {
			return retryFailed
		}
		if k.pending == nil {
			k.pending = k.event(now, s, "")
		}
		if !k.announce(s) {
			return retryFailed
		}
		k.finish(now, s, "followed")
		if k.policy != PolicyObserve && carried(s.Inspection) != k.carried {
			if err := k.o.Manager.TakeOver(k.o.TakeOver); err != nil {
				k.fail(err)
				return retryFailed
			}
			k.carried = carried(s.Inspection)
		}
		var err error
		if s, err = k.sight(); err != nil {
			k.fail(err)
			return retryFailed
		}
	} else if k.pending != nil || k.Standing() == StandingYielded {
		k.finish(now, s, "kept")
	}
	k.rest(s, StandingKept)
	return 0
}

// yield leaves theirs in place.
func (k *Keeper) yield(now time.Time, s sighting, action string) time.Duration {
	k.announce(s)
	k.finish(now, s, action)
	k.rest(s, StandingYielded)
	return 0
}

// retake puts ours in place by way of do.
func (k *Keeper) retake(now time.Time, s sighting, do func(TakeOver) error, action string) time.Duration {
	if err := do(k.o.TakeOver); err != nil {
		k.retryAt = now.Add(retryFailed)
		k.fail(err)
		return retryFailed
	}
	k.finish(now, s, action)
	after, err := k.sight()
	if err != nil {
		k.fail(err)
		return retryFailed
	}
	k.announce(after)
	k.carried = carried(after.Inspection)
	if !after.ours() {
		return settleWhole // Somebody was there at once: it has not settled.
	}
	k.rest(after, StandingKept)
	return 0
}

// rest notes that the file is as it should be.
func (k *Keeper) rest(s sighting, standing Standing) {
	k.seen, k.settled, k.restless, k.pending = s, s.identity, time.Time{}, nil
	k.retryAt, k.failure, k.rested = time.Time{}, "", standing
	k.setStanding(standing)
	k.follow(s)
}

// exhausted reports whether another act would be one too many.
func (k *Keeper) exhausted(now time.Time) bool {
	k.acts = slices.DeleteFunc(k.acts, func(t time.Time) bool { return now.Sub(t) >= actWindow })
	return len(k.acts) >= maxActs
}

func (k *Keeper) contend(now time.Time, s sighting, why string) {
	k.finish(now, s, fmt.Sprintf("contended: %s: theirs stays until it has been left alone for %s", why, contendedQuiet))
	k.setStanding(StandingContended)
}

// contended waits until they are quiet, follows their servers, and counts.
func (k *Keeper) contended(now time.Time, s sighting, changed bool) time.Duration {
	if changed {
		k.mu.Lock()
		last := k.events[len(k.events)-1]
		last.Count, last.Last = max(last.Count, 1)+1, now
		k.mu.Unlock()
	}
	if quiet := contendedQuiet - now.Sub(k.changed); quiet > 0 {
		if now.Sub(k.became) >= settleWritten {
			k.announce(s)
		}
		return min(quiet, settleWritten)
	}
	k.acts, k.restless = nil, now
	k.setStanding(StandingUnsettled)
	return k.act(now, s)
}

// announce reports new servers, and returns whether there are any.
// While the file names none, those that are in use stay.
func (k *Keeper) announce(s sighting) bool {
	if !s.usable() || servers(s.Inspection) == k.served {
		return false
	}
	if err := k.o.Servers(s.Inspection); err != nil {
		k.fail(err)
		return false
	}
	k.served = servers(s.Inspection)
	k.o.TakeOver.LastGood = addresses(s.Inspection)
	return true
}

// finish closes the event of a change with what was done about it, and logs it.
func (k *Keeper) finish(now time.Time, s sighting, action string) {
	if k.pending == nil {
		k.pending = k.event(now, s, "")
	}
	// It may have become known only now.
	by := k.by(s)
	k.mu.Lock()
	e := k.pending
	e.Action = action
	if by != unknownWriter {
		e.By = by
	}
	logged := *e
	k.mu.Unlock()
	k.pending = nil
	k.acts = append(k.acts, now)
	k.log.Warn("resolver file changed by somebody else", zap.String("path", s.Path),
		zap.String("what", logged.What), zap.String("by", logged.By), zap.String("action", logged.Action))
}

// fail notes in the event, and logs once, that something could not be done.
func (k *Keeper) fail(err error) {
	if k.pending != nil {
		k.mu.Lock()
		k.pending.Action = "failed, tried again later: " + err.Error()
		k.mu.Unlock()
	}
	if err.Error() == k.failure {
		return
	}
	k.failure = err.Error()
	k.log.Error("resolver file not looked after, tried again later", zap.Error(err))
}

func (k *Keeper) setStanding(s Standing) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.standing = s
}

// event adds an event to the list.
func (k *Keeper) event(now time.Time, s sighting, action string) *Event {
	e := &Event{Time: now, What: k.what(s), By: k.by(s), Action: action}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.events = append(k.events, e)
	k.events = k.events[max(0, len(k.events)-maxEvents):]
	return e
}

// what says what was found in place of what was there.
func (k *Keeper) what(s sighting) string {
	_, reverted := s.rec.reverted(s.cur)
	switch {
	case s.covered():
		return "covered by a mount"
	case s.ours() && s.Target == k.o.Manager.parked, s.ours() && servers(s.Inspection) == k.served:
		return "ours is in place again"
	case s.ours():
		return s.Target + " has other servers, search domains or options"
	case s.State == StateOurs:
		return fmt.Sprintf("mode set to %04o", s.cur.info.Mode.Perm())
	case s.cur.Type == TypeMissing:
		return "removed"
	case s.isLink():
		return "replaced by a symbolic link to " + s.cur.link
	case s.cur.Type == TypeOther:
		return "replaced by " + safefile.Kind(s.cur.info.Mode)
	case reverted, sealed(s.cur.content):
		return "replaced by an earlier file of ours"
	case s.State == StateOriginal && s.rec.known:
		return "replaced by the original"
	case !s.usable():
		return "replaced by a file that names no server"
	}
	return "replaced by a file with other servers"
}

// unknownWriter is who did what nobody owns up to.
const unknownWriter = "unknown"

// by names who did it, as far as that can be known: the program that a comment
// or the place of the file gives away, and the process.
func (k *Keeper) by(s sighting) string {
	name := s.Path
	if s.ours() {
		name = s.Target
	}
	var known []string
	switch s.Owner {
	case OwnerNone, OwnerUnknown, OwnerPlain, OwnerOurselves, OwnerAdmin, OwnerContainer:
	default:
		if s.State != StateOurs || s.ours() {
			known = append(known, string(s.Owner))
		}
	}
	if writer := k.o.Evidence.Writer(name); writer != "" && !s.covered() {
		known = append(known, writer)
	}
	if len(known) == 0 {
		return unknownWriter
	}
	return strings.Join(known, ", ")
}
