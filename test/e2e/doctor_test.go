package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// finding is one of `doctor -o json`, written down a second time on purpose: the names are a contract.
type finding struct {
	Check       string `json:"check"`
	Result      string `json:"result"`
	Says        string `json:"says"`
	Consequence string `json:"consequence"`
	Fix         string `json:"fix"`
}

func (f finding) String() string {
	return fmt.Sprintf("%s %s: %s; consequence: %s; fix: %s", f.Check, f.Result, f.Says, f.Consequence, f.Fix)
}

type examination struct {
	Healthy  bool      `json:"healthy"`
	Findings []finding `json:"findings"`
}

// with returns the findings of one check.
func (e examination) with(check string) (out []finding) {
	for _, f := range e.Findings {
		if f.Check == check {
			out = append(out, f)
		}
	}
	return out
}

// bad returns the findings that are not ok.
func (e examination) bad() (out []finding) {
	for _, f := range e.Findings {
		if f.Result != "ok" {
			out = append(out, f)
		}
	}
	return out
}

func (h *host) doctor(before ...string) examination {
	h.t.Helper()
	r := command(h.t, h.Host(), append(before, h.binary, "doctor", "-o", "json")...)
	var e examination
	if err := json.Unmarshal([]byte(r.stdout), &e); err != nil {
		h.t.Fatalf("%v: %v", r, err)
	}
	if want := map[bool]int{true: 0, false: 3}[e.Healthy]; r.code != want || r.stderr != "" {
		h.t.Errorf("want exit %d and nothing on standard error: %v", want, r)
	}
	return e
}

// wantFinding wants a finding of a check with this result, in which all words are.
func (h *host) wantFinding(e examination, check, result string, says ...string) {
	h.t.Helper()
next:
	for _, f := range e.with(check) {
		// What is wrong is told with what comes of it and what to do.
		if f.Result != result || (result == "warn" || result == "fail") && (f.Consequence == "" || f.Fix == "") {
			continue
		}
		for _, word := range says {
			if !strings.Contains(f.String(), word) {
				continue next
			}
		}
		return
	}
	h.t.Errorf("want %s of %s with %q, got %v", result, check, says, e.with(check))
}

// TestDoctorWell: on a host on which all is well doctor says so, attached or not, to everybody, and changes nothing.
func TestDoctorWell(t *testing.T) {
	h := raise(t, lab.Options{})
	nobody := []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}
	for _, state := range []string{"detached", "attached"} {
		if state == "attached" {
			h.attach()
		}
		before := h.snapshot()
		if e := h.doctor(); !e.Healthy || len(e.bad()) > 0 {
			t.Errorf("%s: %v", state, e.bad())
		}
		e := h.doctor(nobody...)
		for _, f := range e.bad() {
			if f.Result != "unknown" {
				t.Errorf("%s, as nobody: %v", state, f)
			}
		}
		h.wantFinding(e, "pods", "unknown", "can't be looked into", "root")
		for _, format := range []string{"table", "yaml"} {
			r := h.run("doctor", "-o", format)
			if r.code != 0 || !strings.Contains(r.stdout, "port53") {
				t.Errorf("%v", r)
			}
		}
		h.unchangedBut(before)
	}
	// A daemon that hangs does not hang doctor.
	pid := h.healthy().PID
	h.signal("STOP", pid)
	r := h.run("doctor")
	h.signal("CONT", pid)
	if r.code != 3 || r.took > patience || !strings.Contains(r.stdout, "does not answer") {
		t.Errorf("with the daemon stopped: %v", r)
	}
}

// TestDoctorFinds breaks one thing after the other on a host that is not attached.
func TestDoctorFinds(t *testing.T) {
	h := raise(t, lab.Options{NoServers: true})
	for _, test := range []struct {
		name          string
		do, undo      string
		check, result string
		says          []string
	}{
		{"kubelet hands out the host's file", "mkdir -p /var/lib/kubelet; echo 'resolvConf: /etc/resolv.conf' >/var/lib/kubelet/config.yaml", "rm -r /var/lib/kubelet",
			"kubelet", "warn", []string{"/etc/resolv.conf", "Loop detected", "resolvConf: " + kubeletFile}},
		{"kubelet's file is missing", "mkdir -p /var/lib/kubelet; echo 'resolvConf: /run/none' >/var/lib/kubelet/config.yaml", "rm -r /var/lib/kubelet",
			"kubelet", "fail", []string{"/run/none", "does not exist", "every pod"}},
		{"nsswitch without dns", "cp /etc/nsswitch.conf /run/saved; echo 'hosts: files' >/etc/nsswitch.conf", "mv /run/saved /etc/nsswitch.conf", "nsswitch", "fail", []string{"add dns"}},
		{"parked file without a journal", "echo x >/etc/.resolv.conf.k2s-dnsbpf-original", "rm /etc/.resolv.conf.k2s-dnsbpf-original",
			"leftovers", "fail", []string{"journal is lost", "restore"}},
		{"damaged journal", "mkdir -p /var/lib/k2s-dnsbpf; echo '{' >/var/lib/k2s-dnsbpf/journal.json", "rm -r /var/lib/k2s-dnsbpf", "journal", "fail", []string{"damaged", "restore"}},
		{"immutable", "chattr +i /etc/resolv.conf", "chattr -i /etc/resolv.conf", "file", "fail", []string{"chattr +i", "--override-immutable"}},
		{"bind mount", "cp /etc/resolv.conf /run/r; mount --bind /run/r /etc/resolv.conf", "umount /etc/resolv.conf; rm /run/r", "file", "fail", []string{"/r of", "--in-place"}},
		{"read-only", "mount -o remount,ro /etc", "mount -o remount,rw /etc", "file", "fail", []string{"read-only"}},
		{"no server", "cp -p /etc/resolv.conf /run/r; echo >/etc/resolv.conf", "cp -p /run/r /etc/resolv.conf; rm /run/r", "file", "fail", []string{"--upstream"}},
		{"tailscale was here", "touch /etc/resolv.pre-tailscale-backup.conf", "rm /etc/resolv.pre-tailscale-backup.conf", "takeovers", "warn", []string{"tailscale"}},
		{"no BPF file system", "umount /sys/fs/bpf", "mount -t bpf -o mode=700 bpf /sys/fs/bpf", "kernel", "fail", []string{"mount -t bpf", "--no-bpf"}},
		{"resolved's stub", "mkdir -p /run/systemd/resolve; echo nameserver 127.0.0.53 >/run/systemd/resolve/stub-resolv.conf; echo nameserver 192.0.2.53 >/run/systemd/resolve/resolv.conf; mv /etc/resolv.conf /run/r; ln -s ../run/systemd/resolve/stub-resolv.conf /etc/resolv.conf",
			"rm -r /run/systemd /etc/resolv.conf; mv /run/r /etc/resolv.conf", "owner", "warn", []string{"relative symbolic link", "systemd-resolved (stub)", "--resolver transparent"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := h.in(t)
			defer shell(test.do, test.undo)(h)()
			h.wantFinding(h.doctor(), test.check, test.result, test.says...)
		})
	}
	t.Run("and then all is well", func(t *testing.T) {
		if bad := h.in(t).doctor().bad(); len(bad) > 0 {
			t.Error(bad)
		}
	})
}

// background starts a command in host0 that ends with the test.
func (h *host) background(argv ...string) {
	h.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := h.Host().Command(ctx, argv[0], argv[1:]...)
	cmd.Dir = "/"
	if err := cmd.Start(); err != nil {
		cancel()
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		cancel()
		_ = cmd.Wait()
	})
}

// eventuallyFinding waits for a finding about a process that was just started.
func (h *host) eventuallyFinding(check, result string, says ...string) {
	h.t.Helper()
	eventually(h.t, "doctor finds "+check, func() error {
		for _, f := range h.doctor().with(check) {
			missing := f.Result != result
			for _, word := range says {
				missing = missing || !strings.Contains(f.String(), word)
			}
			if !missing {
				return nil
			}
		}
		return fmt.Errorf("%v", h.doctor().with(check))
	})
}

// TestDoctorProcesses: what other programs do that run on the host.
func TestDoctorProcesses(t *testing.T) {
	h := raise(t, lab.Options{NoServers: true})
	t.Run("port 53 is dnsmasq's", func(t *testing.T) {
		h := h.in(t)
		h.background("dnsmasq", "-d", "-C", "/dev/null", "--no-resolv", "--no-hosts", "--listen-address=127.0.0.1", "--bind-interfaces")
		h.eventuallyFinding("port53", "fail", "127.0.0.1:53/udp", "dnsmasq")
		h.eventuallyFinding("port53", "fail", "127.0.0.1:53/tcp", "dnsmasq")
	})
	t.Run("nss-resolve, and resolved runs", func(t *testing.T) {
		h := h.in(t)
		defer shell("cp /etc/nsswitch.conf /run/saved; echo 'hosts: files resolve [!UNAVAIL=return] dns' >/etc/nsswitch.conf; cp /bin/sleep /run/systemd-resolved",
			"mv /run/saved /etc/nsswitch.conf; rm /run/systemd-resolved")(h)()
		h.wantFinding(h.doctor(), "nsswitch", "ok")
		h.background("/run/systemd-resolved", "1000")
		h.eventuallyFinding("nsswitch", "warn", "nss-resolve", "dns before resolve")
	})
	t.Run("CoreDNS in a pod that inherited loopback", func(t *testing.T) {
		h := h.in(t)
		coredns, err := lab.Helper("coredns")
		if err != nil {
			t.Fatal(err)
		}
		h.background("unshare", "-n", "-m", "sh", "-ec",
			"echo 'nameserver 127.0.0.1' >/run/pod.conf; mount --bind /run/pod.conf /etc/resolv.conf; "+
				"printf '.:53 {\\n forward . /etc/resolv.conf\\n}\\n' >/run/Corefile.pod; ip link set lo up; exec "+coredns+" -conf /run/Corefile.pod")
		h.eventuallyFinding("coredns", "fail", "127.0.0.1, which is itself", "Loop detected", "Corefile")
		h.eventuallyFinding("pods", "fail", "coredns", "recreate")
	})
}

// TestDoctorAndStrangers: who calls himself kubelet chooses no file that root reads.
func TestDoctorAndStrangers(t *testing.T) {
	h := raise(t, lab.Options{NoServers: true})
	must(t, h.Host(), "sh", "-ec", "cp /bin/sh /run/kubelet; chmod 755 /run/kubelet; echo 'resolvConf: /secret' >/run/kubelet.yaml; chmod 600 /run/kubelet.yaml")
	start := func(user string) {
		h.background("setpriv", "--reuid="+user, "--clear-groups", "/run/kubelet", "-c", "sleep 1000; :", "x", "--config=/run/kubelet.yaml")
	}
	start("65534")
	eventually(t, "it runs", func() error {
		if r := command(t, h.Host(), "pgrep", "-u", "65534", "-x", "kubelet"); r.code != 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	if r := h.run("doctor", "-o", "json"); strings.Contains(r.stdout, "/secret") {
		t.Errorf("%v", r)
	}
	start("0")
	h.eventuallyFinding("kubelet", "fail", "/secret")
}

// TestDoctorAttached: what is wrong only while attached.
func TestDoctorAttached(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	h.wantFinding(h.doctor(), "guardian", "ok", "restores the resolver file")
	kubelet := func(path string) func(h *host) func() {
		return shell("mkdir -p /var/lib/kubelet; echo 'resolvConf: "+path+"' >/var/lib/kubelet/config.yaml", "rm -r /var/lib/kubelet")
	}
	undo := kubelet("/etc/resolv.conf")(h)
	h.wantFinding(h.doctor(), "kubelet", "fail", "names 127.0.0.1", "Loop detected", "resolvConf: "+kubeletFile)
	undo()
	undo = kubelet(kubeletFile)(h)
	h.wantFinding(h.doctor(), "kubelet", "ok", kubeletFile, lab.External0)
	undo()
	undo = shell("mkdir -p /run/systemd/resolve; echo nameserver 127.0.0.1 >/run/systemd/resolve/resolv.conf", "rm -r /run/systemd")(h)
	defer undo()
	undo48 := kubelet("/run/systemd/resolve/resolv.conf")(h)
	h.wantFinding(h.doctor(), "kubelet", "fail", "/run/systemd/resolve/resolv.conf", "127.0.0.1")
	undo48()

	// The daemon would set it again before a slow doctor looks.
	pid := h.healthy().PID
	h.signal("STOP", pid)
	if err := h.Host().SetSysctl("net.ipv4.conf.lo.accept_local", "0"); err != nil {
		t.Fatal(err)
	}
	h.wantFinding(h.doctor(), "sysctls", "fail", "accept_local=0")
	if err := h.Host().SetSysctl("net.ipv4.conf.lo.accept_local", "1"); err != nil {
		t.Fatal(err)
	}
	h.signal("CONT", pid)
	h.kill()
	h.wantFinding(h.doctor(), "daemon", "fail", "no daemon answers", "detach")
	h.detach()
	h.wantFinding(h.doctor(), "daemon", "ok", "not attached")
}

// TestClusterDNSForwardsToUs: a name in a zone of ours that CoreDNS does not know, and a CoreDNS that forwards
// what it does not know to this host.
func TestClusterDNSForwardsToUs(t *testing.T) {
	h := raise(t, lab.Options{NoServers: true, LogQueries: true})
	const corefile = "/run/lab/Corefile"
	for _, s := range h.cluster() {
		content, err := s.Node().ReadFile(corefile)
		if err != nil {
			t.Fatal(err)
		}
		text := strings.TrimSuffix(strings.TrimSpace(string(content)), "}") + "\tforward . " + lab.KubeSwitch4 + "\n}\n"
		if err := s.Node().WriteFile(corefile, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range append(h.cluster(), h.outside()...) {
		if err := s.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	h.attach(endpoints, []string{"--zone", "cluster.local", "--zone", "loop.example", "--allow", "172.20.0.0/16", "--allow", "172.19.1.0/24"})

	// The marked query tells before any harm is done.
	e := h.doctor()
	h.wantFinding(e, "coredns", "warn", "172.20.0.10:53", "marked query", "Corefile")
	h.wantFinding(e, "coredns", "warn", "172.20.0.11:53")
	if !e.Healthy {
		t.Errorf("no loop yet: %v", e.bad())
	}
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
	h.healthy()

	for _, network := range []string{"udp", "tcp"} {
		before := queries(t, h.cluster()...)
		m, err := h.Host().Query(t.Context(), network, hostDNS, network+".loop.example.", dns.TypeA)
		if err != nil || m.Rcode != dns.RcodeServerFailure {
			t.Errorf("%s: want SERVFAIL: %v: %v", network, err, m)
		}
		// Steered or forwarded once, once more by the forwarder, and then it is known; CoreDNS may try twice by itself.
		if n := queries(t, h.cluster()...) - before; n > 6 {
			t.Errorf("%s: a storm of %d queries at CoreDNS", network, n)
		}
	}
	for _, s := range h.outside() {
		for _, q := range s.QueryLog() {
			if strings.HasSuffix(q.Name, "loop.example.") {
				t.Errorf("it was asked outside: %v", q)
			}
		}
	}
	r := h.status()
	if r.Healthy || !strings.Contains(strings.Join(r.Problems, "\n"), "cluster DNS forwards to us: 172.20.0.1") {
		t.Errorf("status: %+v", r.Problems)
	}
	h.wantFinding(h.doctor(), "coredns", "fail", "cluster DNS forwards to us", "loop.example.", "Corefile")
	log, err := h.Host().ReadFile("/run/k2s-dnsbpf/daemon.log")
	if n := strings.Count(string(log), "a query came back"); err != nil || n != 1 || !strings.Contains(string(log), "Corefile") {
		t.Errorf("%v: %d lines about it, want one that says what to do:\n%s", err, n, log)
	}
	// Other names are none the worse for it.
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
}

// TestAttachInPlace: a resolver file that a container runtime has mounted.
func TestAttachInPlace(t *testing.T) {
	h := raise(t, lab.Options{})
	must(t, h.Host(), "sh", "-ec", "cp /etc/resolv.conf /run/container; chmod 640 /run/container; mount --bind /run/container /etc/resolv.conf")
	before := h.snapshot()
	inode := must(t, h.Host(), "stat", "-c", "%i %a %Y", "/etc/resolv.conf")

	r := h.run(attachArgs("--in-place", "--dry-run")...)
	if r.code != 0 || !strings.Contains(r.stdout, "bind mount") || !strings.Contains(r.stdout, "owner: a mount of /container") {
		t.Errorf("%v", r)
	}
	h.unchangedBut(before)

	for _, end := range []string{"detach", "kill"} {
		h.attach(endpoints, ranges, []string{"--in-place"})
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		if out := must(t, h.Host(), "getent", "ahostsv4", strings.TrimSuffix(lab.Backend, ".")); !strings.HasPrefix(out, lab.Backend4) {
			t.Errorf("by the resolver file: %q", out)
		}
		now := must(t, h.Host(), "stat", "-c", "%i %a", "/etc/resolv.conf")
		if !strings.HasPrefix(inode, strings.TrimSpace(now)) {
			t.Errorf("inode and mode were %q, are %q", inode, now)
		}
		if r := h.healthy(); r.Resolver.State != "ours" {
			t.Errorf("%+v", r.Resolver)
		}
		if end == "kill" {
			h.kill()
		}
		h.detach()
		h.unchanged(before)
		if now := must(t, h.Host(), "stat", "-c", "%i %a %Y", "/etc/resolv.conf"); now != inode {
			t.Errorf("inode, mode and time were %q, are %q", inode, now)
		}
	}
}

// TestAttachOverrideImmutable: the attribute of chattr is off while attached, and back afterwards.
func TestAttachOverrideImmutable(t *testing.T) {
	h := raise(t, lab.Options{})
	must(t, h.Host(), "chattr", "+i", "/etc/resolv.conf")
	before := h.snapshot()
	flags := must(t, h.Host(), "lsattr", "/etc/resolv.conf")
	for _, end := range []string{"detach", "kill"} {
		h.attach(endpoints, ranges, []string{"--override-immutable"})
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		if now := must(t, h.Host(), "lsattr", "/etc/resolv.conf"); strings.Contains(strings.Fields(now)[0], "i") {
			t.Errorf("ours is immutable: %s", now)
		}
		if end == "kill" {
			h.kill()
		}
		h.detach()
		h.unchanged(before)
		if now := must(t, h.Host(), "lsattr", "/etc/resolv.conf"); now != flags {
			t.Errorf("attributes were %q, are %q", flags, now)
		}
	}
}

// TestAttachFromOtherMounts: a process that has mounts of its own would change its own view only.
func TestAttachFromOtherMounts(t *testing.T) {
	h := raise(t, lab.Options{})
	must(t, h.Host(), "mkdir", "-p", "/run/mount") // mount makes it, and leaves it
	before := h.snapshot()
	args := strings.Join(append([]string{h.binary}, attachArgs("--in-place")...), " ")
	r := command(t, h.Host(), "unshare", "-m", "sh", "-c", "cp /etc/resolv.conf /run/mine; mount --bind /run/mine /etc/resolv.conf; rm /run/mine; exec "+args)
	if r.code != 1 || !strings.Contains(r.stderr, "process 1") || !strings.Contains(r.stderr, "nsenter") || strings.Count(r.stderr, "\n") != 1 {
		t.Errorf("%v", r)
	}
	h.unchangedBut(before)
	// Mounts of its own that leave the file alone, as a hardened unit has, are none.
	r = command(t, h.Host(), "unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt; exec "+strings.Join(append([]string{h.binary}, attachArgs("--dry-run")...), " "))
	if r.code != 0 {
		t.Errorf("%v", r)
	}
}
