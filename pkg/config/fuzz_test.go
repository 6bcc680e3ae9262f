package config

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzLoad: any file is settings that hold, or an error of one line that names the file. Aliases don't multiply it.
func FuzzLoad(f *testing.F) {
	for _, text := range []string{
		"zones: [cluster.local]\nlinger: 10s\n", "upstreams: [192.0.2.53, '[::1]:5353']\nallowed: [10.0.0.0/8]\n", "bpf: maybe\n", "---\n---\n", "- a\n",
		"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nzones: *c\n", "zones: &z [*z]\n", "? {a: b}\n: c\n", "<<: {zones: [a]}\n", "\xff", "\x00", "linger: -1s\n",
		"kubeswitchAddress: fe80::1%eth0\n",
	} {
		f.Add([]byte(text))
	}
	path := filepath.Join(f.TempDir(), "config.yaml")
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(context.Background(), path, true)
		switch {
		case err == nil:
			if n := len(c.Zones) + len(c.Upstreams) + len(c.Allowed) + len(c.Pods); n > 64*(len(data)+1) {
				t.Fatalf("%d values of %d octets", n, len(data))
			}
		case strings.Contains(err.Error(), "\n"), !strings.Contains(err.Error(), path):
			t.Fatalf("%q", err)
		}
	})
}
