package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

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
				{h.detachLink("dns_guard"), "on xdp of kubeswitch"},
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
