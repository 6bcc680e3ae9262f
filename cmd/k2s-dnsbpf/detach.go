//go:build linux

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

func newDetachCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "detach",
		Short: "Restore everything to the state before attach",
		Long: `Restore everything to the state before attach, and return. The daemon lingers for a while: it keeps answering programs
that have not yet read the resolver configuration again. An attach during that time takes over from it without a gap.`,
		Args: noArgs,
	}
	var dryRun bool
	s := newSettings(cmd)
	linger, _ := config.Find("linger")
	s.offer(cmd, linger)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be done, and change nothing")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, log, err := s.configAndLogger(cmd.Context())
		if err != nil {
			return err
		}
		if dryRun {
			plan, err := client.PlanDetach(c)
			printLines(cmd, plan)
			return err
		}
		done, err := client.Detach(cmd.Context(), c, log)
		printLines(cmd, done)
		if err == nil && len(done) == 0 {
			fmt.Fprintln(cmd.OutOrStdout(), "not attached: nothing to do")
		}
		return err
	}
	return cmd
}
