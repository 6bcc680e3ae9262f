//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/control"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/daemon"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

func newAttachCommand() *cobra.Command {
	var foreground, dryRun bool
	cmd := &cobra.Command{
		Use:   "attach",
		Short: "Resolve this host's names through k2s-dnsbpf",
		Long: `Attach this host: steer queries for cluster zones to CoreDNS in the kernel, and forward all others to the servers that
the host uses now. Returns once the host resolves names through it; the daemon stays in the background.`,
		Example: `  sudo k2s-dnsbpf attach
  sudo k2s-dnsbpf attach --dns-endpoint 172.20.0.10 --dns-endpoint 172.20.0.11
  sudo k2s-dnsbpf attach --service-cidr 172.21.0.0/16 --pod-cidr 172.20.0.0/16`,
		Args: noArgs,
	}
	s := newSettings(cmd)
	s.addAttachFlags(cmd)
	cmd.Flags().BoolVar(&foreground, "foreground", false, "stay in the foreground, for a service unit or a container")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be done, and change nothing")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, log, err := s.configAndLogger(cmd.Context())
		if err != nil {
			return err
		}
		directory, err := os.Getwd()
		if err != nil {
			return fmt.Errorf("find the working directory: %w", err)
		}
		if err := absolutePaths(&c, directory); err != nil {
			return err
		}
		if dryRun {
			if line, attached := client.PlanBeside(c); attached {
				printLines(cmd, []string{line})
				return nil
			}
			plan, err := daemon.Plan(cmd.Context(), c, log)
			printLines(cmd, plan)
			return err
		}
		if foreground {
			return (&service{settings: s, config: c, from: directory, log: log}).run(cmd)
		}
		said, err := attachOrReload(cmd.Context(), c)
		if err != nil {
			return err
		}
		printLines(cmd, []string{said})
		return nil
	}
	return cmd
}

// retryAttach is the interval at which an attach that meets another one in progress tries again.
const retryAttach = 100 * time.Millisecond

// hangPatience is how long an attach asks a daemon that does not answer: on a busy host it may be slow.
const hangPatience = 5 * time.Second

// attachOrReload attaches, or passes the settings to the attached daemon, and returns the daemon's message.
func attachOrReload(ctx context.Context, c config.Config) (said string, err error) {
	begin, deadline := time.Now(), time.After(c.Wait)
	replaced := false
	for {
		said, err := attachInBackground(ctx, c)
		if !errors.Is(err, rundir.ErrAttached) {
			return said, err
		}
		changed, err := control.Reload(ctx, c, version)
		var other *control.OtherVersionError
		if errors.As(err, &other) {
			gone := false
			if !replaced {
				if gone, err = replace(ctx, c, other.PID); err != nil {
					return "", err
				}
			}
			if gone {
				replaced = true
				continue
			}
			err = control.ErrNotServing // it is about to end, or has just died
		}
		switch {
		case err == nil && changed:
			return "already attached: switched to the new settings", nil
		case err == nil:
			return "already attached", nil
		case errors.Is(err, control.ErrHangs) && time.Since(begin) < hangPatience:
		case !errors.Is(err, control.ErrNotServing):
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

// replace asks a daemon of another version to make way and reports whether it did: it may have died in the meantime.
func replace(ctx context.Context, c config.Config, other int) (replaced bool, err error) {
	own, err := client.Replace(ctx, c)
	switch {
	case errors.Is(err, control.ErrNoDaemon), errors.Is(err, control.ErrNotServing):
		return false, nil
	case err != nil || !own:
		return err == nil, err
	}
	came, err := client.AwaitSuccessor(ctx, c, other)
	if err == nil && came != version {
		err = fmt.Errorf("the service runs version %s and this is version %s: install this one in its place", status.Printable(came, ""), version)
	}
	return err == nil, err
}

func printLines(cmd *cobra.Command, lines []string) {
	for _, line := range lines {
		fmt.Fprintln(cmd.OutOrStdout(), status.Printable(line, ""))
	}
}
