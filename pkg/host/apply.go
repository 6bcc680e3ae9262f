//go:build linux

package host

import (
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
)

// Apply applies a plan to the kernel. Something for which there is no room, or that has another owner, does not prevent the
// rest: it is reported as a problem. After an error the kernel is between the old and the new plan, and another
// Apply of either continues from there.
//
// Hooks for replies are attached before queries are steered. Those of the previous plan stay attached
// until the next Apply: some replies may still be on their way.
func (h *Host) Apply(k *plan.Kernel) (problems []plan.Problem, err error) {
	if h.datapath == nil || k == nil {
		return nil, nil
	}
	// Old ones stay for now: replies to what old attachments still steer, a dead daemon's too, need them.
	if err := h.datapath.AddReplyVia(k.ReplyVia); err != nil {
		return nil, err
	}
	if err := h.datapath.ReplaceSources(convert(k.Sources, func(s plan.Source) datapath.Source { return datapath.Source(s) })); err != nil {
		return nil, err
	}
	if err := h.datapath.ReplaceListeners(convert(k.Listeners, listener)); err != nil {
		return nil, err
	}
	attachments := convert(k.Hooks, attachment)
	for _, old := range h.hooks {
		if a := attachment(old); old.Kind == plan.FromBackend && !slices.Contains(attachments, a) && netdev.Exists(old.Ifindex) {
			attachments = append(attachments, a)
		}
	}
	if filter := k.IngressFilter; filter.Index != 0 {
		a, err := h.datapath.TryIngressFilter(filter.Name, filter.Index)
		if err != nil {
			h.log.Warn("no source check in the kernel: the forwarder checks sources instead", zap.Error(err))
			problems = append(problems, plan.Problem{Kind: plan.ProblemIngressFilter, Text: err.Error()})
		} else {
			attachments = append(attachments, a)
		}
	}
	if err := h.datapath.ReplaceAttachments(attachments); err != nil {
		return problems, err
	}
	h.hooks = k.Hooks
	if err := (filters{h.journal}).keepOnly(attachments); err != nil {
		return problems, err
	}
	if err := h.datapath.ReplaceReplyVia(k.ReplyVia); err != nil {
		return problems, err
	}
	left, err := h.steer(k)
	if err == nil && !h.swept {
		h.swept = true
		h.sweep()
	}
	return append(problems, left...), err
}

// sweep detaches what a dead daemon left and the plan does not want, and which would keep steering.
func (h *Host) sweep() {
	ghosts, unseen, err := detachGhosts(h.datapath.Loaded)
	for _, line := range slices.Concat(ghosts, unseen) {
		h.log.Warn("programs of an earlier attachment", zap.String("found", line))
	}
	if err != nil {
		h.log.Error("programs of an earlier attachment are left", zap.Error(err))
	}
}

// steer writes zones and endpoints to the kernel. Zones for which there is no room stay with the forwarder.
func (h *Host) steer(k *plan.Kernel) (problems []plan.Problem, err error) {
	trials := make(map[string]datapath.Backend, len(k.Trials))
	wanted := make([]string, 0, len(k.Trials)+len(k.Zones))
	for zone, backend := range k.Trials {
		trials[zone] = datapath.Backend(backend)
		wanted = append(wanted, zone)
	}
	steered, left, err := datapath.FitZones(append(wanted, k.Zones...))
	if err != nil {
		return nil, err
	}
	if len(left) > 0 {
		problems = append(problems, plan.Problem{Kind: plan.ProblemZones, Text: fmt.Sprintf(
			"%d of %d zones are served by the forwarder only, from %s on: too many for the kernel programs: name fewer with --zone, --service-cidr and --pod-cidr",
			len(left), len(k.Zones), left[0])})
	}
	backend := func(b plan.Backend) datapath.Backend { return datapath.Backend(b) }
	return problems, h.datapath.ReplaceZones(steered[len(trials):], convert(k.Backends, backend), convert(k.Fallback, backend), trials)
}

func convert[T, F any](from []F, to func(F) T) []T {
	result := make([]T, 0, len(from))
	for _, value := range from {
		result = append(result, to(value))
	}
	return result
}

func listener(l plan.Listener) datapath.Listener {
	scope := map[plan.Scope]datapath.Scope{
		plan.ScopeHost: datapath.ScopeHost, plan.ScopeKubeSwitch: datapath.ScopeKubeSwitch, plan.ScopePod: datapath.ScopePod,
		plan.ScopeTransparent: datapath.ScopeTransparent, plan.ScopeShared: datapath.ScopeShared,
	}[l.Scope]
	return datapath.Listener{Address: l.Address, Scope: scope}
}

func attachment(hook plan.Hook) datapath.Attachment {
	program := map[plan.HookKind]datapath.Program{
		plan.FromBackend: datapath.FromBackend, plan.FromHost: datapath.FromHost, plan.FromClient: datapath.FromClient,
	}[hook.Kind]
	return datapath.Attachment{
		Program: program, Interface: hook.Interface, Ifindex: hook.Ifindex, Egress: hook.Kind == plan.FromHost,
	}
}
