package discovery

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// pluginKubeconfig writes a kubeconfig whose credentials are from a command, which ends when the test calls release.
func pluginKubeconfig(t *testing.T, server *httptest.Server) (path string, release func()) {
	t.Helper()
	dir := t.TempDir()
	gate, command := filepath.Join(dir, "gate"), filepath.Join(dir, "get-token")
	writeFile(t, command, fmt.Sprintf("#!/bin/sh\nwhile [ ! -e %s ]; do sleep 0.05; done\n"+
		`echo '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"t"}}'`+"\n", gate))
	if err := os.Chmod(command, 0o755); err != nil {
		t.Fatal(err)
	}
	path = serverKubeconfig(t, server.URL, server.Certificate())
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, path, strings.Replace(string(text), "token: secret-token",
		"exec: {apiVersion: client.authentication.k8s.io/v1, command: "+command+", interactiveMode: Never}", 1))
	release = func() { writeFile(t, gate, "") }
	t.Cleanup(release)
	return path, release
}

// A command that gives no credentials is named, holds up nobody, and is waited for once.
func TestHangingPlugin(t *testing.T) {
	asked := make(chan string, 64)
	server := quietServer(t, func(w http.ResponseWriter, r *http.Request) {
		asked <- r.Header.Get("Authorization")
		http.Error(w, "busy", http.StatusServiceUnavailable)
	}, (*httptest.Server).StartTLS)
	kubeconfig, release := pluginKubeconfig(t, server)

	l, err := NewLookup(Options{Kubeconfig: kubeconfig, Env: noEnv})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range 2 { // the second time, it still runs
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err = l.Service(ctx, "default", "web")
		if !errors.Is(err, ErrUnauthorized) || !strings.Contains(err.Error(), `get-token", which the kubeconfig runs for credentials (exec), does not end`) {
			t.Errorf("%v", err)
		}
	}

	w, _, stop := watchFor(t, kubeconfig, defaultTimeouts)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := w.WaitForSync(ctx); err == nil || !strings.Contains(err.Error(), "get-token") || strings.Contains(err.Error(), "not answered yet") {
		t.Errorf("%v", err)
	}
	stop()

	release()
	// As soon as it has ended, requests go on, with what it gave.
	deadline := time.After(patience)
	for authorization := ""; authorization != "Bearer t"; {
		_, _ = l.Service(t.Context(), "default", "web")
		select {
		case authorization = <-asked:
		case <-deadline:
			t.Fatal("no request with credentials")
		default:
		}
	}
}
