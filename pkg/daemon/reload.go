//go:build linux

package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
)

// ErrNeedsDetach is returned by Reload for a setting that can't change while attached.
var ErrNeedsDetach = errors.New("can't change while attached")

// reload is a new routing on its way into effect.
type reload struct {
	config   config.Config
	routing  routing
	snapshot discovery.Snapshot
	done     chan error
}

// reloadResult is what the control socket answers.
type reloadResult struct {
	Changed bool   `json:"changed"`
	Error   string `json:"error,omitempty"`
}

// Reload gives new settings to the running daemon, which goes over to them without losing a query. changed is false if
// it has them already. Without a daemon that takes orders, or any more, it fails with ErrNotServing.
func Reload(ctx context.Context, c config.Config) (changed bool, err error) {
	body, err := json.Marshal(c)
	if err != nil {
		return false, fmt.Errorf("encode settings: %w", err)
	}
	var result reloadResult
	// First: one that hangs is not waited for as long as new settings may take.
	err = askDaemon(ctx, c, controlTimeout, http.MethodGet, "/status", nil, new(json.RawMessage))
	if err == nil {
		err = askDaemon(ctx, c, c.Wait+controlTimeout, http.MethodPost, "/reload", body, &result)
	}
	switch {
	case errors.Is(err, errNoDaemon):
		return false, ErrNotServing
	case errors.Is(err, errHangs):
		return false, fmt.Errorf("attached already, and %w: see %s, or end it with k2s-dnsbpf detach", err, filepath.Join(c.RunDir, LogFile))
	case err != nil:
		return false, err
	}
	if result.Error != "" {
		return false, errors.New(result.Error)
	}
	return result.Changed, nil
}

func (d *Daemon) handleReload(ctx context.Context, c config.Config) reloadResult {
	d.mu.Lock()
	now, source := d.config, d.routing.source
	d.mu.Unlock()
	if sameSettings(c, now) && !source.Outdated() {
		return reloadResult{}
	}
	if err := d.reload(ctx, now, c); err != nil {
		return reloadResult{Error: fmt.Sprintf("attach with new settings: %s (the old ones stay)", err)}
	}
	return reloadResult{Changed: true}
}

// sameSettings compares by meaning: an empty list and none are the same.
func sameSettings(a, b config.Config) bool {
	left, errLeft := json.Marshal(a)
	right, errRight := json.Marshal(b)
	return errLeft == nil && errRight == nil && bytes.Equal(left, right)
}

// reload prepares the new routing beside the old one, which goes on working, and has serve switch over to it.
func (d *Daemon) reload(ctx context.Context, now, c config.Config) error {
	// All that is not routing must be as it is.
	fixed := c
	fixed.DNSEndpoints, fixed.Kubeconfig, fixed.Upstreams = now.DNSEndpoints, now.Kubeconfig, now.Upstreams
	fixed.Zones, fixed.ServiceCIDRs, fixed.PodCIDRs = now.Zones, now.ServiceCIDRs, now.PodCIDRs
	fixed.DNSService, fixed.CorefileConfigMap, fixed.StubZones = now.DNSService, now.CorefileConfigMap, now.StubZones
	fixed.EndpointPreference, fixed.NodeName = now.EndpointPreference, now.NodeName
	fixed.Allowed, fixed.Pods, fixed.ClusterDNS = now.Allowed, now.Pods, now.ClusterDNS
	fixed.Wait, fixed.Linger, fixed.OnForeignChange = now.Wait, now.Linger, now.OnForeignChange
	if !sameSettings(fixed, now) {
		return fmt.Errorf("%w: topology, resolver, KubeSwitch address, --no-bpf, log level and paths: detach first", ErrNeedsDetach)
	}
	ctx, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	routing, err := d.newRouting(c)
	if err != nil {
		return err
	}
	routing.start(d.log)
	snapshot, err := routing.source.WaitForSync(ctx)
	if err != nil {
		routing.stop()
		return err
	}
	request := &reload{config: c, routing: routing, snapshot: snapshot, done: make(chan error, 1)}
	select {
	case d.reloads <- request:
		err = <-request.done
	case <-ctx.Done():
		err = fmt.Errorf("the daemon is stopping: %w", ctx.Err())
	}
	if err != nil {
		routing.stop()
	}
	return err
}

// commit switches to a prepared routing, or stays with the old one.
func (d *Daemon) commit(request *reload) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	old, oldConfig, oldSnapshot := d.routing, d.config, d.snapshot
	d.routing, d.config = request.routing, request.config
	// They may have changed while the request was on its way.
	d.routing.upstreams = upstreams(d.config, d.inspection)
	if err := d.program(request.snapshot); err != nil {
		d.routing, d.config = old, oldConfig
		return errors.Join(err, d.program(oldSnapshot))
	}
	if err := d.recordSettings(d.journal.Header()); err != nil {
		d.log.Error("new settings not in the journal", zap.Error(err))
	}
	old.stop()
	if err := d.publishKubeletFile(); err != nil {
		d.log.Error("resolver file for pods not renewed", zap.Error(err))
	}
	d.log.Info("new settings", zap.Strings("zones", zoneNames(d.network.zones)), zap.Stringers("upstreams", d.upstreams()))
	return nil
}
