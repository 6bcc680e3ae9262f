package diagnose

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzHost: doctor's parsers of what other programs wrote come to an end, and to no more than was in it.
func FuzzHost(f *testing.F) {
	for _, text := range []string{
		"forward . /etc/resolv.conf tls://1.1.1.1 {\n", "hosts: files dns\n", "[main]\ndns=none\n", "OPENRESOLV_VERSION=\"3\"\n", "resolvConf: &a [*a]\n", "{\"dns\":[\"a\"]}",
		"  sl\n 0: 0100007F:0035 0:0 07 0 0 0 0 0 555 2\n", "0::/kubepods/x\n", "Uid:\t0\t0\t0\t0\n", "coredns\x00-conf\x00/f\x00", "forward . [::1]:53 ::1%x\n",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		root := t.TempDir()
		for _, name := range []string{
			"etc/nsswitch.conf", "etc/NetworkManager/NetworkManager.conf", "sbin/resolvconf", "var/lib/kubelet/config.yaml", "etc/docker/daemon.json", "etc/rancher/k3s/config.yaml",
			"proc/self/net/udp", "proc/self/net/tcp6", "proc/9/cmdline", "proc/9/comm", "proc/9/status", "proc/9/cgroup", "proc/9/cwd/Corefile", "f",
		} {
			path := filepath.Join(root, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		h := tree(t, nil)
		h.Root = root
		h.Servers = func([]byte) []netip.Addr { return nil } // of another package, which has a fuzz test of its own
		facts := look(h)
		if len(facts.Unseen) > 0 {
			t.Fatalf("%q: %q", text, facts.Unseen)
		}
		if n := len(forwardTargets(text)); n > len(text) {
			t.Fatalf("%d targets", n)
		}
		for _, finding := range Examine(facts).Findings {
			if finding.Check == "" || strings.TrimSpace(finding.Says) == "" {
				t.Fatalf("%+v", finding)
			}
		}
	})
}
