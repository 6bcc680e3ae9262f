//go:build linux

package host

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

const (
	// maxHeals is how often the same is put back within healWindow until others seem to take it away on purpose; it is put
	// back every healPause from then on, until it has been left alone for healWindow.
	maxHeals   = 5
	healWindow = time.Minute
	healPause  = 10 * time.Second

	// maxEvents bounds what is remembered of the past.
	maxEvents = 16
)

// keeping is what became of what was put into the kernel.
type keeping struct {
	events []status.KernelEvent
	heals  map[string][]time.Time // within the window, by what was put back
}

// Keep looks whether what was put into the kernel is still there, and puts back what is not. It returns a problem as long as
// something is missing, or is taken away again and again; empty if all is well. It is meant to be called each second.
func (h *Host) Keep(now time.Time) (problem string) {
	if h.datapath == nil {
		return ""
	}
	k := &h.keeping
	wrong := append(h.datapath.Verify(), lostSysctls()...)
	last := k.fight(now)
	switch {
	case len(wrong) == 0 && !last.IsZero():
		return "others keep taking away what is in the kernel (see the events): stop them"
	case len(wrong) == 0:
		return ""
	case now.Sub(last) < healPause:
		return fmt.Sprintf("%s: others keep taking it away: it is put back every %s: stop them", strings.Join(wrong, "; "), healPause)
	}
	err := h.heal()
	for _, what := range wrong {
		k.heals[what] = append(k.heals[what], now)
	}
	action := "put back"
	if err != nil {
		action = "not put back: " + err.Error()
	}
	if k.record(now, strings.Join(wrong, "; "), action) {
		h.log.Warn("what is in the kernel was changed by others", zap.Strings("what", wrong), zap.String("action", action))
	}
	if err != nil {
		return fmt.Sprintf("%s: %s", strings.Join(wrong, "; "), action)
	}
	return ""
}

// fight returns when something was put back last that others take away again and again; a zero time if there is no such thing.
func (k *keeping) fight(now time.Time) (last time.Time) {
	if k.heals == nil {
		k.heals = make(map[string][]time.Time)
	}
	for what, times := range k.heals {
		times = slices.DeleteFunc(times, func(at time.Time) bool { return now.Sub(at) > healWindow })
		if k.heals[what] = times; len(times) == 0 {
			delete(k.heals, what)
		} else if at := times[len(times)-1]; len(times) >= maxHeals && at.After(last) {
			last = at
		}
	}
	return last
}

// record remembers an event. It reports whether that is another one than before.
func (k *keeping) record(now time.Time, what, action string) (other bool) {
	now = now.UTC().Truncate(time.Millisecond)
	if n := len(k.events); n > 0 && k.events[n-1].What == what && k.events[n-1].Action == action {
		last := &k.events[n-1]
		last.Count, last.Last = max(last.Count, 1)+1, &now
		return false
	}
	k.events = append(k.events, status.KernelEvent{Time: now, What: what, Action: action})
	k.events = k.events[max(0, len(k.events)-maxEvents):]
	return true
}

// Events are what Keep has found and done, oldest first. The caller may keep them.
func (h *Host) Events() []status.KernelEvent { return slices.Clone(h.keeping.events) }

func lostSysctls() (lost []string) {
	for _, name := range plan.LoopbackSysctls() {
		if value, err := netdev.Sysctl(name); err == nil && value != "1" {
			lost = append(lost, fmt.Sprintf("sysctl %s is %s", name, value))
		}
	}
	return lost
}

func (h *Host) heal() error {
	errs := []error{h.datapath.Heal()}
	for _, name := range plan.LoopbackSysctls() {
		errs = append(errs, h.setSysctl(name, "1"))
	}
	return errors.Join(errs...)
}
