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
	k.forget(now)
	wrong := h.wrong()
	if len(wrong) == 0 {
		if k.fighting() {
			return "others keep taking away what is in the kernel (see the events): stop them"
		}
		return ""
	}
	// What nobody fights over is not to wait for what somebody does.
	if !slices.ContainsFunc(wrong, func(what string) bool { return k.due(what, now) }) {
		return fmt.Sprintf("%s: others keep taking it away: it is put back every %s: stop them", strings.Join(wrong, "; "), healPause)
	}
	err := h.heal()
	left := h.wrong()
	for _, what := range wrong {
		if !slices.Contains(left, what) {
			k.heals[what] = append(k.heals[what], now)
		}
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

func (h *Host) wrong() []string { return append(h.datapath.Verify(), lostSysctls()...) }

// forget forgets what was put back before the window.
func (k *keeping) forget(now time.Time) {
	if k.heals == nil {
		k.heals = make(map[string][]time.Time)
	}
	for what, times := range k.heals {
		times = slices.DeleteFunc(times, func(at time.Time) bool { return now.Sub(at) > healWindow })
		if k.heals[what] = times; len(times) == 0 {
			delete(k.heals, what)
		}
	}
}

// fighting reports whether others take something away again and again that was put back each time.
func (k *keeping) fighting() bool {
	for _, times := range k.heals {
		if len(times) >= maxHeals {
			return true
		}
	}
	return false
}

// due reports whether it is time to put something back: at once, unless there is a fight over it.
func (k *keeping) due(what string, now time.Time) bool {
	times := k.heals[what]
	return len(times) < maxHeals || now.Sub(times[len(times)-1]) >= healPause
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
