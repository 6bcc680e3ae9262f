//go:build linux

package main

import (
	"bytes"
	"runtime/debug"

	"go.uber.org/zap/zapcore"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/guardian"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
)

// runGuardian is the main function of the guardian process, which the daemon starts.
func runGuardian(args []string) error {
	c, err := config.ParseCommonArgs(guardian.Command, args)
	if err != nil {
		return usageError{err}
	}
	var memory bytes.Buffer
	log, err := newLoggerTo(zapcore.AddSync(&memory), c.LogLevel)
	if err != nil {
		return usageError{err}
	}
	// Memory that packages allocated during initialisation is not needed here.
	debug.FreeOSMemory()
	file := openedLog(c)
	return guardian.Run(c, host.Restorer{Config: c, Log: log}, log, func() {
		file.reopen(0) // if it has been removed, nobody reads it any more
		_, _ = memory.WriteTo(stderr)
	})
}
