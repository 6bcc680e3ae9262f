//go:build linux

package main

import (
	"fmt"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// newLogger logs to standard error, in lines that people read.
func newLogger(level string) (*zap.Logger, error) {
	parsed, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, fmt.Errorf("log level %q: write debug, info, warn or error", level)
	}
	c := zap.NewProductionConfig()
	c.Level = zap.NewAtomicLevelAt(parsed)
	c.Encoding = "console"
	c.EncoderConfig.EncodeTime = zapcore.ISO8601TimeEncoder
	c.EncoderConfig.EncodeLevel = zapcore.CapitalLevelEncoder
	c.DisableCaller = true
	c.DisableStacktrace = true
	c.Sampling = nil
	return c.Build()
}
