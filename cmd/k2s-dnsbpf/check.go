//go:build linux

package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/diagnose"
)

func newCheckCommand() *cobra.Command {
	var target diagnose.Target
	cmd := &cobra.Command{
		Use:   "check NAME[:PORT]",
		Short: "Find out where a name leads and whether it can be reached",
		Long: `Find out where a name leads and whether it can be reached.

"Where is it?" is about DNS: who owns the resolver configuration, which path a query takes, who answers it and what the
answer is. "How do I get there?" is about the network: the Service behind the address, its ready endpoints, and a
connection to the Service address and to each of them. Without a port, the Service's port is used.

Exit status 3: the host is not attached, or something on the path is broken; the first line says what.`,
		Example: "  k2s-dnsbpf check backend.default.svc.cluster.local\n  k2s-dnsbpf check www.example.com:443\n  k2s-dnsbpf check 172.21.0.20:80",
		Args: func(cmd *cobra.Command, args []string) (err error) {
			if len(args) != 1 {
				return usageError{fmt.Errorf("%s takes one NAME[:PORT]: see %s --help", cmd.CommandPath(), cmd.CommandPath())}
			}
			if target, err = diagnose.ParseTarget(args[0]); err != nil {
				return usageError{err}
			}
			return nil
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	s := newSettings(cmd)
	kubeconfig, _ := config.Find("kubeconfig")
	kubeconfig.Otherwise = "the one that was attached with, or else the one that attach would find"
	s.offer(cmd, kubeconfig)
	reporting(cmd, s, func(ctx context.Context, c config.Config) (report, bool, error) {
		r, err := client.Check(ctx, c, target)
		return r, r.Healthy, err
	})
	return cmd
}
