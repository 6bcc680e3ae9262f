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
		Short: "Examine this host: what is, or would be, in the way",
		Long: `Examine this host, attached or not: the resolver file and who else has a say in it, the cluster's DNS and what kubelets
hand to pods, the kernel. Changes nothing. Without root it says what it could not see. Exit status 3: a check failed.`,
		Args: noArgs,
	}
	reporting(cmd, newSettings(cmd), func(ctx context.Context, c config.Config) (report, bool, error) {
		e := client.Doctor(ctx, c)
		return e, e.Healthy, nil
	})
	return cmd
}
