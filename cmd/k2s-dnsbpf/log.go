//go:build linux

package main

import (
	"fmt"
	"strings"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// newLogger logs to standard error in human-readable lines.
func newLogger(level string) (*zap.Logger, error) {
	return newLoggerTo(stderr, level)
}

func newLoggerTo(to zapcore.WriteSyncer, level string) (*zap.Logger, error) {
	parsed, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, fmt.Errorf("log level %q: write debug, info, warn or error", level)
	}
	c := zap.NewProductionEncoderConfig()
	c.EncodeTime = zapcore.ISO8601TimeEncoder
	c.EncodeLevel = zapcore.CapitalLevelEncoder
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(c), printable{to}, parsed)), nil
}

// printable escapes what must not reach a terminal. It gets one entry at a time, with tab-separated cells.
type printable struct{ zapcore.WriteSyncer }

// Write implements zapcore.WriteSyncer.
func (p printable) Write(entry []byte) (int, error) {
	text := status.Printable(strings.TrimSuffix(string(entry), "\n"), "\t") + "\n"
	if _, err := p.WriteSyncer.Write([]byte(text)); err != nil {
		return 0, err
	}
	return len(entry), nil
}
