//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/control"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// Cache reports on the answers from the kernel. They are the daemon's, so without one there is nothing to report.
func Cache(ctx context.Context, c config.Config) (status.Cache, error) {
	report, err := control.Status(ctx, c)
	switch {
	case err != nil:
		return status.Cache{}, explainNoCache(err)
	case report.Cache == nil:
		return status.Cache{Reason: "no program is loaded: the setting bpf is off"}, nil
	}
	return *report.Cache, nil
}

// Answers returns the answers of a name and of all below it that are kept, all for "".
func Answers(ctx context.Context, c config.Config, suffix string) (status.CachedAnswers, error) {
	list, err := control.Answers(ctx, c, suffix)
	return list, explainNoCache(err)
}

// Flush forgets them, and returns how many they were.
func Flush(ctx context.Context, c config.Config, suffix string) (dropped int, err error) {
	dropped, err = control.Flush(ctx, c, suffix)
	return dropped, explainNoCache(err)
}

func explainNoCache(err error) error {
	if errors.Is(err, control.ErrNoDaemon) {
		return fmt.Errorf("%w: nothing is answered from the kernel without one: run k2s-dnsbpf attach", err)
	}
	return err
}
