package discovery

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/klog/v2"
)

func TestRedirectKlog(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	t.Cleanup(RedirectKlog(zap.New(core)))

	klog.InfoS("hello", "node", "n1")
	klog.V(9).InfoS("chatter that klog's own level keeps back")
	klog.Warningf("caution %d", 7)
	klog.ErrorS(errors.New("boom"), "failed")
	klog.LoggerWithValues(klog.LoggerWithName(klog.Background(), "reflector"), "type", "services").Info("watch ended")

	type line struct {
		Level, Message string
		Fields         map[string]any
	}
	var got []line
	for _, e := range logs.All() {
		got = append(got, line{e.Level.String(), e.Message, e.ContextMap()})
	}
	want := []line{
		{"info", "hello", map[string]any{"node": "n1"}},
		{"info", "caution 7", map[string]any{}},
		{"error", "failed", map[string]any{"err": "boom"}},
		{"info", "watch ended", map[string]any{"logger": "reflector", "type": "services"}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

func TestSlogHandler(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	log := slog.New(slogHandler{core: core})
	log.Debug("below the level")
	log.With("a", 1).WithGroup("g").With("b", 2).Info("m", slog.Group("h", "c", 3), slog.Group("", "d", 4), slog.Attr{})
	if logs.Len() != 1 {
		t.Fatalf("%d lines, want 1", logs.Len())
	}
	want := map[string]any{"a": int64(1), "g.b": int64(2), "g.h.c": int64(3), "g.d": int64(4)}
	if d := cmp.Diff(want, logs.All()[0].ContextMap()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}
