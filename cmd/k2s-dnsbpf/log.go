//go:build linux

package main

import (
	"fmt"
	"os"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// newLogger logs to standard error, in lines that people read.
func newLogger(level string) (*zap.Logger, error) {
	return newLoggerTo(zapcore.Lock(os.Stderr), level)
}

func newLoggerTo(to zapcore.WriteSyncer, level string) (*zap.Logger, error) {
	parsed, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, fmt.Errorf("log level %q: write debug, info, warn or error", level)
	}
	c := zap.NewProductionEncoderConfig()
	c.EncodeTime = zapcore.ISO8601TimeEncoder
	c.EncodeLevel = zapcore.CapitalLevelEncoder
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(c), to, parsed)), nil
}
