package diagnose

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

func addrs(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func server(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// detached and attached are hosts on which all is well.
func detached() Facts {
	return Facts{
		Privileged: true,
		Attachment: Attachment{Takeover: true, BPF: true, Served: []netip.AddrPort{server("127.0.0.1:53"), server("[::1]:53"), server("172.19.1.1:53")}, KubeSwitch: server("172.19.1.1:53")},
		Resolver:   ResolverFile{Path: "/etc/resolv.conf", Type: "regular", State: "original", Owner: "plain file", Reasons: []string{"a regular file"}, Servers: addrs("192.0.2.53")},
		Journal:    JournalFacts{Path: "/var/lib/k2s-dnsbpf/journal.json"},
		NSSwitch:   "files dns",
		PodFile:    PodFile{Path: "/var/lib/k2s-dnsbpf/kubelet-resolv.conf"},
		System:     System{Kernel: "6.18.4", BTF: true, Systemd: true, BootUnit: "/etc/systemd/system/" + bootUnit, Enabled: true},
	}
}

func attached() Facts {
	f := detached()
	f.Attachment.Attached, f.Attachment.Alive, f.Attachment.PID = true, true, 4711
	f.Guardian = 4712
	f.Resolver.State, f.Resolver.Parked = "ours", "/etc/.resolv.conf.k2s-dnsbpf-original"
	f.Journal.Knows, f.Journal.Changes = true, 6
	f.PodFile.Exists, f.PodFile.Servers = true, addrs("192.0.2.53")
	f.System.Sysctls = map[string]string{"net.ipv4.conf.lo.route_localnet": "1"}
	f.Sockets = []Socket{{"udp", server("127.0.0.1:53"), Process{4711, "k2s-dnsbpf"}, true}}
	return f
}

func TestHealthyHosts(t *testing.T) {
	for name, f := range map[string]Facts{"detached": detached(), "attached": attached()} {
		e := Examine(f)
		if !e.Healthy || len(e.Findings) != len(checks) {
			t.Errorf("%s: healthy %v, %d findings for %d checks", name, e.Healthy, len(e.Findings), len(checks))
		}
		for _, finding := range e.Findings {
			if finding.Result != OK {
				t.Errorf("%s: %+v", name, finding)
			}
		}
	}
}

// TestSharedPort: a server that has the port of the KubeSwitch address keeps it.
func TestSharedPort(t *testing.T) {
	for _, of := range []func() Facts{detached, attached} {
		for _, bpf := range []bool{true, false} {
			f := of()
			f.Attachment.BPF = bpf
			f.Sockets = append(f.Sockets, Socket{"udp", server("172.19.1.1:53"), Process{12, "dnsmasq"}, false})
			want := map[bool]string{true: "steered past it", false: "its own"}[bpf]
			if got := checkPort53(f); len(got) != 1 || got[0].Result != OK || !strings.Contains(got[0].Says, want) || !strings.Contains(got[0].Says, "dnsmasq, process 12") {
				t.Errorf("attached %v, BPF %v: %+v", f.Attachment.Attached, bpf, got)
			}
		}
	}
}

// TestAttachmentUnseen: who could not look says so, and not that there is nothing.
func TestAttachmentUnseen(t *testing.T) {
	f := detached()
	f.Attachment = Attachment{Unseen: true}
	e := Examine(f)
	for _, finding := range e.Findings {
		if (finding.Check == "daemon" || finding.Check == "kernel") && (finding.Result != Unknown || !strings.Contains(finding.Says, "can't be seen")) {
			t.Errorf("%+v", finding)
		}
	}
}

// TestVerdicts breaks one thing at a time, and wants one finding about it, with its consequence and its fix, and no other.
func TestVerdicts(t *testing.T) {
	kubelet := func(path string, servers ...string) Kubelet {
		return Kubelet{Process: Process{99, "kubelet"}, Source: "/var/lib/kubelet/config.yaml", ResolvConf: path, Servers: addrs(servers...)}
	}
	const podFile = "/var/lib/k2s-dnsbpf/kubelet-resolv.conf"
	tests := []struct {
		name   string
		of     func() Facts
		change func(f *Facts)
		check  string
		want   Result
		says   []string // in any part of the finding
	}{
		{"daemon dead", attached, func(f *Facts) {
			f.Attachment.Alive, f.Resolver.State, f.Resolver.Parked, f.Sockets = false, "original", "", nil
		}, "daemon", Fail, []string{"no daemon", "detach", "do not know cluster names"}},
		{"daemon unwell", attached, func(f *Facts) { f.Attachment.Problems = []string{"no endpoint answers"} }, "daemon", Fail, []string{"no endpoint answers"}},
		{"no guardian", attached, func(f *Facts) { f.Guardian = 0 }, "guardian", Warn, []string{"restore"}},

		{"immutable", detached, func(f *Facts) {
			f.Resolver.Refusals = []string{"/etc/resolv.conf: immutable: chattr +i is set: run chattr -i"}
		}, "file", Fail, []string{"chattr +i", "attach refuses", "run chattr -i"}},
		{"replaced while attached", attached, func(f *Facts) { f.Resolver.State, f.Resolver.Owner = "foreign", "NetworkManager" }, "file", Fail, []string{"NetworkManager", "detach"}},

		{"yielded", attached, func(f *Facts) {
			f.Resolver.State, f.Resolver.Note = "foreign", "left in place, as onForeignChange says"
		}, "file", Warn, []string{"onForeignChange", "retake"}},

		{"resolved owns", detached, func(f *Facts) { f.Resolver.Owner, f.Resolver.Servers = "systemd-resolved (stub)", addrs("127.0.0.53") }, "owner", Warn, []string{"systemd-resolved", "--resolver transparent", "nss-resolve", "TCP"}},
		{"dnsmasq on loopback", detached, func(f *Facts) { f.Resolver.Servers = addrs("127.0.0.2") }, "owner", Warn, []string{"127.0.0.2", "transparent"}},

		{"parked without journal", detached, func(f *Facts) { f.Resolver.Parked = "/etc/.parked" }, "leftovers", Fail, []string{"/etc/.parked", "journal is lost", "restore"}},
		{"parked, not attached", detached, func(f *Facts) { f.Resolver.Parked, f.Journal.Knows = "/etc/.parked", true }, "leftovers", Fail, []string{"without a detach", "restore"}},
		{"parked, theirs in place", detached, func(f *Facts) {
			f.Resolver.Parked, f.Resolver.State, f.Journal.Knows = "/etc/.parked", "foreign", true
		}, "leftovers", Warn, []string{"somebody else replaced", "mv -f /etc/.parked /etc/resolv.conf"}},
		{"parked, what is in place names only us", detached, func(f *Facts) {
			f.Resolver.Parked, f.Resolver.State, f.Journal.Knows, f.Resolver.Servers = "/etc/.parked", "foreign", true, addrs("172.19.1.1")
		}, "leftovers", Fail, []string{"without a detach", "restore"}},
		{"journal damaged", detached, func(f *Facts) { f.Journal.Err = "journal is damaged" }, "journal", Fail, []string{"restore"}},
		{"journal repaired", attached, func(f *Facts) { f.Journal.Repair = "checksum differs" }, "journal", Warn, []string{"checksum differs"}},

		{"nss-resolve first", detached, func(f *Facts) { f.NSSwitch, f.Managers.Resolved = "files resolve [!UNAVAIL=return] dns", true }, "nsswitch", Warn, []string{"systemd-resolved", "dns before resolve"}},
		{"nss-resolve alone, unserved", detached, func(f *Facts) { f.NSSwitch = "files resolve" }, "nsswitch", Fail, []string{"add dns"}},
		{"no dns", detached, func(f *Facts) { f.NSSwitch = "files" }, "nsswitch", Fail, []string{"add dns"}},

		{"resolved publishes us", attached, func(f *Facts) {
			f.Managers.Resolved, f.Managers.ResolvedServers = true, addrs("127.0.0.1")
		}, "resolved", Fail, []string{"127.0.0.1", "/run/systemd/resolve/resolv.conf"}},
		{"resolved is foreign", attached, func(f *Facts) { f.Managers.Resolved = true }, "resolved", Warn, []string{"foreign mode", "systemctl restart"}},

		{"NetworkManager rewrites", detached, func(f *Facts) { f.Managers.NetworkManager = true }, "networkmanager", Warn, []string{"overwrites", "rc-manager=unmanaged"}},
		{"openresolv 3.17", detached, func(f *Facts) { f.Managers.Openresolv = "3.17.0" }, "openresolv", Warn, []string{"wg-quick"}},
		{"tailscale's backup", detached, func(f *Facts) { f.Managers.Backups = []Backup{{"/etc/resolv.pre-tailscale-backup.conf", "tailscale"}} }, "takeovers", Warn, []string{"tailscale"}},

		{"port taken", detached, func(f *Facts) { f.Sockets = []Socket{{"udp", server("127.0.0.1:53"), Process{12, "dnsmasq"}, false}} }, "port53", Fail, []string{"dnsmasq", "12", "refuses"}},
		{"port taken on all addresses", detached, func(f *Facts) { f.Sockets = []Socket{{"tcp", server("[::]:53"), Process{12, "named"}, false}} }, "port53", Fail, []string{"named"}},

		{"port taken from what the file names", detached, func(f *Facts) {
			f.Sockets = []Socket{{"udp", server("0.0.0.0:53"), Process{12, "dnsmasq"}, false}}
			f.Resolver.Servers = addrs("192.0.2.53", "127.0.0.1")
		}, "port53", Fail, []string{"--resolver transparent"}},

		{"kubelet hands out the file", detached, func(f *Facts) { f.Kubelets = []Kubelet{kubelet("/etc/resolv.conf", "192.0.2.53")} }, "kubelet", Warn, []string{"taken over while attached", "resolvConf: " + podFile}},
		{"kubelet hands out loopback", attached, func(f *Facts) { f.Kubelets = []Kubelet{kubelet("/etc/resolv.conf", "127.0.0.1")} }, "kubelet", Fail, []string{"127.0.0.1", "Loop detected", "resolvConf: " + podFile}},
		{"kubelet hands out our address", attached, func(f *Facts) { f.Kubelets = []Kubelet{kubelet("/etc/k8s.conf", "172.19.1.1")} }, "kubelet", Fail, []string{"172.19.1.1"}},
		{"kubelet's file is missing", detached, func(f *Facts) {
			k := kubelet(podFile)
			k.Missing = true
			f.Kubelets = []Kubelet{k}
		}, "kubelet", Fail, []string{"does not exist", "every pod"}},
		{"kubelet hands out resolved's file", detached, func(f *Facts) { f.Kubelets = []Kubelet{kubelet(resolvedFile, "192.0.2.53")} }, "kubelet", Warn, []string{resolvedFile, "may publish"}},
		{"kubelet hands out nothing", detached, func(f *Facts) { f.Kubelets = []Kubelet{kubelet("")} }, "kubelet", Warn, []string{"empty"}},
		{"K3s", attached, func(f *Facts) {
			f.Kubelets = []Kubelet{{Process: Process{9, "k3s"}, ResolvConf: "/etc/resolv.conf", Servers: addrs("127.0.0.1")}}
		}, "kubelet", Fail, []string{"8.8.8.8", "--resolv-conf " + podFile}},
		{"pod file missing", attached, func(f *Facts) { f.PodFile.Exists = false }, "podfile", Warn, []string{"--upstream"}},
		{"pod file damaged", attached, func(f *Facts) { f.PodFile.Servers = addrs("127.0.0.1") }, "podfile", Fail, []string{"damaged"}},
		{"docker", detached, func(f *Facts) { f.System.Docker = true }, "docker", Warn, []string{"8.8.8.8", "daemon.json"}},

		{"loop seen", attached, func(f *Facts) {
			f.Attachment.Loop = "172.20.0.10 asked us"
			f.Attachment.Problems = []string{"cluster DNS forwards to us: 172.20.0.10 asked us: ..."}
		}, "coredns", Fail, []string{"cluster DNS forwards to us", "172.20.0.10", "Corefile"}},
		{"probe came back", attached, func(f *Facts) { f.CoreDNS = []CoreDNS{{Endpoint: "172.20.0.10:53", AsksUs: true}} }, "coredns", Warn, []string{"172.20.0.10:53", "Corefile"}},
		{"CoreDNS forwards to us", detached, func(f *Facts) { f.CoreDNS = []CoreDNS{{Process: Process{7, "coredns"}, Forwards: addrs("172.19.1.1")}} }, "coredns", Fail, []string{"172.19.1.1", "we serve"}},
		{"CoreDNS forwards to itself", detached, func(f *Facts) { f.CoreDNS = []CoreDNS{{Process: Process{7, "coredns"}, Forwards: addrs("127.0.0.1")}} }, "coredns", Fail, []string{"itself", "Loop detected"}},
		{"CoreDNS on the host's network", detached, func(f *Facts) {
			f.CoreDNS = []CoreDNS{{Process: Process{7, "coredns"}, HostNetwork: true, Forwards: addrs("127.0.0.1")}}
		}, "coredns", Fail, []string{"127.0.0.1", "we serve"}},
		{"pods with our loopback", detached, func(f *Facts) { f.Pods = []Process{{8, "app"}} }, "pods", Fail, []string{"app (process 8)", "recreate"}},

		{"no port for us", detached, func(f *Facts) {
			f.Attachment.BPF = false
			f.System.Lacks = []string{"this process has no CAP_NET_BIND_SERVICE: run it as root"}
		}, "kernel", Fail, []string{"CAP_NET_BIND_SERVICE", "run it as root"}},
		{"old kernel", detached, func(f *Facts) { f.System.Kernel = "5.10.0-28-amd64" }, "kernel", Fail, []string{"5.12", "--no-bpf"}},
		{"no bpffs", detached, func(f *Facts) { f.System.Lacks = []string{"pin directory /x: no BPF file system: mount one with ..."} }, "kernel", Fail, []string{"mount one"}},
		{"no BTF", detached, func(f *Facts) { f.System.BTF = false }, "kernel", Warn, []string{"btf"}},
		{"sysctl reset", attached, func(f *Facts) { f.System.Sysctls["net.ipv4.conf.lo.route_localnet"] = "0" }, "sysctls", Fail, []string{"route_localnet=0"}},
		{"no boot unit", detached, func(f *Facts) { f.System.BootUnit = "" }, "boot", Warn, []string{bootUnit}},
		{"boot unit disabled", detached, func(f *Facts) { f.System.Enabled = false }, "boot", Warn, []string{"systemctl enable"}},
	}
	covered := make(map[string]bool)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			covered[tt.check] = true
			f := tt.of()
			tt.change(&f)
			e := Examine(f)
			if e.Healthy != (tt.want != Fail) {
				t.Errorf("healthy %v with a check that says %s", e.Healthy, tt.want)
			}
			bad := slices.DeleteFunc(slices.Clone(e.Findings), func(f Finding) bool { return f.Result == OK })
			if len(bad) != 1 || bad[0].Check != tt.check || bad[0].Result != tt.want {
				t.Fatalf("want one %s of %s, got %+v", tt.want, tt.check, bad)
			}
			all := bad[0].Says + "\n" + bad[0].Consequence + "\n" + bad[0].Fix
			for _, part := range tt.says {
				if !strings.Contains(all, part) {
					t.Errorf("%q is not in %q", part, all)
				}
			}
			if bad[0].Fix == "" || strings.Contains(bad[0].Says, "\n") {
				t.Errorf("no fix, or more than one line: %+v", bad[0])
			}
		})
	}
	for _, check := range checks {
		if !covered[check.name] {
			t.Errorf("no case lets the check %s fail", check.name)
		}
	}
}

// TestFine are things that look like faults.
func TestFine(t *testing.T) {
	for name, tt := range map[string]struct {
		of     func() Facts
		change func(f *Facts)
	}{
		"kubelet with our file": {attached, func(f *Facts) {
			f.Kubelets = []Kubelet{{Process: Process{9, "kubelet"}, ResolvConf: f.PodFile.Path, Servers: addrs("192.0.2.53")}}
		}},
		"nss-resolve, and resolved does not run": {detached, func(f *Facts) { f.NSSwitch = "files resolve dns" }},
		"dns before resolve":                     {detached, func(f *Facts) { f.NSSwitch, f.Managers.Resolved = "files dns resolve", true }},
		"NetworkManager left out":                {detached, func(f *Facts) { f.Managers.NetworkManager, f.Managers.NMRcManager = true, "unmanaged" }},
		"openresolv 3.16":                        {detached, func(f *Facts) { f.Managers.Openresolv = "3.16.5" }},
		"port 53 of another address":             {detached, func(f *Facts) { f.Sockets = []Socket{{"udp", server("127.0.0.53:53"), Process{1, "x"}, false}} }},
		"resolver none":                          {detached, func(f *Facts) { f.Attachment.Takeover, f.Resolver.Refusals = false, []string{"x: y: z"} }},
		"CoreDNS with the outside":               {detached, func(f *Facts) { f.CoreDNS = []CoreDNS{{Process: Process{7, "coredns"}, Forwards: addrs("192.0.2.53")}} }},
	} {
		t.Run(name, func(t *testing.T) {
			f := tt.of()
			tt.change(&f)
			for _, finding := range Examine(f).Findings {
				if finding.Result != OK {
					t.Errorf("%+v", finding)
				}
			}
		})
	}
}

// TestUnprivileged: who is not root is told what could not be seen, and nothing wrong.
func TestUnprivileged(t *testing.T) {
	f := attached()
	f.Privileged, f.Journal.Denied, f.Guardian = false, true, 0
	f.Sockets = []Socket{{"udp", server("127.0.0.1:53"), Process{}, false}}
	f.Unseen = []string{"sockets: no answer within 2s"}
	e := Examine(f)
	unknowns := 0
	for _, finding := range e.Findings {
		switch finding.Result {
		case OK:
		case Unknown:
			unknowns++
		default:
			t.Errorf("%+v", finding)
		}
	}
	if !e.Healthy || unknowns != 8 {
		t.Errorf("healthy %v, %d unknown: %+v", e.Healthy, unknowns, e.Findings)
	}
}

func TestWriteExamination(t *testing.T) {
	e := Examination{Findings: []Finding{{Check: "port53", Result: Fail, Says: "taken", Consequence: "refused", Fix: "stop it"}}}
	for format, want := range map[string]string{
		"table": "CHECK   RESULT  FINDING\nport53  fail    taken\n                consequence: refused\n                fix: stop it\n",
		"json":  "", "yaml": "",
	} {
		var out bytes.Buffer
		if err := e.Write(&out, status.Format(format)); err != nil {
			t.Fatal(err)
		}
		var back Examination
		var err error
		switch format {
		case "json":
			err = json.Unmarshal(out.Bytes(), &back)
		case "yaml":
			err = yaml.Unmarshal(out.Bytes(), &back)
		default:
			if out.String() != want {
				t.Errorf("%q, want %q", out.String(), want)
			}
			continue
		}
		if err != nil || len(back.Findings) != 1 || back.Findings[0] != e.Findings[0] {
			t.Errorf("%s: %v: %s", format, err, &out)
		}
	}
}
