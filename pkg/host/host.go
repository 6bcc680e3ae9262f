//go:build linux

package host

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// HeartbeatLimit is how long the kernel programs wait for a sign of life until they take the daemon for dead.
const HeartbeatLimit = 3 * time.Second

// drainTimeout is how long replies of steered queries are waited for.
const drainTimeout = 250 * time.Millisecond

// Host is what an attachment changes on this host. Its methods are for one goroutine at a time.
type Host struct {
	config   config.Config
	journal  *state.Journal
	log      *zap.Logger
	datapath *datapath.Datapath // nil without BPF
	hooks    []plan.Hook        // of the last plan
	keeping  keeping
	swept    bool // of what a dead daemon left where nobody sees it
}

// New returns a Host whose changes are recorded in the journal. Nothing is changed yet.
func New(c config.Config, journal *state.Journal, log *zap.Logger) *Host {
	return &Host{config: c, journal: journal, log: log}
}

// Datapath returns the loaded programs, nil before Load and where the settings want none.
func (h *Host) Datapath() *datapath.Datapath { return h.datapath }

// Load loads the kernel programs, and sets the sysctls that they need. Nothing is steered yet.
func (h *Host) Load() error {
	if !h.config.BPF {
		return nil
	}
	ports, err := netdev.PortsOutsideEphemeral()
	if err != nil {
		return err
	}
	for _, name := range plan.LoopbackSysctls() {
		if err := h.setSysctl(name, "1"); err != nil {
			return err
		}
	}
	if err := h.journal.Record(changePins, h.config.BPFFS, nil); err != nil {
		return err
	}
	h.datapath, err = datapath.Load(datapath.Options{
		PinDir:         h.config.BPFFS,
		NATPorts:       datapath.PortRange(ports),
		TrafficControl: filters{h.journal},
		XDPProgram:     netdev.XDPProgram,
		Answers:        datapath.SizeOfAnswers(h.config.CacheEntries),
	})
	if err != nil {
		return err
	}
	return h.datapath.Heartbeat(HeartbeatLimit)
}

func (h *Host) setSysctl(name, value string) error {
	old, err := netdev.Sysctl(name)
	if err != nil {
		return err
	}
	if old == value {
		// Perhaps by a daemon before us whose journal is lost.
		known, err := copiedSysctls(h.config)
		if err != nil {
			h.log.Warn("nobody knows whether a sysctl was set by an earlier daemon", zap.String("sysctl", name), zap.Error(err))
		}
		if change, ok := known[name]; ok {
			return h.journal.Record(changeSysctl, name, change)
		}
		return nil
	}
	if err := h.journal.Record(changeSysctl, name, sysctlChange{Old: old, New: value}); err != nil {
		return err
	}
	if err := copySysctl(h.config, name, sysctlChange{Old: old, New: value}); err != nil {
		h.log.Warn("the journal alone knows what a sysctl was before", zap.String("sysctl", name), zap.Error(err))
	}
	return netdev.SetSysctl(name, value)
}

// Drain stops steering, and waits for the replies that are under way.
func (h *Host) Drain(ctx context.Context) error {
	if err := errors.Join(h.datapath.DetachQueries(), filters{h.journal}.detachQueries()); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	return h.datapath.Drain(ctx)
}
