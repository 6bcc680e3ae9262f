//go:build linux

package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

func newDoctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine this host for anything that prevents, or would prevent, name resolution",
		Long: `Examine this host, attached or not: the resolver file and other programs that manage it, the cluster's DNS, what kubelets
hand out to Pods, and the kernel. Changes nothing. Without root it says what it could not see. Exit status 3: a check failed.`,
		Args: noArgs,
	}
	reporting(cmd, newSettings(cmd), func(ctx context.Context, c config.Config) (report, bool, error) {
		e := client.Doctor(ctx, c)
		return e, e.Healthy, nil
	})
	return cmd
}
