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

// runGuardian is the process that the daemon starts beside itself.
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
	// What all packages of this program made at their start is not needed here.
	debug.FreeOSMemory()
	file := openedLog(c)
	return guardian.Run(c, host.Restorer{Config: c, Log: log}, log, func() {
		file.reopen(0) // whoever has removed it is done with us
		_, _ = memory.WriteTo(stderr)
	})
}
