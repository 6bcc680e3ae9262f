package config

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

func TestParseServer(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.1": "10.0.0.1:53", "10.0.0.1:5353": "10.0.0.1:5353", "10.0.0.1:0": "10.0.0.1:0",
		"2001:db8::1": "[2001:db8::1]:53", "[2001:db8::1]": "[2001:db8::1]:53", "[2001:db8::1]:5353": "[2001:db8::1]:5353",
		"fe80::1%eth0": "[fe80::1%eth0]:53", "[fe80::1%eth0]:54": "[fe80::1%eth0]:54",
		"::ffff:10.0.0.1": "10.0.0.1:53", "[::ffff:10.0.0.1]:54": "10.0.0.1:54", "::1": "[::1]:53",
	} {
		if got, err := ParseServer(text); err != nil || got.String() != want {
			t.Errorf("ParseServer(%q) = %s, %v; want %s", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", "dns.example.com", "10.0.0", "10.0.0.256", "10.0.0.1:", "10.0.0.1:dns", "10.0.0.1:65536", "10.0.0.1:-1", "10.0.0.1/24",
		"2001:db8::1]:53", "[2001:db8::1", "[10.0.0.1]", " 10.0.0.1", "010.0.0.1", "[[::1]]", "::1]",
	} {
		got, err := ParseServer(text)
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("ParseServer(%q) = %s, %v; want ErrInvalid", text, got, err)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("ParseServer(%q): error of several lines: %v", text, err)
		}
	}
}

func TestValidate(t *testing.T) {
	valid := map[string]func(*Config){
		"the defaults":         func(*Config) {},
		"yield":                func(c *Config) { c.OnForeignChange = ChangeYield },
		"no resolver":          func(c *Config) { c.Resolver = ResolverNone },
		"no zone":              func(c *Config) { c.Zones = nil },
		"another Service":      func(c *Config) { c.DNSService = "kube-system/rke2-coredns-rke2-coredns" },
		"transparent":          func(c *Config) { c.Resolver = ResolverTransparent },
		"final dot":            func(c *Config) { c.Zones = []string{"cluster.local."} },
		"reverse zones":        func(c *Config) { c.Zones = []string{"21.172.in-addr.arpa", "0.d.f.ip6.arpa"} },
		"underscore":           func(c *Config) { c.Zones = []string{"_x.local"} },
		"label of 63":          func(c *Config) { c.Zones = []string{strings.Repeat("x", 63)} },
		"name of 253":          func(c *Config) { c.Zones = []string{strings.Repeat("x.", 126) + "x"} },
		"server with a zone":   func(c *Config) { c.Upstreams = servers("[fe80::1%eth0]:53") },
		"node-local DNS":       func(c *Config) { c.ClusterDNS = []netip.Addr{netip.MustParseAddr("169.254.20.10")} },
		"server with any port": func(c *Config) { c.Upstreams = servers("192.0.2.1:65535", "[::1]:1") },
	}
	for name, change := range valid {
		c := Default()
		change(&c)
		if err := c.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	invalid := map[string]struct {
		change func(*Config)
		names  string // what the error must name
	}{
		"topology":           {func(c *Config) { c.Topology = "windows" }, `"windows"`},
		"no topology":        {func(c *Config) { c.Topology = "" }, "topology"},
		"resolver":           {func(c *Config) { c.Resolver = "systemd" }, `resolver "systemd"`},
		"preference":         {func(c *Config) { c.EndpointPreference = "near" }, `"near"`},
		"Service alone":      {func(c *Config) { c.DNSService = "kube-dns" }, "NAMESPACE/NAME"},
		"Service without":    {func(c *Config) { c.DNSService = "kube-system/" }, "NAMESPACE/NAME"},
		"Service of three":   {func(c *Config) { c.DNSService = "a/b/c" }, "NAMESPACE/NAME"},
		"transparent in Go":  {func(c *Config) { c.Resolver, c.BPF = ResolverTransparent, false }, "--no-bpf"},
		"change policy":      {func(c *Config) { c.OnForeignChange = "fight" }, `"fight"`},
		"root zone":          {func(c *Config) { c.Zones = []string{"."} }, "root"},
		"empty zone":         {func(c *Config) { c.Zones = []string{DefaultZone, ""} }, "root"},
		"empty label":        {func(c *Config) { c.Zones = []string{"a..b"} }, `"a..b"`},
		"two final dots":     {func(c *Config) { c.Zones = []string{"a.."} }, `"a.."`},
		"label of 64":        {func(c *Config) { c.Zones = []string{strings.Repeat("x", 64)} }, "label"},
		"name of 254":        {func(c *Config) { c.Zones = []string{strings.Repeat("x.", 126) + "xx"} }, "253"},
		"zone with a space":  {func(c *Config) { c.Zones = []string{"a b"} }, `"a b"`},
		"zone with an ü":     {func(c *Config) { c.Zones = []string{"\u00fc.de"} }, "ASCII"},
		"zone with escapes":  {func(c *Config) { c.Zones = []string{`a\.b`} }, "escapes"},
		"unspecified server": {func(c *Config) { c.Upstreams = servers("0.0.0.0:53") }, "0.0.0.0:53"},
		"unspecified IPv6":   {func(c *Config) { c.Upstreams = servers("[::]:53") }, "[::]:53"},
		"multicast endpoint": {func(c *Config) { c.DNSEndpoints = servers("224.0.0.251:5353") }, "224.0.0.251"},
		"port 0":             {func(c *Config) { c.DNSEndpoints = servers("10.0.0.1:0") }, "10.0.0.1:0"},
		"no zone":            {func(c *Config) { c.DNSEndpoints = servers("[fe80::1]:53") }, "fe80::1%eth0"},
		"link-local switch":  {func(c *Config) { c.KubeSwitchAddress = netip.MustParseAddr("fe80::1") }, "kubeswitchAddress fe80::1: "},
		"zoned switch":       {func(c *Config) { c.KubeSwitchAddress = netip.MustParseAddr("fe80::1%eth0") }, "link-local"},
		"loopback switch":    {func(c *Config) { c.KubeSwitchAddress = netip.MustParseAddr("127.0.0.1") }, "other hosts"},
		"zoned cluster DNS":  {func(c *Config) { c.ClusterDNS = []netip.Addr{netip.MustParseAddr("fe80::a%cni0")} }, "clusterDNS"},
		"multicast DNS":      {func(c *Config) { c.ClusterDNS = []netip.Addr{netip.MustParseAddr("ff02::fb")} }, "clusterDNS ff02::fb"},
		"no wait":            {func(c *Config) { c.Wait = 0 }, "wait"},
		"negative wait":      {func(c *Config) { c.Wait = -time.Second }, "-1s"},
		"negative linger":    {func(c *Config) { c.Linger = -time.Second }, "linger -1s"},
		"linger for ever":    {func(c *Config) { c.Linger = 61 * time.Minute }, "1h0m0s"},
		"relative resolv":    {func(c *Config) { c.ResolvConf = "resolv.conf" }, "resolvConf"},
		"relative state":     {func(c *Config) { c.StateDir = "./state" }, "stateDir"},
		"relative run":       {func(c *Config) { c.RunDir = "" }, "runDir"},
		"relative bpffs":     {func(c *Config) { c.BPFFS = "sys/fs/bpf" }, "bpffs"},
	}
	for name, test := range invalid {
		c := Default()
		test.change(&c)
		err := c.Validate()
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), test.names) {
			t.Errorf("%s: %v; want ErrInvalid that names %s", name, err, test.names)
		}
	}
}

func servers(texts ...string) (servers []netip.AddrPort) {
	for _, text := range texts {
		servers = append(servers, netip.MustParseAddrPort(text))
	}
	return servers
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

var compareAddresses = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func TestLoad(t *testing.T) {
	for name, test := range map[string]struct {
		text   string
		change func(*Config)
	}{
		"empty":         {"", func(*Config) {}},
		"comments only": {"# nothing\n", func(*Config) {}},
		"one key":       {"zones: [k2s.test]\n", func(c *Config) { c.Zones = []string{"k2s.test"} }},
		"false":         {"bpf: false\n", func(c *Config) { c.BPF = false }},
		"leave":         {"inPlace: true\noverrideImmutable: true\n", func(c *Config) { c.InPlace, c.OverrideImmutable = true, true }},
		"empty list":    {"upstreams: []\n", func(c *Config) { c.Upstreams = []netip.AddrPort{} }},
		"all keys": {`
topology: native-linux
kubeconfig: /etc/kubernetes/admin.conf
dnsService: dns/coredns
corefileConfigMap: corefile
stubZones: true
endpointPreference: node
nodeName: n1
dnsEndpoints: [10.0.0.1, "10.0.0.2:5353"]
zones:
  - cluster.local
  - 21.172.in-addr.arpa
serviceCIDRs: [172.21.0.0/16]
podCIDRs: ["fd00:20::/64"]
kubeswitchAddress: "::ffff:172.19.1.2"
upstreams: ["[2001:db8::1]:54"]
resolver: none
onForeignChange: yield
bpf: true
cache: no
cacheEntries: 100
cacheOff: [x.cluster.local]
wait: 1m30s
linger: 0s
resolvConf: /run/resolv.conf
stateDir: /run/state
runDir: /run/run
bpffs: /run/bpf
logLevel: debug
`, func(c *Config) {
			*c = Config{
				Topology: TopologyNativeLinux, Kubeconfig: "/etc/kubernetes/admin.conf",
				DNSService: "dns/coredns", CorefileConfigMap: "corefile", StubZones: true,
				EndpointPreference: PreferNode, NodeName: "n1",
				DNSEndpoints: servers("10.0.0.1:53", "10.0.0.2:5353"), Zones: []string{DefaultZone, "21.172.in-addr.arpa"},
				ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("172.21.0.0/16")},
				PodCIDRs:     []netip.Prefix{netip.MustParsePrefix("fd00:20::/64")}, KubeSwitchAddress: netip.MustParseAddr("172.19.1.2"),
				Upstreams: servers("[2001:db8::1]:54"), Resolver: ResolverNone, OnForeignChange: ChangeYield, BPF: true, CacheEntries: 100, CacheOff: []string{"x.cluster.local"}, Wait: 90 * time.Second,
				ResolvConf: "/run/resolv.conf", StateDir: "/run/state", RunDir: "/run/run", BPFFS: "/run/bpf", LogLevel: "debug",
			}
		}},
		"no KubeSwitch": {"kubeswitchAddress: none\n", func(c *Config) { c.NoKubeSwitch = true }},
	} {
		t.Run(name, func(t *testing.T) {
			want := Default()
			test.change(&want)
			got, err := Load(context.Background(), writeFile(t, test.text), true)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got, compareAddresses, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
				cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
		})
	}
}

// An error tells where to look: the file, the line and the key.
func TestLoadErrors(t *testing.T) {
	for name, test := range map[string]struct {
		text  string
		names []string
	}{
		"unknown key":        {"zones: [a]\nzonez: [b]\n", []string{"line 2", "zonez"}},
		"no YAML":            {"zones: [a\n", []string{"line"}},
		"list for a text":    {"bpf: true\nlogLevel: [a]\n", []string{"line 2"}},
		"text for a switch":  {"bpf: perhaps\n", []string{"line 1", "perhaps"}},
		"bad server":         {"# first\nupstreams:\n  - 10.0.0.1\n  - 10.0.0.x\n", []string{"upstreams", "line 4", "10.0.0.x"}},
		"bad endpoint":       {"dnsEndpoints: [coredns]\n", []string{"line 1", "coredns"}},
		"bad range":          {"podCIDRs: [172.20.0.0]\n", []string{"line 1", "172.20.0.0"}},
		"bad address":        {"kubeswitchAddress: 172.19.1\n", []string{"line 1", "172.19.1"}},
		"bad time":           {"\n\nwait: soon\n", []string{"line 3", "soon"}},
		"value out of range": {"resolver: systemd\n", []string{"resolver", "systemd"}},
		"root zone":          {"zones: [\".\"]\n", []string{"zone", "root"}},
		"key given twice":    {"bpf: true\nbpf: false\n", []string{"line 2", "bpf"}},
	} {
		t.Run(name, func(t *testing.T) {
			path := writeFile(t, test.text)
			_, err := Load(context.Background(), path, true)
			if err == nil {
				t.Fatal("no error")
			}
			for _, part := range append(test.names, path) {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error does not name %q: %v", part, err)
				}
			}
			if strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "fileConfig") {
				t.Errorf("error is not for a user: %q", err)
			}
		})
	}
}

// YAML names no key where a value is wrong.
func TestLoadErrorsNameKey(t *testing.T) {
	for _, key := range []string{
		"upstreams", "dnsEndpoints", "podCIDRs", "serviceCIDRs", "kubeswitchAddress", "wait", "linger", "bpf", "logLevel", "zones",
	} {
		text := "topology: native-linux\n" + key + ":\n  -\n    - {}\nrunDir: /run\n"
		if _, err := Load(context.Background(), writeFile(t, text), true); err == nil || !strings.Contains(err.Error(), "key "+key+": ") {
			t.Errorf("error does not name the key %s: %v", key, err)
		}
	}
}

func TestLoadMissingFile(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none.yaml")
	got, err := Load(context.Background(), missing, false)
	if err != nil {
		t.Errorf("an optional file is missing: %v", err)
	}
	if diff := cmp.Diff(Default(), got, compareAddresses); diff != "" {
		t.Errorf("settings without a file (-want +got):\n%s", diff)
	}
	if _, err := Load(context.Background(), missing, true); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), missing) {
		t.Errorf("a required file is missing: %v", err)
	}
	for _, path := range []string{t.TempDir(), "/dev/zero"} {
		if _, err := Load(context.Background(), path, false); !errors.Is(err, safefile.ErrNotRegular) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := Load(context.Background(), writeFile(t, strings.Repeat("#", maxFile+1)), false); !errors.Is(err, safefile.ErrTooLarge) {
		t.Errorf("a large file: %v", err)
	}
}
