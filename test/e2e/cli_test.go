package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	yaml "go.yaml.in/yaml/v2"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// refusal is a command that must fail, with one line that says what is wrong, and leave no trace.
type refusal struct {
	name string
	// prepare makes the fault on the host and returns what ends it.
	prepare func(h *host) func()
	// before replaces the program's name, for example to run it as somebody else.
	before []string
	args   []string
	code   int
	// says are the thing, the cause and the remedy that the line must name.
	says []string
	// within is how long it may take; 0 is five seconds.
	within time.Duration
	// unseen leaves it to the caller to compare the host, once for many.
	unseen bool
	// base is what the host has to be like when the fault has ended. A case without it compares before and after the
	// command, within the fault; that is slower.
	base string
}

func (h *host) refuse(r refusal) {
	h.t.Helper()
	if r.base != "" {
		r.unseen = true
		defer h.unchangedBut(r.base)
	}
	if r.prepare != nil {
		undo := r.prepare(h)
		defer undo()
	}
	var before string
	if !r.unseen {
		before = h.snapshot()
	}
	out := command(h.t, h.Host(), append(slices.Clone(r.before), append([]string{h.binary}, r.args...)...)...)
	h.t.Log(out.stderr)
	if out.code != r.code {
		h.t.Errorf("want exit %d: %v", r.code, out)
	}
	if !strings.HasPrefix(out.stderr, "k2s-dnsbpf: ") || strings.Count(out.stderr, "\n") != 1 || !strings.HasSuffix(out.stderr, "\n") {
		h.t.Errorf("want one line: %v", out)
	}
	if out.stdout != "" {
		h.t.Errorf("want nothing on standard output: %v", out)
	}
	line := strings.TrimPrefix(out.stderr, "k2s-dnsbpf: ")
	for _, text := range r.says {
		if !strings.Contains(line, text) {
			h.t.Errorf("want %q in the line: %v", text, out)
		}
	}
	if r.within == 0 {
		r.within = patience
	}
	if out.took > r.within {
		h.t.Errorf("it took longer than %s: %v", r.within, out)
	}
	if !r.unseen {
		h.unchangedBut(before)
	}
}

func (h *host) refuseAll(list []refusal) {
	for _, r := range list {
		h.t.Run(r.name, func(t *testing.T) { h.in(t).refuse(r) })
	}
}

// attachArgs is an attach that would succeed, and more.
func attachArgs(more ...string) []string {
	return slices.Concat([]string{"attach"}, endpoints, ranges, more)
}

// busy occupies an address of the host.
func busy(network, address string) func(h *host) func() {
	return func(h *host) func() {
		h.t.Helper()
		var socket io.Closer
		if err := h.Host().Do(func() (err error) {
			if network == "tcp" {
				socket, err = net.Listen(network, address)
			} else {
				socket, err = net.ListenPacket(network, address)
			}
			return err
		}); err != nil {
			h.t.Fatal(err)
		}
		return func() { socket.Close() }
	}
}

func withFile(path, content string) func(h *host) func() {
	return func(h *host) func() {
		h.t.Helper()
		if err := h.Host().WriteFile(path, []byte(content), 0o644); err != nil {
			h.t.Fatal(err)
		}
		return func() { must(h.t, h.Host(), "rm", "-f", path) }
	}
}

// shell prepares by one shell command and ends by another.
func shell(do, undo string) func(h *host) func() {
	return func(h *host) func() {
		h.t.Helper()
		must(h.t, h.Host(), "sh", "-ec", do)
		return func() {
			h.t.Helper()
			must(h.t, h.Host(), "sh", "-ec", undo)
		}
	}
}

func TestWrongUsage(t *testing.T) {
	h := raise(t, lab.Options{NoServers: true})
	var list []refusal
	for _, test := range []struct {
		args []string
		says []string
	}{
		{[]string{"atach"}, []string{"atach", "--help"}},
		{[]string{"attach", "now"}, []string{"now", "--help"}},
		{[]string{"detach", "now"}, []string{"now", "--help"}},
		{[]string{"attach", "--nope"}, []string{"--nope", "--help"}},
		{[]string{"status", "-o", "xml"}, []string{"xml", "json"}},
		{attachArgs("--wait", "soon"), []string{"soon", "wait"}},
		{attachArgs("--wait", "-1s"), []string{"-1s", "wait"}},
		{[]string{"attach", "--dns-endpoint", "172.20.0"}, []string{"172.20.0", "dns-endpoint"}},
		{[]string{"attach", "--dns-endpoint", "172.20.0.10:99999"}, []string{"172.20.0.10:99999", "dns-endpoint"}},
		{[]string{"attach", "--dns-endpoint", "0.0.0.0"}, []string{"0.0.0.0"}},
		{[]string{"attach", "--dns-endpoint", "coredns"}, []string{"coredns", "dns-endpoint"}},
		{attachArgs("--upstream", "dns.example.com"), []string{"dns.example.com", "upstream"}},
		{attachArgs("--zone", "."), []string{"zone", "root"}},
		{attachArgs("--zone", "a..b"), []string{"a..b", "label"}},
		{attachArgs("--zone", strings.Repeat("a", 64)), []string{"zone", "63"}},
		{attachArgs("--service-cidr", "172.21.0.0"), []string{"172.21.0.0", "service-cidr"}},
		{attachArgs("--pod-cidr", "172.21.0.0/33"), []string{"172.21.0.0/33", "pod-cidr"}},
		{attachArgs("--kubeswitch-address", "here"), []string{"here", "kubeswitch-address"}},
		{attachArgs("--topology", "moon"), []string{"moon", "native-linux"}},
		{attachArgs("--resolver", "maybe"), []string{"maybe", "takeover"}},
		{attachArgs("--log-level", "loud"), []string{"loud", "debug"}},
		{attachArgs("--resolv-conf", "resolv.conf"), []string{"resolv.conf", "absolute"}},
		{attachArgs("--state-dir", ""), []string{"absolute"}},
	} {
		name := strings.TrimPrefix(strings.Join(test.args, " "), strings.Join(attachArgs(), " "))
		list = append(list, refusal{name: name, args: test.args, code: 2, says: test.says, unseen: true})
	}
	const file = "/run/k2s.yaml"
	for _, test := range []struct {
		name, content string
		says          []string
	}{
		{"unknown key", "zones: [cluster.local]\nzonez: [x]\n", []string{file, "line 2", "zonez"}},
		{"wrong type", "zones: [cluster.local]\nbpf: perhaps\n", []string{file, "line 2", "bpf"}},
		{"wrong endpoint", "dnsEndpoints:\n  - 172.20.0\n", []string{file, "line 2", "172.20.0", "dnsEndpoints"}},
		{"wrong time", "wait: soon\n", []string{file, "line 1", "soon", "wait"}},
		{"wrong topology", "zones: [cluster.local]\ntopology: moon\n", []string{file, "line 2", "moon", "topology"}},
		{"wrong zone", "zones:\n  - a..b\n", []string{file, "line 1", "a..b", "zones"}},
		{"no YAML", "zones: [\n", []string{file, "line"}},
		{"key twice", "wait: 3s\nwait: 4s\n", []string{file, "line 2", "wait"}},
	} {
		list = append(list, refusal{
			name: "config file with " + test.name, prepare: withFile(file, test.content),
			args: []string{"attach", "--config", file}, code: 2, says: test.says, unseen: true,
		})
	}
	list = append(list, refusal{
		name: "config file missing", args: []string{"attach", "--config", "/run/none.yaml"}, code: 1,
		says: []string{"/run/none.yaml", "no such file"}, unseen: true,
	})
	before := h.snapshot()
	h.refuseAll(list)
	h.unchangedBut(before)
}

// TestRefusedAttach: everything that can be wrong with the host or the cluster.
func TestRefusedAttach(t *testing.T) {
	h := raise(t, lab.Options{})
	nobody := []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}
	const kubeconfig = "/run/kubeconfig"
	const unreachable = `apiVersion: v1
kind: Config
current-context: k2s
clusters: [{name: k2s, cluster: {server: "https://127.0.0.1:1"}}]
contexts: [{name: k2s, context: {cluster: k2s, user: admin}}]
users: [{name: admin, user: {token: x}}]
`
	stopped := func(h *host) func() {
		for _, s := range h.cluster() {
			if err := s.Stop(h.t.Context()); err != nil {
				h.t.Fatal(err)
			}
		}
		return func() {
			for _, s := range h.cluster() {
				if err := s.Start(h.t.Context()); err != nil {
					h.t.Fatal(err)
				}
			}
		}
	}
	list := []refusal{
		{name: "UDP port busy", prepare: busy("udp4", "127.0.0.1:53"), args: attachArgs(), code: 1, says: []string{"127.0.0.1:53", "taken", "keep it off loopback"}},
		{name: "TCP port busy", prepare: busy("tcp", "127.0.0.1:53"), args: attachArgs(), code: 1, says: []string{"127.0.0.1:53", "taken", "keep it off loopback"}},
		{name: "UDP port busy on all addresses", prepare: busy("udp4", "0.0.0.0:53"), args: attachArgs(), code: 1, says: []string{"127.0.0.1:53", "taken", "keep it off loopback"}},
		{name: "UDP port busy on ::1", prepare: busy("udp6", "[::1]:53"), args: attachArgs(), code: 1, says: []string{"[::1]:53", "taken", "keep it off loopback"}},

		{name: "no cluster", args: []string{"attach"}, code: 1, says: []string{"no Kubernetes cluster found", "/etc/kubernetes/admin.conf", "--kubeconfig", "--dns-endpoint"}},
		{name: "kubeconfig missing", args: []string{"attach", "--kubeconfig", "/run/none"}, code: 1, says: []string{"/run/none", "no such file", "name"}},
		{name: "kubeconfig malformed", prepare: withFile(kubeconfig, "clusters: [\n"), args: []string{"attach", "--kubeconfig", kubeconfig}, code: 1, says: []string{kubeconfig, "repair"}},
		{name: "kubeconfig empty", prepare: withFile(kubeconfig, ""), args: []string{"attach", "--kubeconfig", kubeconfig}, code: 1, says: []string{kubeconfig, "names no cluster"}},
		{name: "apiserver unreachable", prepare: withFile(kubeconfig, unreachable), args: []string{"attach", "--kubeconfig", kubeconfig, "--wait", "2s"}, code: 1, says: []string{"apiserver", "connection refused", "--dns-endpoint"}},

		{name: "CoreDNS down", prepare: stopped, args: attachArgs("--wait", "3s"), code: 1, says: []string{"self-test", "cluster.local", "3s", "CoreDNS"}},
		{name: "CoreDNS down, no-bpf", prepare: stopped, args: attachArgs("--wait", "3s", "--no-bpf"), code: 1, says: []string{"self-test", "cluster.local", "3s", "CoreDNS"}},
		{name: "endpoint far away", args: []string{"attach", "--dns-endpoint", "198.51.100.77", "--wait", "2s"}, code: 1, says: []string{"self-test", "2s"}},

		{name: "bpffs missing", prepare: shell("umount /sys/fs/bpf", "mount -t bpf -o mode=700 bpf /sys/fs/bpf"), args: attachArgs(), code: 1, says: []string{"/sys/fs/bpf", "mount -t bpf", "--no-bpf"}},
		{name: "bpffs elsewhere", args: attachArgs("--bpffs", "/run/pins"), code: 1, says: []string{"/run/pins", "bpf"}},

		{name: "resolv.conf read-only", prepare: shell("mount -o remount,ro /etc", "mount -o remount,rw /etc"), args: attachArgs(), code: 1, says: []string{"/etc", "read-only", "remount"}},
		{name: "resolv.conf immutable", prepare: shell("chattr +i /etc/resolv.conf", "chattr -i /etc/resolv.conf"), args: attachArgs(), code: 1, says: []string{"/etc/resolv.conf", "immutable", "chattr -i"}},
		{name: "resolv.conf append-only", prepare: shell("chattr +a /etc/resolv.conf", "chattr -a /etc/resolv.conf"), args: attachArgs(), code: 1, says: []string{"/etc/resolv.conf", "append-only", "chattr -a"}},
		{name: "etc immutable", prepare: shell("chattr +i /etc", "chattr -i /etc"), args: attachArgs(), code: 1, says: []string{"/etc", "immutable", "chattr -i"}},
		{name: "resolv.conf missing", prepare: shell("mv /etc/resolv.conf /etc/saved", "mv /etc/saved /etc/resolv.conf"), args: attachArgs(), code: 1, says: []string{"/etc/resolv.conf", "no usable upstream", "--upstream"}},
		{name: "resolv.conf dangling", prepare: shell("mv /etc/resolv.conf /etc/saved; ln -s /run/gone /etc/resolv.conf", "rm /etc/resolv.conf; mv /etc/saved /etc/resolv.conf"), args: attachArgs(), code: 1, says: []string{"/etc/resolv.conf", "/run/gone"}},
		{name: "resolv.conf bind-mounted", prepare: shell("cp /etc/resolv.conf /run/resolv; mount --bind /run/resolv /etc/resolv.conf", "umount /etc/resolv.conf; rm /run/resolv"), args: attachArgs(), code: 1, says: []string{"/etc/resolv.conf", "bind mount", "unmount"}},
		{name: "resolv.conf a directory", prepare: shell("mv /etc/resolv.conf /etc/saved; mkdir /etc/resolv.conf", "rmdir /etc/resolv.conf; mv /etc/saved /etc/resolv.conf"), args: attachArgs(), code: 1, says: []string{"/etc/resolv.conf", "neither a file nor a symbolic link"}},
		{name: "resolv.conf without a server", prepare: shell("mv /etc/resolv.conf /etc/saved; echo 'search example.com' >/etc/resolv.conf", "mv /etc/saved /etc/resolv.conf"), args: attachArgs(), code: 1, says: []string{"/etc/resolv.conf", "no usable upstream", "--upstream"}},
		{name: "resolv.conf that names ourselves", prepare: shell("mv /etc/resolv.conf /etc/saved; echo 'nameserver 127.0.0.1' >/etc/resolv.conf", "mv /etc/saved /etc/resolv.conf"), args: attachArgs(), code: 1, says: []string{"/etc/resolv.conf", "127.0.0.1", "--upstream"}},
	}
	for _, verb := range []string{"attach", "detach", "restore"} {
		args := []string{verb}
		if verb == "attach" {
			args = attachArgs()
		}
		list = append(list, refusal{name: verb + " without privilege", before: nobody, args: args, code: 1, says: []string{verb, "root", "sudo k2s-dnsbpf " + verb}})
	}
	must(t, h.Host(), "mkdir", "-p", "/run/mount") // umount makes it, and leaves it
	base := h.snapshot()
	for i := range list {
		if !strings.Contains(list[i].name, "resolv.conf") {
			list[i].base = base
		}
	}
	h.refuseAll(list)

	t.Run("and then it works", func(t *testing.T) {
		h := h.in(t)
		before := h.snapshot()
		h.attach()
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		h.detach()
		h.unchanged(before)
	})
}

// TestRepeated: commands that were done already say so and succeed.
func TestRepeated(t *testing.T) {
	h := raise(t, lab.Options{})
	original := h.snapshot()
	same := func(what string, r result, says string) {
		t.Helper()
		if r.code != 0 || r.stderr != "" && what != "detach" || !strings.Contains(r.stdout, says) || strings.Count(r.stdout, "\n") != 1+strings.Count(r.stdout, ": restored: ") {
			t.Errorf("%s: want exit 0 and one line with %q besides the file: %v", what, says, r)
		}
	}
	same("detach", h.run("detach"), "not attached")
	same("restore", h.run("restore"), "nothing to do")
	h.unchangedBut(original)

	same("attach", h.run(attachArgs()...), "attached: 3 zones to 2 endpoints, all other names to 2 upstreams")
	pid, attached := h.healthy().PID, h.snapshot()
	same("second attach", h.run(attachArgs()...), "already attached")
	if now := h.healthy().PID; now != pid {
		t.Errorf("the second attach replaced the daemon %d by %d", pid, now)
	}
	// It may add to the log that it was refused.
	for line := range strings.Lines(lab.Diff(attached, h.snapshot())) {
		if !strings.Contains(line, " /run/k2s-dnsbpf/daemon.log ") {
			t.Errorf("the second attach changed the host: %s", line)
		}
	}
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)

	same("detach", h.run("detach", "--linger", "0"), "detached")
	h.unchanged(original)
	same("second detach", h.run("detach"), "not attached")
	h.unchanged(original)

	// And once more from the start: nothing of the first time is in the way.
	h.attach()
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	h.detach()
	h.unchanged(original)
}

func TestDryRun(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	r := h.run(attachArgs("--dry-run")...)
	for _, want := range []string{
		"127.0.0.1:53", lab.KubeSwitch4 + ":53", "route_localnet", "accept_local", "/sys/fs/bpf/k2s-dnsbpf", "dns_from_host", "lo",
		"zone cluster.local", "zone 21.172.in-addr.arpa", lab.CoreDNS0v4, lab.CoreDNS1v4, "cni0", lab.External0, lab.External1,
		"take over /etc/resolv.conf", "kubelet-resolv.conf",
	} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("the plan lacks %q: %v", want, r)
		}
	}
	if r.code != 0 || r.stderr != "" {
		t.Errorf("want exit 0 and nothing on standard error: %v", r)
	}
	h.unchangedBut(before)

	r = h.run("detach", "--dry-run")
	if r.code != 0 || !strings.Contains(r.stdout, "not attached") {
		t.Errorf("the plan of a detach without attach: %v", r)
	}
	h.unchangedBut(before)

	h.attach()
	attached := h.snapshot()
	r = h.run("detach", "--dry-run")
	for _, want := range []string{"restore /etc/resolv.conf", "end the daemon", "/sys/fs/bpf/k2s-dnsbpf", "route_localnet"} {
		if r.code != 0 || !strings.Contains(r.stdout, want) {
			t.Errorf("the plan of a detach lacks %q: %v", want, r)
		}
	}
	if r = h.run(attachArgs("--dry-run")...); r.code != 0 || !strings.Contains(r.stdout, "already attached") {
		t.Errorf("the plan of a second attach: %v", r)
	}
	if d := lab.Diff(attached, h.snapshot()); d != "" {
		t.Errorf("dry runs changed the attached host:\n%s", d)
	}

	// A dry run fails where the attach would.
	h.detach()
	h.refuse(refusal{args: []string{"attach", "--dry-run", "--kubeconfig", "/run/none"}, code: 1, says: []string{"/run/none"}})
}

func TestStatus(t *testing.T) {
	h := raise(t, lab.Options{})
	nobody := []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}
	before := h.snapshot()
	for _, format := range []string{"table", "json", "yaml"} {
		if r := h.run("status", "-o", format); r.code != 3 || r.stderr != "" {
			t.Errorf("not attached: want exit 3 and nothing on standard error: %v", r)
		} else {
			h.contract(format, r.stdout)
		}
	}
	if r := command(t, h.Host(), append(nobody, h.binary, "status")...); r.code != 3 || !strings.Contains(r.stdout, "not attached") {
		t.Errorf("status as nobody, not attached: %v", r)
	}
	h.unchangedBut(before)

	h.attach()
	attached := h.snapshot()
	for _, as := range [][]string{nil, nobody} {
		for _, format := range []string{"table", "json", "yaml"} {
			r := command(t, h.Host(), append(slices.Clone(as), h.binary, "status", "-o", format)...)
			if r.code != 0 || r.stderr != "" {
				t.Errorf("attached: want exit 0 and nothing on standard error: %v", r)
				continue
			}
			h.contract(format, r.stdout)
		}
	}
	table := h.run("status").stdout
	for _, want := range []string{
		`(?m)^STATE +attached, healthy`, `(?m)^RESOLVER +/etc/resolv\.conf is ours`, `(?m)^UPSTREAMS +192\.0\.2\.53`,
		`(?m)^ZONES +cluster\.local`, `(?m)^172\.20\.0\.10:53 +cni0 +yes`, `(?m)^dns_from_host +tcx/egress +lo +\d+`, `(?m)^host +\d+`,
	} {
		if !regexp.MustCompile(want).MatchString(table) {
			t.Errorf("the table lacks %q:\n%s", want, table)
		}
	}
	if d := lab.Diff(attached, h.snapshot()); d != "" {
		t.Errorf("status changed the host:\n%s", d)
	}

	// The report is of the host, so a file that is no longer ours is a fault of it.
	eventually(t, "status tells that somebody has replaced resolv.conf, before it is taken over again", func() error {
		must(t, h.Host(), "sh", "-ec", "echo nameserver 192.0.2.53 >/etc/resolv.conf.new; mv /etc/resolv.conf.new /etc/resolv.conf")
		if r := h.run("status"); r.code != 3 || !strings.Contains(r.stdout, "NOT healthy") {
			return fmt.Errorf("want exit 3: %v", r)
		}
		return nil
	})

	h.kill()
	if r := h.run("status"); r.code != 3 || !strings.Contains(r.stdout, "dead") {
		t.Errorf("the daemon is dead: want exit 3: %v", r)
	}
	if r := command(t, h.Host(), append(nobody, h.binary, "status")...); r.code != 3 || r.stderr != "" || !strings.Contains(r.stdout, "dead") {
		t.Errorf("status as nobody, the daemon is dead: want exit 3 and a report: %v", r)
	}
}

// contract checks the names that scripts rely on.
func (h *host) contract(format, out string) {
	h.t.Helper()
	var doc map[string]any
	switch format {
	case "json":
		if err := json.Unmarshal([]byte(out), &doc); err != nil {
			h.t.Errorf("%v: %s", err, out)
			return
		}
	case "yaml":
		var raw yaml.MapSlice
		if err := yaml.Unmarshal([]byte(out), &raw); err != nil {
			h.t.Errorf("%v: %s", err, out)
			return
		}
		doc = stringKeys(raw).(map[string]any)
	default:
		if !strings.HasPrefix(out, "STATE ") {
			h.t.Errorf("no table: %s", out)
		}
		return
	}
	attached, _ := doc["attached"].(bool)
	keys := []string{
		"attached", "resolver.state", "resolver.file", "resolver.owner", "resolver.upstreams", "resolver.search",
		"datapath.programs", "zones", "endpoints", "forwarder.listen", "forwarder.queries", "forwarder.failures", "counters",
	}
	if attached {
		keys = append(keys, "topology", "since", "datapath.pinned", "datapath.programs.name", "datapath.programs.attach",
			"datapath.programs.interface", "datapath.programs.kernel_id", "zones.name", "zones.group", "endpoints.address",
			"endpoints.interface", "endpoints.healthy", "endpoints.source", "counters.host.steered", "counters.host.answered",
			"counters.host.passed", "counters.host.refused", "counters.kubeswitch.steered")
	}
	for _, key := range keys {
		if value, ok := at(doc, strings.Split(key, ".")); !ok || value == nil {
			h.t.Errorf("status -o %s, attached=%v, lacks %s: %s", format, attached, key, out)
		}
	}
	if since, ok := doc["since"].(string); attached && format == "json" {
		if _, err := time.Parse(time.RFC3339, since); !ok || err != nil {
			h.t.Errorf("since: %v", err)
		}
	}
}

// at finds a value by its keys; in a list, in the first element.
func at(value any, keys []string) (any, bool) {
	for _, key := range keys {
		if list, ok := value.([]any); ok {
			if len(list) == 0 {
				return nil, false
			}
			value = list[0]
		}
		object, ok := value.(map[string]any)
		if !ok {
			return nil, false
		}
		if value, ok = object[key]; !ok {
			return nil, false
		}
	}
	return value, true
}

// stringKeys makes of YAML what encoding/json would.
func stringKeys(value any) any {
	switch v := value.(type) {
	case yaml.MapSlice:
		object := make(map[string]any)
		for _, item := range v {
			key, _ := item.Key.(string)
			object[key] = stringKeys(item.Value)
		}
		return object
	case []any:
		for i := range v {
			v[i] = stringKeys(v[i])
		}
		return v
	}
	return value
}

func TestCompletionAndVersion(t *testing.T) {
	h := raise(t, lab.Options{NoServers: true})
	script := h.run("completion", "bash")
	if script.code != 0 || !strings.Contains(script.stdout, "k2s-dnsbpf") {
		t.Fatal(script)
	}
	if err := h.Host().WriteFile("/run/completion", []byte(script.stdout), 0o644); err != nil {
		t.Fatal(err)
	}
	must(t, h.Host(), "bash", "-n", "/run/completion")
	for _, test := range []struct {
		args []string
		want []string
	}{
		{[]string{"__complete", ""}, []string{"attach", "detach", "restore", "status", "version"}},
		{[]string{"__complete", "attach", "--"}, []string{"--dns-endpoint", "--dry-run", "--kubeconfig"}},
		{[]string{"__complete", "status", "-o", ""}, []string{"table", "json", "yaml"}},
		{[]string{"__complete", "attach", "--resolver", ""}, []string{"takeover", "transparent", "none"}},
	} {
		r := h.run(test.args...)
		var words []string
		for line := range strings.Lines(r.stdout) {
			words = append(words, strings.Fields(line + " .")[0])
		}
		for _, want := range test.want {
			if !slices.Contains(words, want) {
				t.Errorf("no %q among the completions of %q: %v", want, test.args, r)
			}
		}
	}
	if r := h.run("version"); r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, "k2s-dnsbpf") {
		t.Error(r)
	}
	if r := h.run("--help"); r.code != 0 || !strings.Contains(r.stdout, "attach") {
		t.Error(r)
	}
	if os.Getenv("K2S_LAB_REQUIRED") != "" {
		for _, verb := range []string{"attach", "detach", "restore", "status", "version"} {
			if r := h.run(verb, "--help"); r.code != 0 || r.stderr != "" {
				t.Error(r)
			}
		}
	}
}

// TestNothingReachesTheTerminal: names that others gave, and arguments, are escaped wherever they are printed or logged.
func TestNothingReachesTheTerminal(t *testing.T) {
	const evil = "\x1b]0;owned\a\x1b[2J\u009b31m\u202e"
	h := raise(t, lab.Options{})
	must(t, h.Host(), "sh", "-c", "printf 'search "+evil+".example\noptions x"+evil+"\nnameserver 192.0.2.54"+evil+"\n' >>/etc/resolv.conf")
	clean := func(args ...string) {
		t.Helper()
		r := h.run(args...)
		for _, bad := range []string{"\x1b", "\a", "\u009b", "\u202e"} {
			if strings.Contains(r.stdout+r.stderr, bad) {
				t.Errorf("%q in the output of %q: %q %q", bad, args, r.stdout, r.stderr)
			}
		}
	}
	clean("attach", "--kubeconfig", "/"+evil)
	clean("attach", "--zone", evil)
	clean("attach", "--dns-endpoint", evil)
	clean("--" + evil)
	clean(evil)
	clean(append(attachArgs(), "--dry-run")...)
	clean("status")
	h.attach()
	for _, command := range [][]string{{"status"}, {"doctor"}, {"check", lab.Backend}, {"check", "x" + evil}, {"check", evil + ":80"}} {
		for _, format := range []string{"table", "json", "yaml", evil} {
			clean(append(command, "-o", format)...)
		}
	}
	log, err := h.Host().ReadFile("/run/k2s-dnsbpf/daemon.log")
	if err != nil || strings.ContainsAny(string(log), "\x1b\a\u009b\u202e") {
		t.Errorf("%v: %q", err, log)
	}
	clean("detach")
}
