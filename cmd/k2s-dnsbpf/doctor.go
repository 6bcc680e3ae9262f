//go:build linux

package main

import (
	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/daemon"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

func newDoctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine this host: what is, or would be, in the way",
		Long: `Examine this host, attached or not: the resolver file and who else has a say in it, the cluster's DNS and what kubelets
hand to pods, the kernel. Changes nothing. Without root it says what it could not see. Exit status 3: a check failed.`,
		Args: noArgs,
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
		examination := daemon.Doctor(cmd.Context(), c)
		if err := examination.Write(cmd.OutOrStdout(), string(format)); err != nil {
			return err
		}
		if !examination.Healthy {
			return errUnhealthy
		}
		return nil
	}
	return cmd
}
