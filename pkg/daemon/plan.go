//go:build linux

package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// Plan says what an attach with this configuration would do, one line for each step, and fails where that would fail.
// It changes nothing: for a moment it listens on the addresses, as the check of an attach does.
func Plan(ctx context.Context, c config.Config, log *zap.Logger) (lines []string, err error) {
	if pid, held := state.Holder(filepath.Join(c.RunDir, lockFile)); held {
		return []string{planBeside(pid, c)}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	d := New(c, "", log)
	if d.journal, err = state.Open(c.StateDir); err != nil {
		return nil, err
	}
	switch {
	case d.journal.Empty():
	case d.canAdopt(d.journal.Header()):
		lines = append(lines, "take over from a daemon that died")
	default:
		lines = append(lines, "undo what an earlier attachment left")
	}
	defer func() {
		d.routing.stop()
		d.predecessor.close()
		if d.forwarder != nil {
			_ = d.forwarder.Shutdown(ctx)
		}
	}()
	snapshot, err := d.check(ctx)
	if err != nil {
		return lines, err
	}
	n, err := d.lookAround(snapshot)
	if err != nil {
		return lines, err
	}
	return append(lines, d.describe(n)...), nil
}

// planBeside says what an attach does while a daemon is attached.
func planBeside(pid int, c config.Config) string {
	journal, err := state.Open(c.StateDir)
	if err == nil {
		var now config.Config
		if err := json.Unmarshal(journal.Header().Params, &now); err == nil && !sameSettings(now, c) {
			return fmt.Sprintf("attached already, by process %d: go over to these settings, without a gap", pid)
		}
	}
	return fmt.Sprintf("nothing: attached already, by process %d", pid)
}

func (d *Daemon) describe(n network) (lines []string) {
	say := func(format string, arguments ...any) { lines = append(lines, fmt.Sprintf(format, arguments...)) }
	for _, address := range d.listen {
		say("listen on %s, UDP and TCP", address)
	}
	if d.config.BPF {
		for _, name := range netdev.LoopbackSysctls() {
			say("set sysctl %s=1", name)
		}
		say("load the programs, pin them below %s", d.config.BPFFS)
		for _, attachment := range n.attachments() {
			say("attach %s", attachment)
		}
		if n.clients.Index != 0 {
			what := ""
			if d.sharesKubeSwitch() {
				what = " for cluster names"
			}
			say("let only %s ask%s on %s", n.allowed, what, n.clients.Name)
			if n.unsteered != "" {
				say("%s", unsteeredNote(n.unsteered))
			}
		}
	}
	for _, zone := range n.zones {
		say("answer zone %s from CoreDNS (%s)", zone.Name, zone.Source)
	}
	for _, e := range n.endpoints {
		how := "over " + e.route.Interface
		if !e.steerable() {
			how = e.note
		}
		say("endpoint %s (%s), %s", e.Address, e.Source, how)
	}
	for _, resolver := range n.resolvers {
		say("steer cluster names that are asked by UDP at %s, leave all else to the resolver there", resolver)
	}
	if shared := d.shared(n); shared != nil {
		say("%s", shared)
	}
	if d.isTransparent() {
		for _, limit := range config.TransparentLimits() {
			say("not covered: %s", limit)
		}
	}
	if len(d.listen) > 0 {
		for _, upstream := range d.upstreams() {
			say("send all other names to %s", upstream)
		}
	}
	say("publish the upstreams for pods in %s", filepath.Join(d.config.StateDir, resolvconf.KubeletFile))
	if d.config.Resolver == config.ResolverTakeover {
		say("take over %s (%s, owner: %s)", d.config.ResolvConf, d.inspection.Type, d.inspection.Owner)
		for _, reason := range d.inspection.OwnerReasons {
			say("owner: %s", reason)
		}
	}
	return lines
}

// PlanDetach says what a detach would do. It changes nothing.
func PlanDetach(c config.Config) (lines []string, err error) {
	journal, err := state.Open(c.StateDir)
	if err != nil {
		return nil, err
	}
	if pid, held := state.Holder(filepath.Join(c.RunDir, lockFile)); held {
		lines = append(lines, fmt.Sprintf("end the daemon, process %d", pid))
	}
	lines = append(lines, host.DescribeUndo(journal)...)
	if l, err := dialLingerer(c.RunDir); err == nil && l != nil {
		l.close()
		if c.Linger == 0 {
			lines = append(lines, fmt.Sprintf("end process %d, which lingers", l.pid))
		} else {
			lines = append(lines, fmt.Sprintf("leave process %d, which lingers", l.pid))
		}
	}
	if len(lines) == 0 {
		lines = []string{"nothing: not attached"}
	}
	return lines, nil
}
