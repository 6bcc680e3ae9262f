package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// puttings counts how often something was put back.
func (h *host) puttings(what string) (n int) {
	h.t.Helper()
	for _, e := range h.status().Datapath.Events {
		if strings.Contains(e.What, what) && e.Action == "put back" {
			n += max(1, e.Count)
		}
	}
	return n
}

// healed waits until status says that something was put back once more, and that all is well.
func (h *host) healed(what string, before int) {
	h.t.Helper()
	eventually(h.t, what+" is put back", func() error {
		if r := h.status(); !r.Healthy || h.puttings(what) <= before {
			return fmt.Errorf("problems %q, events %v", r.Problems, r.Datapath.Events)
		}
		return nil
	})
}

// detachLink detaches a program's link as an operator would.
func (h *host) detachLink(program string) string {
	h.t.Helper()
	for _, p := range h.dataplane().Datapath.Programs {
		if p.Name == program {
			return fmt.Sprintf("id=$(bpftool link show | sed -n 's/^\\([0-9]*\\): .*prog %d .*/\\1/p' | head -1); bpftool link detach id $id", p.KernelID)
		}
	}
	h.t.Fatalf("%s is not attached", program)
	return ""
}

// TestKernelStateVanishes: whoever takes away what is in the kernel, it comes back within seconds, and is told of.
func TestKernelStateVanishes(t *testing.T) {
	for mode, args := range map[string][]string{"takeover": nil, "transparent": transparent} {
		t.Run(mode, func(t *testing.T) {
			h := raise(t, lab.Options{LogQueries: true})
			scope := "host"
			var site hostResolver
			if args != nil {
				scope, site = "transparent", h.startDnsmasq("127.0.0.1")
			}
			before := h.snapshot()
			h.attach(endpoints, ranges, args)
			h.healthy()
			for _, c := range []struct{ script, what string }{
				{h.detachLink("dns_from_host"), "dns_from_host on egress of lo"},
				{h.detachLink("dns_from_backend"), "dns_from_backend on ingress of"},
				{h.detachLink("dns_from_client"), "dns_from_client on ingress of kubeswitch"},
				{h.detachLink("dns_filter"), "on xdp of kubeswitch"},
				{"sysctl -qw net.ipv4.conf.lo.route_localnet=0", "route_localnet"},
				{"sysctl -qw net.ipv4.conf.lo.accept_local=0", "accept_local"},
				{"rm -r /sys/fs/bpf/k2s-dnsbpf/maps", "pins"},
				{"rm -r /sys/fs/bpf/k2s-dnsbpf", "pins"},
				{"umount /sys/fs/bpf && mount -t bpf -o mode=700 bpf /sys/fs/bpf", "pins"},
				{"mount -t bpf -o mode=700 bpf /sys/fs/bpf", "pins"},
				{h.emptyMap("dns_zones"), "map dns_zones"},
				{h.emptyMap("dns_listeners"), "map dns_listeners"},
				{h.emptyMap("dns_backends"), "map dns_backends"},
				{"for i in $(seq 0 63); do bytes=\"$bytes 0\"; done; size=$(bpftool -j map show pinned /sys/fs/bpf/k2s-dnsbpf/maps/dns_config | grep -o '\"bytes_value\":[0-9]*' | cut -d: -f2); " +
					"bpftool map update pinned /sys/fs/bpf/k2s-dnsbpf/maps/dns_config key 0 0 0 0 value $(yes 0 | head -$size)", "map dns_config"},
			} {
				n := h.puttings(c.what)
				sh(t, h.Host(), c.script)
				h.healed(c.what, n)
				h.works()
				since := h.dataplane()
				resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
				if h.dataplane().rose(since, scope, "replied") == 0 {
					t.Errorf("%s: nothing is steered", c.what)
				}
			}
			if args != nil {
				if names := site.asked(t, lab.Zone); len(names) != 0 {
					t.Errorf("the host's resolver was asked for %v", names)
				}
			}
			for _, s := range h.outside() {
				for _, q := range s.QueryLog() {
					if dns.IsSubDomain(lab.Zone, q.Name) {
						t.Errorf("%s left for an outside server", q.Name)
					}
				}
			}
			h.detach()
			if programs := h.dataplane().Datapath.Programs; len(programs) != 0 {
				t.Errorf("left: %v", programs)
			}
			h.unchangedBut(before, kubeletFile, "/var/lib/k2s-dnsbpf", "/run/mount")
		})
	}
}

// emptyMap deletes all elements of a map as an operator would.
func (h *host) emptyMap(name string) string {
	h.t.Helper()
	path := "/sys/fs/bpf/k2s-dnsbpf/maps/" + name
	var elements []struct {
		Key []string `json:"key"`
	}
	if err := json.Unmarshal([]byte(must(h.t, h.Host(), "bpftool", "-j", "map", "dump", "pinned", path)), &elements); err != nil {
		h.t.Fatal(err)
	}
	script := "true"
	for _, e := range elements {
		script += "; bpftool map delete pinned " + path + " key " + strings.Join(e.Key, " ")
	}
	return script
}

// TestKernelStateTaken: somebody who takes it away again and again is told of, and not fought at full speed.
func TestKernelStateTaken(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	h.healthy()
	// A sysctl is what configuration management takes: it comes back each time that it runs.
	eventually(t, "status tells of a fight", func() error {
		sh(t, h.Host(), "sysctl -qw net.ipv4.conf.lo.route_localnet=0")
		if problems := strings.Join(h.status().Problems, "; "); !strings.Contains(problems, "others keep taking") {
			return errors.New(problems)
		}
		return nil
	})
	h.detach()
}

// says requires that status tells of a problem.
func (h *host) says(text string) {
	h.t.Helper()
	if problems := strings.Join(h.status().Problems, "; "); !strings.Contains(problems, text) {
		h.t.Errorf("status does not say %q: %q", text, problems)
	}
}

// tries counts how often putting something back has failed.
func (h *host) tries(what string) (n int) {
	h.t.Helper()
	for _, e := range h.status().Datapath.Events {
		if strings.Contains(e.What, what) && strings.HasPrefix(e.Action, "not put back") {
			n += max(1, e.Count)
		}
	}
	return n
}

// failed waits until putting something back has failed so often that a success each time would be a fight.
func (h *host) failed(what string) {
	h.t.Helper()
	eventually(h.t, "putting back "+what+" has failed for a while", func() error {
		if problems := strings.Join(h.status().Problems, "; "); strings.Contains(problems, "others keep") {
			h.t.Fatalf("nobody fights: %s", problems)
		}
		if n := h.tries(what); n < 7 {
			return fmt.Errorf("%d times, problems %q", n, h.status().Problems)
		}
		return nil
	})
}

// TestHookTaken: a hook that another program took in place of ours stays a problem, and is taken back once it is free.
func TestHookTaken(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	pid := h.healthy().PID
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	// The daemon must not be faster.
	sh(t, h.Host(), fmt.Sprintf("kill -STOP %d; %s", pid, h.detachLink("dns_filter")))
	var taken link.Link
	err = h.Host().Do(func() error {
		device, err := net.InterfaceByName("kubeswitch")
		if err == nil {
			taken, err = link.AttachXDP(link.XDPOptions{Interface: device.Index, Program: other, Flags: link.XDPGenericMode})
		}
		return err
	})
	sh(t, h.Host(), fmt.Sprintf("kill -CONT %d", pid))
	if err != nil {
		t.Fatal(err)
	}
	h.failed("on xdp of kubeswitch")
	h.says("another XDP program is on kubeswitch")
	n := h.puttings("on xdp of kubeswitch")
	if err := taken.Close(); err != nil {
		t.Fatal(err)
	}
	h.healed("on xdp of kubeswitch", n)
	h.detach()
}

// TestNoBPFFileSystem: without one the remedy is told for as long as it lasts, and nothing else waits for it.
func TestNoBPFFileSystem(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	h.healthy()
	sh(t, h.Host(), "umount /sys/fs/bpf")
	h.failed("pins")
	h.says("mount -t bpf bpf /sys/fs/bpf")
	sh(t, h.Host(), h.detachLink("dns_from_host"))
	eventually(t, "the host's program is back", func() error {
		if programs := h.dataplane().programs("lo"); len(programs) != 1 {
			return fmt.Errorf("on lo: %q", programs)
		}
		return nil
	})
	h.says("mount -t bpf bpf /sys/fs/bpf")
	n := h.puttings("pins")
	sh(t, h.Host(), "mount -t bpf -o mode=700 bpf /sys/fs/bpf")
	h.healed("pins", n)
	h.detach()
}

// TestTimeNamespace: the daemon's clock may be another one than the kernel's; it lives, and if it dies that is noticed.
func TestTimeNamespace(t *testing.T) {
	for _, offset := range []string{"-1000", "1000"} {
		t.Run(offset, func(t *testing.T) {
			h := raise(t, lab.Options{})
			must(t, h.Host(), append([]string{"unshare", "--time", "--fork", "--monotonic", offset, h.binary}, attachArgs()...)...)
			h.healthy()
			before := h.dataplane()
			resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
			if n := h.dataplane().rose(before, "host", "steered_fallback"); n != 0 {
				t.Errorf("%d names were steered past a daemon that lives", n)
			}
			h.killBoth()
			eventually(t, "names are steered past the dead daemon", func() error {
				if r := command(t, h.Host(), "dig", "+tries=1", "+time=1", "@127.0.0.1", lab.WWW); !strings.Contains(r.stdout, lab.WWW4) {
					return errors.New(r.String())
				}
				return nil
			})
			if h.dataplane().rose(before, "host", "steered_fallback") == 0 {
				t.Error("nothing was steered past it")
			}
			h.run("detach", "--linger", "0")
		})
	}
}

// TestStateDirectoryLost: a daemon knows in memory what it is to put back.
func TestStateDirectoryLost(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	h.healthy()
	sh(t, h.Host(), "rm -r /var/lib/k2s-dnsbpf")
	h.run("detach", "--linger", "0")
	h.unchangedBut(before)
}

// TestSysctlsAfterAll: with both processes killed and the state directory lost, the sysctls are set back, or named where nobody
// knows what they were.
func TestSysctlsAfterAll(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		knows  bool
	}{
		"state directory": {"rm -rf /var/lib/k2s-dnsbpf", true},
		"and programs":    {"rm -rf /var/lib/k2s-dnsbpf; umount /sys/fs/bpf; mount -t bpf -o mode=700 bpf /sys/fs/bpf", true},
		"both":            {"rm -rf /var/lib/k2s-dnsbpf /run/k2s-dnsbpf", false},
	} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			before := h.snapshot()
			h.attach()
			h.killBoth()
			sh(t, h.Host(), c.script)
			r := h.run("detach", "--linger", "0")
			if r.code != 0 || strings.Contains(r.stdout, "is 0 again") != c.knows || strings.Contains(r.stdout, "no record is left of what it was") == c.knows {
				t.Errorf("%v", r)
			}
			if c.knows {
				h.unchangedBut(before, "/run/mount")
			}
		})
	}
	// Who attaches in between knows it, too.
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	h.killBoth()
	sh(t, h.Host(), "rm -rf /var/lib/k2s-dnsbpf")
	must(t, h.Host(), h.binary, "restore")
	h.attach()
	h.detach()
	h.unchangedBut(before, kubeletFile, "/var/lib/k2s-dnsbpf")
}

// TestGhostElsewhere: a program whose pin nobody sees, where the next attach wants none, goes with that attach.
func TestGhostElsewhere(t *testing.T) {
	for name, script := range map[string]string{"covered": "mount -t bpf bpf /sys/fs/bpf", "in sight": "true"} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			h.attach(endpoints, ranges, []string{"--pods", "cni0"})
			before := len(h.dataplane().programs("cni0"))
			h.killBoth()
			sh(t, h.Host(), script)
			h.attach()
			h.healthy()
			if now := h.dataplane().programs("cni0"); len(now) != before-1 {
				t.Errorf("on cni0 are %q, were %d with the one for pods", now, before)
			}
			h.works()
			h.detach()
		})
	}
}

// TestGhosts: programs whose pins nobody sees are taken over by the next attach, and go with a detach.
func TestGhosts(t *testing.T) {
	hide := map[string]string{
		"covered":   "mount -t bpf bpf /sys/fs/bpf",
		"all gone":  "rm -rf /var/lib/k2s-dnsbpf && mount -t bpf bpf /sys/fs/bpf",
		"no record": "rm -rf /var/lib/k2s-dnsbpf /run/k2s-dnsbpf",
	}
	programs := func(h *host) int { return len(h.dataplane().Datapath.Programs) }
	for name, script := range hide {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			h.attach()
			n := programs(h)
			h.killBoth()
			sh(t, h.Host(), script)
			r := h.status()
			if r.Healthy || len(r.Problems) == 0 {
				t.Errorf("status sees nothing: %+v", r)
			}
			if strings.Contains(script, "/var/lib") {
				must(t, h.Host(), h.binary, "restore") // the file is ours, and nobody knows that
			}
			h.attach()
			h.healthy()
			if now := programs(h); now != n {
				t.Errorf("%d programs are attached, were %d: %s", now, n, h.run("status"))
			}
			h.works()
			h.killBoth()
			sh(t, h.Host(), script)
			h.run("detach", "--linger", "0")
			if now := programs(h); now != 0 {
				t.Errorf("%d programs are attached after detach: %s", now, h.run("status"))
			}
		})
	}
}
