//go:build linux

package datapath

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
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

// coarseClock reads the clock that the kernel programs use, in nanoseconds: that of the initial time namespace.
func coarseClock() (int64, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return now.Nano() - clockOffset(), nil
}

const maxOffsets = 4096 // octets: two lines

// clockOffset is what this process's time namespace adds to the monotonic clock (time_namespaces(7)). It never changes.
var clockOffset = sync.OnceValue(func() int64 {
	text, err := safefile.ReadFile(context.Background(), "/proc/self/timens_offsets", maxOffsets)
	if err != nil {
		return 0 // a kernel without time namespaces
	}
	return monotonicOffset(string(text))
})

func monotonicOffset(offsets string) int64 {
	for line := range strings.Lines(offsets) {
		fields := strings.Fields(line)
		if len(fields) != 3 || fields[0] != "monotonic" {
			continue
		}
		seconds, err := strconv.ParseInt(fields[1], 10, 64)
		nanoseconds, nsErr := strconv.ParseInt(fields[2], 10, 64)
		if err != nil || nsErr != nil {
			return 0
		}
		return seconds*int64(time.Second) + nanoseconds
	}
	return 0
}
