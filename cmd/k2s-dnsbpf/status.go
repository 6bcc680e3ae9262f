//go:build linux

package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

func newStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what is attached and whether it is healthy",
		Long:  "Show what is attached and whether it is healthy. Exit status 3: not attached, or not healthy.",
		Args:  noArgs,
	}
	reporting(cmd, newSettings(cmd), func(ctx context.Context, c config.Config) (report, bool, error) {
		r, err := client.Status(ctx, c)
		if r.PID != 0 && r.Version != version {
			r.Command = version
		}
		return r, r.Attached && r.Healthy, err
	})
	return cmd
}
