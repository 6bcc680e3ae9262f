//go:build linux

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/daemon"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/diagnose"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

func newCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check NAME[:PORT]",
		Short: "Find out where a name leads, and whether one gets there",
		Long: `Find out where a name leads, and whether one gets there.

"Where?" is DNS: who owns the resolver configuration, which way a query takes, who answers it and what.
"How do I get there?" is the network: the Service behind the address, its ready endpoints, and a connection
to the Service address and to each of them. The port is that of the Service if none is given.

Exit status 3: the host is not attached, or something on the way is not well; the first line says what.`,
		Example: "  k2s-dnsbpf check backend.default.svc.cluster.local\n  k2s-dnsbpf check www.example.com:443\n  k2s-dnsbpf check 172.21.0.20:80",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{fmt.Errorf("%s takes one NAME[:PORT]: see %s --help", cmd.CommandPath(), cmd.CommandPath())}
			}
			return nil
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	var output string
	s := newSettings(cmd)
	bind(s, cmd.Flags().StringVar, "kubeconfig", func(c *config.Config) *string { return &c.Kubeconfig },
		"kubeconfig `FILE` (default: the one attached with, else as attach finds it)")
	cmd.Flags().StringVarP(&output, "output", "o", string(status.Table), "output `FORMAT`: table, json or yaml")
	complete(cmd, "output", status.Table, status.JSON, status.YAML)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		format, err := status.ParseFormat(output)
		if err != nil {
			return usageError{err}
		}
		target, err := diagnose.ParseTarget(args[0])
		if err != nil {
			return usageError{err}
		}
		c, err := s.config()
		if err != nil {
			return err
		}
		report, err := daemon.Check(cmd.Context(), c, target)
		if err != nil {
			return err
		}
		if err := report.Write(cmd.OutOrStdout(), format); err != nil {
			return err
		}
		if !report.Healthy {
			return errUnhealthy
		}
		return nil
	}
	return cmd
}
