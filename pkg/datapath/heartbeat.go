//go:build linux

package datapath

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Heartbeat tells the kernel programs that the daemon lives. Without another one for longer than limit they take it for
// dead, and steer external names to the fallback endpoints of ReplaceZones; but not those that were asked of a server
// that lives without the daemon, in the scopes of pods and of transparent interception. A limit of zero says goodbye:
// the daemon ends on purpose and is not to be missed.
func (d *Datapath) Heartbeat(limit time.Duration) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	now, err := coarseClock()
	if err != nil {
		return err
	}
	config, err := d.readConfig()
	if err != nil {
		return err
	}
	config.HeartbeatNs, config.HeartbeatLimitNs = uint64(now), uint64(limit.Nanoseconds())
	return d.writeConfig(config)
}

// coarseClock reads the clock that the kernel programs use, in nanoseconds.
func coarseClock() (int64, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return now.Nano(), nil
}
