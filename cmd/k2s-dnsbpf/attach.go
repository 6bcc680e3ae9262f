//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/daemon"
)

func newAttachCommand() *cobra.Command {
	var foreground, dryRun bool
	cmd := &cobra.Command{
		Use:   "attach",
		Short: "Resolve this host's names through k2s-dnsbpf",
		Long: `Attach this host: steer queries for cluster zones to CoreDNS in the kernel, and forward all others to the servers that
the host has now. Returns when the host resolves through it; the daemon stays in the background.`,
		Example: `  sudo k2s-dnsbpf attach
  sudo k2s-dnsbpf attach --dns-endpoint 172.20.0.10 --dns-endpoint 172.20.0.11
  sudo k2s-dnsbpf attach --service-cidr 172.21.0.0/16 --pod-cidr 172.20.0.0/16`,
		Args: noArgs,
	}
	s := newSettings(cmd)
	s.addAttachFlags()
	complete(cmd, "topology", config.TopologyNativeLinux)
	complete(cmd, "resolver", config.ResolverTakeover, config.ResolverTransparent, config.ResolverNone)
	complete(cmd, "on-foreign-change", config.ChangeRetake, config.ChangeYield)
	complete(cmd, "endpoint-preference", config.PreferAll, config.PreferNode, config.PreferZone)
	cmd.Flags().BoolVar(&foreground, "foreground", false, "stay in the foreground, for a service unit or a container")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be done, and change nothing")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, log, err := s.configAndLogger(cmd.Context())
		if err != nil {
			return err
		}
		if err := absolutePaths(&c); err != nil {
			return err
		}
		if dryRun {
			plan, err := daemon.Plan(cmd.Context(), c, log)
			printLines(cmd, plan)
			return err
		}
		if foreground {
			notify := readyNotifier()
			// Not to hold the file system that it was started from.
			if err := os.Chdir("/"); err != nil {
				return fmt.Errorf("leave the working directory: %w", err)
			}
			err := daemon.New(c, version, log).Run(cmd.Context(), func() {
				notify(nil)
				if err := notifySystemd("READY=1"); err != nil {
					log.Warn("systemd not told", zap.Error(err))
				}
			})
			// Without effect if ready has been said.
			notify(err)
			return err
		}
		said, err := attachOrReload(cmd.Context(), c)
		if said != "" {
			fmt.Fprintln(cmd.OutOrStdout(), said)
		}
		if said != "" || err != nil {
			return err
		}
		report, err := daemon.Status(cmd.Context(), c)
		if err != nil {
			return err
		}
		if report.PID == 0 {
			return fmt.Errorf("attach: the daemon has ended since: %s: see its log, or attach again", strings.Join(report.Problems, "; "))
		}
		others := fmt.Sprintf("to %d upstreams", len(report.Resolver.Upstreams))
		if len(report.Resolver.SteeredAt) > 0 {
			others = "left to the resolver at " + strings.Join(report.Resolver.SteeredAt, " and ")
		}
		fmt.Fprintf(cmd.OutOrStdout(), "attached: %d zones to %d endpoints, all other names %s\n",
			len(report.Zones), len(report.Endpoints), others)
		if report.Shared != nil {
			fmt.Fprintln(cmd.OutOrStdout(), "KubeSwitch:", report.Shared)
		}
		return nil
	}
	return cmd
}

// retryAttach is how often an attach that meets another one, on its way up or down, tries again.
const retryAttach = 100 * time.Millisecond

// attachOrReload attaches, or gives the settings to the daemon that is attached, and returns what it says about that.
func attachOrReload(ctx context.Context, c config.Config) (said string, err error) {
	deadline := time.After(c.Wait)
	for {
		if err := attachInBackground(ctx, c); !errors.Is(err, daemon.ErrAttached) {
			return "", err
		}
		changed, err := daemon.Reload(ctx, c)
		switch {
		case err == nil && changed:
			return "already attached: went over to the new settings", nil
		case err == nil:
			return "already attached", nil
		case !errors.Is(err, daemon.ErrNotServing):
			return "", err
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("attach: interrupted: %w", err)
		case <-deadline:
			return "", err
		case <-time.After(retryAttach):
		}
	}
}

func printLines(cmd *cobra.Command, lines []string) {
	for _, line := range lines {
		fmt.Fprintln(cmd.OutOrStdout(), line)
	}
}
