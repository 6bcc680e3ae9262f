//go:build linux

package daemon

import (
	"context"
	"fmt"
	"path/filepath"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// Plan describes what an attach with this configuration would do, one line per step, and fails where that would fail.
// It changes nothing, but briefly listens on the addresses, as the check of an attach does.
func Plan(ctx context.Context, c config.Config, log *zap.Logger) (lines []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	d := New(c, "", log)
	d.answers = nil // nothing is asked of the cluster for it
	if d.journal, err = state.Open(c.StateDir); err != nil {
		return nil, err
	}
	same, err := host.SameNetwork(d.journal)
	switch {
	case err != nil:
		return nil, err
	case d.journal.Empty():
	case same && d.canAdopt(d.journal.Header()):
		lines = append(lines, "take over from a daemon that died")
	default:
		lines = append(lines, "undo what an earlier attachment left")
	}
	defer func() {
		d.now.source.stop()
		d.predecessor.Close()
		if d.forwarder != nil {
			_ = d.forwarder.Shutdown(ctx)
		}
	}()
	if lacks := host.Lacks(c); len(lacks) > 0 {
		return lines, lacks[0]
	}
	if err := d.check(ctx); err != nil {
		return lines, err
	}
	desired, err := d.plan(d.now)
	if err != nil {
		return lines, err
	}
	lines = append(lines, desired.Describe(c)...)
	lines = append(lines, "publish the upstreams for Pods in "+filepath.Join(c.StateDir, resolvconf.KubeletFile))
	if inspection := d.now.inspection; c.Resolver == config.ResolverTakeover {
		lines = append(lines, fmt.Sprintf("take over %s (%s, owner: %s)", c.ResolvConf, inspection.Type, inspection.Owner))
		for _, reason := range inspection.OwnerReasons {
			lines = append(lines, "owner: "+reason)
		}
	}
	return lines, nil
}
