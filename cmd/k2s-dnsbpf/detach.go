//go:build linux

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/daemon"
)

func newDetachCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "detach",
		Short: "Put everything back as it was before attach",
		Args:  noArgs,
	}
	var dryRun bool
	s := newSettings(cmd)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be done, and change nothing")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, log, err := s.configAndLogger()
		if err != nil {
			return err
		}
		if dryRun {
			plan, err := daemon.PlanDetach(c)
			printLines(cmd, plan)
			return err
		}
		done, err := daemon.Detach(cmd.Context(), c, log)
		printLines(cmd, done)
		if err == nil && len(done) == 0 {
			fmt.Fprintln(cmd.OutOrStdout(), "not attached: nothing to do")
		}
		return err
	}
	return cmd
}
