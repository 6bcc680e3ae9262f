//go:build linux

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

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/daemon"
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
	// Before anything is made that a process which only waits has no use for.
	if len(os.Args) > 1 && os.Args[1] == daemon.GuardianCommand {
		os.Exit(exitStatus(runGuardian(os.Args[2:])))
	}
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM,
		syscall.SIGHUP) // a terminal that is closed must not leave a resolver file that points at nobody
	defer stop()
	root := newRootCommand()
	root.SetArgs(args)
	return exitStatus(root.ExecuteContext(ctx))
}

// exitStatus says what went wrong, and how much.
func exitStatus(err error) int {
	if err == nil {
		return 0
	}
	if errors.Is(err, errUnhealthy) {
		return exitUnhealthy
	}
	// Joined errors have a line each; a script reads one.
	fmt.Fprintf(os.Stderr, "k2s-dnsbpf: %s\n", status.Printable(strings.ReplaceAll(err.Error(), "\n", "; "), ""))
	var usage usageError
	if errors.As(err, &usage) || errors.Is(err, config.ErrInvalid) {
		return exitUsage
	}
	return exitFailed
}

// errUnhealthy ends a command whose output has said already what is wrong.
var errUnhealthy = errors.New("not attached or not healthy")

// usageError is a command line that can't be meant.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }
