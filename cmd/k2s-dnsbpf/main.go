// Command k2s-dnsbpf makes a host of a K2s cluster resolve cluster names through an eBPF program that steers them to
// CoreDNS in the kernel, and all other names through the servers that the host had before.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// The exit statuses: scripts depend on them.
const (
	exitFailed    = 1 // nothing changed, or all changes undone
	exitUsage     = 2 // wrong usage
	exitUnhealthy = 3 // status, check: not attached or not healthy; doctor: a check failed
)

// version is set by the linker.
var version = "devel"

func main() {
	// First, before allocating anything that a process which only waits does not need.
	if is, err := asGuardian(os.Args[1:]); is {
		status := exitStatus(err)
		stderr.flush()
		os.Exit(status)
	}
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	defer stderr.flush()
	root := newRootCommand()
	root.SetArgs(args)
	root.SetErr(stderr)
	return exitStatus(root.ExecuteContext(ctx))
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "k2s-dnsbpf",
		Short:         "Resolve cluster names on a host through eBPF",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q: see k2s-dnsbpf --help", args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentPreRun = prepareSignals
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w: see %s --help", err, cmd.CommandPath())}
	})
	root.AddCommand(append(commands(), newVersionCommand())...)
	return root
}

// noArgs refuses arguments as wrong usage.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("%s takes no argument %q: see %s --help", cmd.CommandPath(), args[0], cmd.CommandPath())}
	}
	return nil
}

// exitStatus prints what went wrong and returns the exit status.
func exitStatus(err error) int {
	if err == nil {
		return 0
	}
	if errors.Is(err, errUnhealthy) {
		return exitUnhealthy
	}
	// Joined errors are on separate lines, and scripts read one.
	fmt.Fprintf(stderr, "k2s-dnsbpf: %s\n", status.Printable(strings.ReplaceAll(err.Error(), "\n", "; "), ""))
	var usage usageError
	if errors.As(err, &usage) || errors.Is(err, config.ErrInvalid) {
		return exitUsage
	}
	return exitFailed
}

// errUnhealthy ends a command whose output already says what is wrong.
var errUnhealthy = errors.New("not attached or not healthy")

// usageError is an invalid command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }
