//go:build linux

package main

import (
	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/daemon"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

func newStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say what is attached and whether it is well",
		Long:  "Say what is attached and whether it is well. Exit status 3: not attached, or not healthy.",
		Args:  noArgs,
	}
	var output string
	s := newSettings(cmd)
	cmd.Flags().StringVarP(&output, "output", "o", string(status.Table), "output `FORMAT`: table, json or yaml")
	complete(cmd, "output", status.Table, status.JSON, status.YAML)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		format, err := status.ParseFormat(output)
		if err != nil {
			return usageError{err}
		}
		c, err := s.config()
		if err != nil {
			return err
		}
		report, err := daemon.Status(cmd.Context(), c)
		if err != nil {
			return err
		}
		if err := report.Write(cmd.OutOrStdout(), format); err != nil {
			return err
		}
		if !report.Attached || !report.Healthy {
			return errUnhealthy
		}
		return nil
	}
	return cmd
}
