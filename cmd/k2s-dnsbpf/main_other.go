//go:build !linux

package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
)

// commands are those that need a Linux host. They give scripts a reason instead of "unknown command".
func commands() (all []*cobra.Command) {
	for _, name := range []string{"attach", "detach", "restore", "status", "cache", "check", "doctor"} {
		all = append(all, &cobra.Command{
			Use:                name,
			Short:              "Needs a Linux host",
			DisableFlagParsing: true,
			RunE: func(*cobra.Command, []string) error {
				return fmt.Errorf("%s needs Linux, and this program was built for %s: run it on a Linux host of the cluster", name, runtime.GOOS)
			},
		})
	}
	return all
}

// The guardian exists only on Linux.
func asGuardian([]string) (is bool, err error) { return false, nil }

// prepareSignals does nothing: no command here runs long enough for signals to matter.
func prepareSignals(*cobra.Command, []string) {}
