package netdev

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Slept returns for how long the machine has been suspended since it was started: what CLOCK_BOOTTIME has counted and CLOCK_MONOTONIC
// has not (clock_gettime(2)).
func Slept() (time.Duration, error) {
	var boot, awake unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &awake); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return time.Duration(boot.Nano() - awake.Nano()), nil
}
