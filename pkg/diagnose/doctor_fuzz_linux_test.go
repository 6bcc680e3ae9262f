package diagnose

import (
	"net/netip"
	"testing"
)

// FuzzGather puts the same content into every file that doctor reads of others: it comes to an end, and its output is no
// longer than what a person reads.
func FuzzGather(f *testing.F) {
	for _, seed := range []string{
		"", "hosts: files dns", "[main]\ndns=none\nrc-manager=file\n", "resolvConf: /a\n", "resolvConf: /proc/self/mem\n", "{\"dns\": [\"192.0.2.1\"]}",
		"kubelet\x00--config=/k.yaml\x00", "coredns\x00-conf\x00Corefile\x00", ".:53 {\n forward . /etc/resolv.conf tls://192.0.2.9\n import *\n}\n",
		"nameserver 127.0.0.1\n", "OPENRESOLV_VERSION=\"3", "a: &a [*a]\n", "a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
		"  sl  local_address\n  1: 0100007F:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 7 2\n",
		"Uid:\t0\t0\t0\t0\n", "0::/system.slice/containerd.service/kubepods\n", "\x1b[2J\xff\x00",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, content string) {
		files := map[string]string{"/proc/self/ns/mnt -> mnt:[1]": "", "/proc/self/ns/net -> net:[1]": ""}
		for _, name := range []string{
			"/etc/nsswitch.conf", "/etc/NetworkManager/NetworkManager.conf", "/run/systemd/resolve/resolv.conf", "/sbin/resolvconf",
			"/var/lib/kubelet/config.yaml", "/k.yaml", "/etc/rancher/k3s/config.yaml", "/etc/docker/daemon.json", "/etc/resolv.conf",
			"/proc/self/net/udp", "/proc/self/net/tcp6", "/proc/7/cmdline", "/proc/7/status", "/proc/7/cgroup", "/proc/7/root/etc/resolv.conf",
			"/proc/7/root/Corefile", "/proc/7/cwd/Corefile",
		} {
			files[name] = content
		}
		for name, comm := range map[string]string{"7": "coredns", "8": "kubelet", "9": "k3s"} {
			files["/proc/"+name+"/comm"], files["/proc/"+name+"/cmdline"] = comm, content
		}
		host := tree(t, files)
		host.Servers = func([]byte) []netip.Addr { return nil }
		total := 0
		for _, finding := range Examine(look(host)).Findings {
			total += len(finding.Says) + len(finding.Fix) + len(finding.Consequence)
		}
		if total > 20000+20*len(content) {
			t.Errorf("%d octets of findings for %d of content", total, len(content))
		}
	})
}
