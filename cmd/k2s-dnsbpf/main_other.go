//go:build !linux

package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
)

// commands are those of a Linux host. A script gets a reason from them, not "unknown command".
func commands() (all []*cobra.Command) {
	for _, name := range []string{"attach", "detach", "restore", "status", "check", "doctor"} {
		all = append(all, &cobra.Command{
			Use:                name,
			Short:              "Needs a Linux host",
			DisableFlagParsing: true,
			RunE: func(*cobra.Command, []string) error {
				return fmt.Errorf("%s needs Linux, and this program is for %s: run it on a Linux host of the cluster", name, runtime.GOOS)
			},
		})
	}
	return all
}

// guardian is a process of Linux hosts.
func asGuardian([]string) (is bool, err error) { return false, nil }

// prepareSignals: no command here runs long enough for one to matter.
func prepareSignals(*cobra.Command, []string) {}
