//go:build linux

package main

import (
	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
)

func newRestoreCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "restore",
		Short: "Restore the resolver configuration without a daemon",
		Long: `Restore the host's resolver configuration from the journal. Needs no daemon, network or cluster: it is for a rescue shell,
for boot, and for a host on which the daemon has died. While a daemon is working it fails and changes nothing: use detach
then.`,
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
