//go:build linux

package main

import (
	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
)

func newRestoreCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "restore",
		Short: "Put the resolver configuration back, without a daemon",
		Long: `Put the host's resolver configuration back from the journal. Needs no daemon, no network and no cluster: for a rescue
shell, for boot, and for whoever finds a host that a dead daemon left. Beside a daemon that works it changes nothing and
fails: detach is the command then.`,
		Args: noArgs,
	}
	s := newSettings(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, log, err := s.configAndLogger(cmd.Context())
		if err != nil {
			return err
		}
		done, err := client.Restore(cmd.Context(), c, log)
		printLines(cmd, done)
		if err == nil && len(done) == 0 {
			printLines(cmd, []string{c.ResolvConf + " is the original: nothing to do"})
		}
		return err
	}
	return cmd
}
