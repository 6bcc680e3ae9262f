package discovery

import (
	"context"
	"log/slog"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"k8s.io/klog/v2"
)

// RedirectKlog sends what client-go logs through klog, which is one for the whole
// process, to log, level by level. The function returned puts the former state
// back. The daemon calls this once, before New; nothing here calls it.
func RedirectKlog(log *zap.Logger) (undo func()) {
	before := klog.CaptureState()
	klog.SetSlogLogger(slog.New(slogHandler{core: log.Core()}))
	return before.Restore
}

// slogHandler is a slog.Handler that writes to a zap core. (zap's own lives in an
// experimental module that we would not want for this.)
type slogHandler struct {
	core   zapcore.Core
	prefix string // of keys, from WithGroup
}

// Enabled implements slog.Handler.
func (h slogHandler) Enabled(_ context.Context, l slog.Level) bool {
	return h.core.Enabled(zapLevel(l))
}

// Handle implements slog.Handler.
func (h slogHandler) Handle(_ context.Context, r slog.Record) error {
	e := h.core.Check(zapcore.Entry{Level: zapLevel(r.Level), Time: r.Time, Message: r.Message}, nil)
	if e == nil {
		return nil
	}
	fields := make([]zap.Field, 0, r.NumAttrs())
	r.Attrs(func(a slog.Attr) bool {
		fields = h.appendAttr(fields, a)
		return true
	})
	e.Write(fields...)
	return nil
}

// WithAttrs implements slog.Handler.
func (h slogHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	var fields []zap.Field
	for _, a := range attrs {
		fields = h.appendAttr(fields, a)
	}
	h.core = h.core.With(fields)
	return h
}

// WithGroup implements slog.Handler.
func (h slogHandler) WithGroup(name string) slog.Handler {
	if name != "" {
		h.prefix += name + "."
	}
	return h
}

// appendAttr adds a as zap fields, groups as dotted keys.
func (h slogHandler) appendAttr(fields []zap.Field, a slog.Attr) []zap.Field {
	v := a.Value.Resolve()
	if a.Key == "" && v.Kind() != slog.KindGroup {
		return fields
	}
	if v.Kind() == slog.KindGroup {
		in := h.WithGroup(a.Key).(slogHandler)
		for _, g := range v.Group() {
			fields = in.appendAttr(fields, g)
		}
		return fields
	}
	return append(fields, zap.Any(h.prefix+a.Key, v.Any()))
}

func zapLevel(l slog.Level) zapcore.Level {
	switch {
	case l < slog.LevelInfo:
		return zapcore.DebugLevel
	case l < slog.LevelWarn:
		return zapcore.InfoLevel
	case l < slog.LevelError:
		return zapcore.WarnLevel
	}
	return zapcore.ErrorLevel
}
