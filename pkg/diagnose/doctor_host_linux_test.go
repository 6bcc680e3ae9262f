package diagnose

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// tree makes a host of files; one that ends in " -> x" is a link.
func tree(t *testing.T, files map[string]string) Host {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path, link, isLink := strings.Cut(name, " -> ")
		path = filepath.Join(root, path)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil && isLink {
			err = os.Symlink(link, path)
		} else if err == nil {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return Host{
		Root: root, ResolvConf: "/etc/resolv.conf", PodFile: "/var/lib/k2s-dnsbpf/kubelet-resolv.conf",
		Servers: func(content []byte) (out []netip.Addr) {
			for line := range strings.Lines(string(content)) {
				if f := strings.Fields(line); len(f) == 2 && f[0] == "nameserver" {
					out = append(out, netip.MustParseAddr(f[1]))
				}
			}
			return out
		},
		Ours: func(pid int) bool { return pid == 1 },
	}
}

func look(h Host) Facts { return Gather(context.Background(), h.Looks()) }

func TestGatherManagers(t *testing.T) {
	f := look(tree(t, map[string]string{
		"/etc/nsswitch.conf":                       "passwd: files\nhosts:  files\tresolve dns # x\n",
		"/proc/20/cmdline":                         "/usr/lib/systemd/systemd-resolved\x00",
		"/proc/20/comm":                            "systemd-resolve\n",
		"/proc/21/cmdline":                         "/usr/sbin/NetworkManager\x00--no-daemon\x00",
		"/proc/21/comm":                            "NetworkManager\n",
		"/run/systemd/resolve/resolv.conf":         "nameserver 192.0.2.1\n",
		"/etc/NetworkManager/NetworkManager.conf":  "[main]\ndns=default\n[logging]\ndns=x\n",
		"/usr/lib/NetworkManager/conf.d/10-a.conf": "[main]\nrc-manager=file\n",
		"/etc/NetworkManager/conf.d/10-a.conf":     "[main]\ndns=none\n",
		"/sbin/resolvconf":                         "#!/bin/sh\nOPENRESOLV_VERSION=\"3.17.4\"\n",
		"/etc/resolv.conf.original.netbird":        "",
	}))
	m := f.Managers
	if f.NSSwitch != "files resolve dns" || !m.Resolved || !m.NetworkManager || len(m.ResolvedServers) != 1 || m.Openresolv != "3.17.4" {
		t.Errorf("%q, %+v", f.NSSwitch, m)
	}
	if m.NMDNS != "none" || m.NMRcManager != "" { // the file in /etc hides the other of its name
		t.Errorf("NetworkManager: dns=%q rc-manager=%q", m.NMDNS, m.NMRcManager)
	}
	if len(m.Backups) != 1 || m.Backups[0].Program != "netbird" {
		t.Errorf("backups %v", m.Backups)
	}
}

func TestGatherKubelets(t *testing.T) {
	for name, tt := range map[string]struct {
		files      map[string]string
		path, from string
		missing    bool
	}{
		"default":        {map[string]string{"/proc/9/cmdline": "/usr/bin/kubelet\x00", "/proc/9/comm": "kubelet\n"}, "/etc/resolv.conf", kubeletConfig, false},
		"its file":       {map[string]string{"/proc/9/cmdline": "kubelet\x00--config=/k.yaml\x00", "/proc/9/comm": "kubelet\n", "/k.yaml": "kind: KubeletConfiguration\nresolvConf: /a\n"}, "/a", "/k.yaml", true},
		"the flag wins":  {map[string]string{"/proc/9/cmdline": "kubelet\x00--config\x00/k.yaml\x00--resolv-conf\x00/b\x00", "/proc/9/comm": "kubelet\n", "/k.yaml": "resolvConf: /a\n", "/b": "nameserver 192.0.2.1\n"}, "/b", "its flag --resolv-conf", false},
		"only a file":    {map[string]string{kubeletConfig: "resolvConf: /a\n"}, "/a", kubeletConfig, true},
		"empty":          {map[string]string{kubeletConfig: "resolvConf: \"\"\n"}, "", kubeletConfig, false},
		"K3s":            {map[string]string{"/proc/9/cmdline": "/usr/local/bin/k3s server\x00", "/proc/9/comm": "k3s-server\n"}, "/etc/resolv.conf", "its flag --resolv-conf", false},
		"K3s, told":      {map[string]string{"/proc/9/cmdline": "k3s\x00agent\x00--resolv-conf=/a\x00", "/proc/9/comm": "k3s-agent\n"}, "/a", "its flag --resolv-conf", true},
		"K3s, by a file": {map[string]string{"/proc/9/cmdline": "k3s\x00", "/proc/9/comm": "k3s\n", "/etc/rancher/k3s/config.yaml": "resolv-conf: /a\n"}, "/a", "/etc/rancher/k3s/config.yaml", true},
	} {
		t.Run(name, func(t *testing.T) {
			tt.files["/etc/resolv.conf"] = "nameserver 192.0.2.1\n"
			f := look(tree(t, tt.files))
			if len(f.Kubelets) != 1 {
				t.Fatalf("%+v", f.Kubelets)
			}
			if k := f.Kubelets[0]; k.ResolvConf != tt.path || k.Source != tt.from || k.Missing != tt.missing {
				t.Errorf("%+v, want %q from %s", k, tt.path, tt.from)
			}
		})
	}
}

func TestGatherContainers(t *testing.T) {
	f := look(tree(t, map[string]string{
		"/etc/resolv.conf":                  "nameserver 192.0.2.1\n",
		"/proc/self/ns/mnt -> mnt:[1]":      "",
		"/proc/self/ns/net -> net:[1]":      "",
		"/proc/7/cmdline":                   "/coredns\x00-conf\x00/etc/coredns/Corefile\x00",
		"/proc/7/comm":                      "coredns\n",
		"/proc/7/ns/mnt -> mnt:[7]":         "",
		"/proc/7/ns/net -> net:[7]":         "",
		"/proc/7/root/etc/resolv.conf":      "nameserver 127.0.0.1\n",
		"/proc/7/root/etc/coredns/Corefile": ".:53 {\n  forward . /etc/resolv.conf tls://192.0.2.9 {\n  }\n # forward . 1.1.1.1\n}\n",
		"/proc/8/cmdline":                   "/app\x00",
		"/proc/8/comm":                      "app\n",
		"/proc/8/ns/mnt -> mnt:[8]":         "",
		"/proc/8/ns/net -> net:[8]":         "",
		"/proc/8/root/etc/resolv.conf":      "nameserver 172.21.0.10\n",
		"/proc/1/cmdline":                   "k2s-dnsbpf\x00guardian\x00",
	}))
	if len(f.CoreDNS) != 1 || f.CoreDNS[0].HostNetwork || !slices.Equal(f.CoreDNS[0].Forwards, addrs("127.0.0.1", "192.0.2.9")) {
		t.Errorf("%+v", f.CoreDNS)
	}
	if len(f.Pods) != 1 || f.Pods[0] != (Process{7, "coredns"}) {
		t.Errorf("pods %+v", f.Pods)
	}
	if f.Guardian != 1 {
		t.Errorf("guardian %d", f.Guardian)
	}
}

func TestGatherSockets(t *testing.T) {
	const head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	f := look(tree(t, map[string]string{
		"/proc/self/net/udp": head + "   0: 0100007F:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 555 2 0 0\n" +
			"   1: 0100007F:0043 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 556 2 0 0\n",
		"/proc/self/net/tcp6": head + "   0: 00000000000000000000000001000000:0035 0:0 0A 00000000:00000000 00:00000000 00000000     0        0 557 2 0 0\n" +
			"   1: 00000000000000000000000001000000:0035 0:0 01 00000000:00000000 00:00000000 00000000     0        0 558 2 0 0\n",
		"/proc/12/cmdline":              "/usr/sbin/dnsmasq\x00",
		"/proc/12/comm":                 "dnsmasq\n",
		"/proc/12/fd/3 -> socket:[555]": "",
	}))
	want := []Socket{
		{Protocol: "tcp", Address: server("[::1]:53")},
		{Protocol: "udp", Address: server("127.0.0.1:53"), Owner: Process{12, "dnsmasq"}},
	}
	if !slices.Equal(f.Sockets, want) {
		t.Errorf("%+v, want %+v", f.Sockets, want)
	}
}

// TestGatherHangs: a look that never ends is named, and the others count.
func TestGatherHangs(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	f := Gather(context.Background(), []Look{
		{"the one that hangs", func(context.Context) func(*Facts) { <-hang; return nil }},
		{"another", func(context.Context) func(*Facts) { return func(f *Facts) { f.NSSwitch = "dns" } }},
	})
	if f.NSSwitch != "dns" || len(f.Unseen) != 1 || !strings.Contains(f.Unseen[0], "the one that hangs") {
		t.Errorf("%+v", f)
	}
}

// TestGatherBelieves: only root's processes, and those of container runtimes, may name files.
func TestGatherBelieves(t *testing.T) {
	for name, tt := range map[string]struct {
		status, cgroup string
		believed       bool
	}{
		"root's":                    {"Uid:\t0\t0\t0\t0\n", "0::/system.slice/kubelet.service\n", true},
		"a user's":                  {"Uid:\t1000\t1000\t1000\t1000\n", "0::/user.slice/user-1000.slice/session-1.scope\n", false},
		"root's, started by a user": {"Uid:\t1000\t0\t0\t0\n", "0::/user.slice/user-1000.slice/session-1.scope\n", false},
		"in a pod":                  {"Uid:\t65532\t65532\t65532\t65532\n", "0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-1.scope\n", true},
		"in a pod, cgroup v1":       {"Uid:\t65532\t65532\t65532\t65532\n", "11:memory:/kubepods/burstable/pod1/2\n0::/system.slice/containerd.service\n", true},
		"in Docker":                 {"Uid:\t65532\t65532\t65532\t65532\n", "0::/system.slice/docker-1.scope\n", true},
		"in a group of that name":   {"Uid:\t1000\t1000\t1000\t1000\n", "0::/user.slice/user-1000.slice/user@1000.service/kubepods.slice/docker-1.scope\n", false},
	} {
		f := look(tree(t, map[string]string{
			"/proc/9/cmdline": "kubelet\x00--resolv-conf=/a\x00", "/proc/9/comm": "kubelet\n", "/a": "nameserver 192.0.2.1\n",
			"/proc/9/status": "Name:\tkubelet\n" + tt.status, "/proc/9/cgroup": tt.cgroup,
		}))
		if believed := len(f.Kubelets) == 1; believed != tt.believed {
			t.Errorf("%s: %+v", name, f.Kubelets)
		}
	}
}

// TestGatherStaysInside: a container's links lead nowhere else, and what is no file is not opened.
func TestGatherStaysInside(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(".:53 {\n forward . 203.0.113.7\n}\nnameserver 203.0.113.7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := tree(t, map[string]string{
		"/etc/resolv.conf":                                    "nameserver 192.0.2.1\n",
		"/secret":                                             "nameserver 203.0.113.7\n",
		"/proc/self/ns/mnt -> mnt:[1]":                        "",
		"/proc/self/ns/net -> net:[1]":                        "",
		"/proc/7/cmdline":                                     "/coredns\x00-conf\x00/Corefile\x00",
		"/proc/7/comm":                                        "coredns\n",
		"/proc/7/ns/mnt -> mnt:[7]":                           "",
		"/proc/7/ns/net -> net:[7]":                           "",
		"/proc/7/root/Corefile":                               ".:53 {\n forward . /out /up /fifo /dev\n}\n",
		"/proc/7/root/out -> " + secret:                       "",
		"/proc/7/root/up -> ../../../secret":                  "",
		"/proc/7/root/etc/resolv.conf -> " + secret:           "",
		"/proc/8/cmdline":                                     "kubelet\x00--resolv-conf=/fifo\x00--config=/zero\x00",
		"/proc/8/comm":                                        "kubelet\n",
		"/zero -> /dev/zero":                                  "",
		"/proc/9/cmdline":                                     "/coredns\x00-conf\x00/Corefile\x00",
		"/proc/9/comm":                                        "coredns\n",
		"/proc/9/ns/mnt -> mnt:[9]":                           "",
		"/proc/9/root/Corefile -> " + secret:                  "",
		"/proc/10/cmdline":                                    "/coredns\x00",
		"/proc/10/comm":                                       "coredns\n",
		"/proc/10/ns/mnt -> mnt:[10]":                         "",
		"/proc/10/cwd/Corefile -> ../../../../../.." + secret: "",
	})
	for _, path := range []string{"/fifo", "/proc/7/root/fifo"} {
		if err := syscall.Mkfifo(h.Root+path, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := look(h)
	if len(f.Unseen) > 0 || len(f.CoreDNS) != 3 || len(f.Kubelets) != 1 || len(f.Pods) > 0 {
		t.Errorf("%+v", f)
	}
	for _, c := range f.CoreDNS {
		if len(c.Forwards) > 0 {
			t.Errorf("read outside: %+v", c)
		}
	}
}
