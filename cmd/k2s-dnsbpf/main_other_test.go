//go:build !linux

package main

import (
	"strings"
	"testing"
)

// TestNeedsLinux: a script that runs a Linux host's command here hears why it can't, and that it failed.
func TestNeedsLinux(t *testing.T) {
	for _, args := range [][]string{{"attach", "--foreground"}, {"detach"}, {"status", "-o", "json"}, {"check", "www.example.com"}} {
		root := newRootCommand()
		root.SetArgs(args)
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), args[0]+" needs Linux") {
			t.Errorf("%q: %v", args, err)
		}
	}
	if status := run([]string{"attach"}); status != exitFailed {
		t.Errorf("exit status %d", status)
	}
	if status := run([]string{"version"}); status != 0 {
		t.Errorf("version: exit status %d", status)
	}
	if status := run([]string{"attached"}); status != exitUsage {
		t.Errorf("no such command: exit status %d", status)
	}
}
