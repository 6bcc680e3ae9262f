// Package config holds the settings of k2s-dnsbpf: their defaults, the file they can be read from, and their rules. It
// is a leaf: it imports no other package of this module.
package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Defaults of what the command line can change.
const (
	DefaultFile       = "/etc/k2s-dnsbpf/config.yaml"
	DefaultResolvConf = "/etc/resolv.conf"
	DefaultStateDir   = "/var/lib/k2s-dnsbpf"
	DefaultRunDir     = "/run/k2s-dnsbpf"
	DefaultBPFFS      = "/sys/fs/bpf/k2s-dnsbpf"
	DefaultZone       = "cluster.local"
	DefaultWait       = 30 * time.Second
	DefaultLinger     = 10 * time.Second
	DefaultLogLevel   = "info"

	// DNSPort is the port of every listener, and of an endpoint or upstream without one (RFC 1035 section 4.2).
	DNSPort = 53
)

// maxLinger is more than any resolver keeps what it has read, and occupies port 53 for long enough.
const maxLinger = time.Hour

// DefaultKubeSwitchAddress is the host's address on K2s's KubeSwitch. It is listened on if an interface has it.
var DefaultKubeSwitchAddress = netip.AddrFrom4([4]byte{172, 19, 1, 1})

// ErrInvalid is wrapped by every error about a setting's value.
var ErrInvalid = errors.New("invalid setting")

// Topology says which kind of host this is.
type Topology string

// TopologyNativeLinux is a Linux host that runs programs and, perhaps, workers behind its KubeSwitch.
const TopologyNativeLinux Topology = "native-linux"

// ResolverMode says what is done with the host's resolver configuration.
type ResolverMode string

// The resolver modes.
const (
	ResolverTakeover    ResolverMode = "takeover"    // a file of ours is in place while attached
	ResolverTransparent ResolverMode = "transparent" // nothing is touched, and queries to the host's own resolver are steered
	ResolverNone        ResolverMode = "none"        // nothing is touched
)

// EndpointPreference says which of the ready endpoints are asked.
type EndpointPreference string

// The preferences. Each means all of them if there is none that it prefers.
const (
	PreferAll  EndpointPreference = "all"
	PreferNode EndpointPreference = "node" // those on this node
	PreferZone EndpointPreference = "zone" // those for this node's topology zone
)

// ChangePolicy says what is done when somebody else rewrites a resolver configuration that is taken over.
type ChangePolicy string

// The change policies.
const (
	ChangeRetake ChangePolicy = "retake" // theirs becomes the original, and is taken over again
	ChangeYield  ChangePolicy = "yield"  // theirs stays in place
)

// Config is a complete set of settings. The field tags are the keys of the file.
type Config struct {
	Topology           Topology           `yaml:"topology" json:"topology"`
	Kubeconfig         string             `yaml:"kubeconfig" json:"kubeconfig,omitempty"`
	DNSEndpoints       []netip.AddrPort   `yaml:"dnsEndpoints" json:"dnsEndpoints,omitempty"`
	DNSService         string             `yaml:"dnsService" json:"dnsService,omitempty"`
	CorefileConfigMap  string             `yaml:"corefileConfigMap" json:"corefileConfigMap,omitempty"`
	StubZones          bool               `yaml:"stubZones" json:"stubZones"`
	EndpointPreference EndpointPreference `yaml:"endpointPreference" json:"endpointPreference"`
	NodeName           string             `yaml:"nodeName" json:"nodeName,omitempty"`
	Zones              []string           `yaml:"zones" json:"zones,omitempty"`
	ServiceCIDRs       []netip.Prefix     `yaml:"serviceCIDRs" json:"serviceCIDRs,omitempty"`
	PodCIDRs           []netip.Prefix     `yaml:"podCIDRs" json:"podCIDRs,omitempty"`
	KubeSwitchAddress  netip.Addr         `yaml:"kubeswitchAddress" json:"kubeswitchAddress,omitzero"`
	NoKubeSwitch       bool               `yaml:"-" json:"noKubeSwitch,omitempty"` // kubeswitchAddress: none
	Upstreams          []netip.AddrPort   `yaml:"upstreams" json:"upstreams,omitempty"`
	Allowed            []netip.Prefix     `yaml:"allowed" json:"allowed,omitempty"`
	Pods               []string           `yaml:"pods" json:"pods,omitempty"`
	ClusterDNS         []netip.Addr       `yaml:"clusterDNS" json:"clusterDNS,omitempty"`
	Resolver           ResolverMode       `yaml:"resolver" json:"resolver"`
	OnForeignChange    ChangePolicy       `yaml:"onForeignChange" json:"onForeignChange"`
	InPlace            bool               `yaml:"inPlace" json:"inPlace,omitempty"`
	OverrideImmutable  bool               `yaml:"overrideImmutable" json:"overrideImmutable,omitempty"`
	BPF                bool               `yaml:"bpf" json:"bpf"`
	Wait               time.Duration      `yaml:"wait" json:"wait"`
	Linger             time.Duration      `yaml:"linger" json:"linger"`
	ResolvConf         string             `yaml:"resolvConf" json:"resolvConf"`
	StateDir           string             `yaml:"stateDir" json:"stateDir"`
	RunDir             string             `yaml:"runDir" json:"runDir"`
	BPFFS              string             `yaml:"bpffs" json:"bpffs"`
	LogLevel           string             `yaml:"logLevel" json:"logLevel"`
}

// Default returns the settings of a host that says nothing.
func Default() Config {
	return Config{
		Topology:           TopologyNativeLinux,
		Kubeconfig:         "",  // searched for
		DNSEndpoints:       nil, // discovered
		DNSService:         "",  // kube-system/kube-dns, or the one with its label
		CorefileConfigMap:  "",  // coredns
		StubZones:          false,
		EndpointPreference: PreferAll,
		NodeName:           "",           // the host's name
		Zones:              nil,          // discovered; DefaultZone if there is nothing to discover
		ServiceCIDRs:       nil,          // discovered
		PodCIDRs:           nil,          // discovered
		KubeSwitchAddress:  netip.Addr{}, // DefaultKubeSwitchAddress if an interface has it
		NoKubeSwitch:       false,
		Upstreams:          nil, // the host's own
		Allowed:            nil, // the KubeSwitch interface's own subnets
		Pods:               nil, // pods are left alone
		ClusterDNS:         nil, // discovered
		Resolver:           ResolverTakeover,
		OnForeignChange:    ChangeRetake,
		InPlace:            false, // a resolver file that can't be renamed is refused
		OverrideImmutable:  false, // and so is one that chattr +i protects
		BPF:                true,
		Wait:               DefaultWait,
		Linger:             DefaultLinger,
		ResolvConf:         DefaultResolvConf,
		StateDir:           DefaultStateDir,
		RunDir:             DefaultRunDir,
		BPFFS:              DefaultBPFFS,
		LogLevel:           DefaultLogLevel,
	}
}

// FromJournal reads the settings that a daemon, of this version or another, has recorded. What that one did not know has its
// default; what this one does not know is left out.
func FromJournal(params []byte) (Config, error) {
	c := Default()
	c.Topology = "" // every version records that
	if err := json.Unmarshal(params, &c); err != nil {
		return c, fmt.Errorf("journal: settings: %w", err)
	}
	if c.Topology == "" {
		return c, fmt.Errorf("journal: settings: %w: they name no topology", ErrInvalid)
	}
	return c, nil
}

// Same compares by meaning: an empty list and none are the same.
func (c Config) Same(o Config) bool {
	left, errLeft := json.Marshal(c)
	right, errRight := json.Marshal(o)
	return errLeft == nil && errRight == nil && bytes.Equal(left, right)
}

// live are the settings that can change while attached, by their keys in JSON.
var live = []string{
	"dnsEndpoints", "kubeconfig", "upstreams", "zones", "serviceCIDRs", "podCIDRs", "dnsService", "corefileConfigMap", "stubZones",
	"endpointPreference", "nodeName", "allowed", "pods", "clusterDNS", "wait", "linger", "onForeignChange",
}

// NeedDetach returns the keys of those settings in which two configurations differ and that can't change while attached.
func NeedDetach(now, next Config) (keys []string) {
	before, after := now.byKey(), next.byKey()
	for key := range after {
		if _, both := before[key]; !both {
			before[key] = nil
		}
	}
	for key, value := range before {
		if !slices.Contains(live, key) && !bytes.Equal(value, after[key]) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

func (c Config) byKey() map[string]json.RawMessage {
	keys := make(map[string]json.RawMessage)
	// What was made by Marshal is no error to Unmarshal.
	if text, err := json.Marshal(c); err == nil {
		_ = json.Unmarshal(text, &keys)
	}
	return keys
}

// Validate checks the values that can be judged without looking at the host.
func (c Config) Validate() error {
	if c.Topology != TopologyNativeLinux {
		return fmt.Errorf("topology %q: %w: this version knows %q", c.Topology, ErrInvalid, TopologyNativeLinux)
	}
	if !slices.Contains([]ResolverMode{ResolverTakeover, ResolverTransparent, ResolverNone}, c.Resolver) {
		return fmt.Errorf("resolver %q: %w: this version knows %q, %q and %q", c.Resolver, ErrInvalid,
			ResolverTakeover, ResolverTransparent, ResolverNone)
	}
	if c.Resolver == ResolverTransparent && !c.BPF {
		return fmt.Errorf("resolver %q: %w: only the kernel can steer past the host's resolver: leave out --no-bpf (bpf: false), or use %q",
			c.Resolver, ErrInvalid, ResolverTakeover)
	}
	if !slices.Contains([]ChangePolicy{ChangeRetake, ChangeYield}, c.OnForeignChange) {
		return fmt.Errorf("onForeignChange %q: %w: write %q or %q", c.OnForeignChange, ErrInvalid, ChangeRetake, ChangeYield)
	}
	if !slices.Contains([]EndpointPreference{PreferAll, PreferNode, PreferZone}, c.EndpointPreference) {
		return fmt.Errorf("endpointPreference %q: %w: write %s, %s or %s", c.EndpointPreference, ErrInvalid, PreferAll, PreferNode, PreferZone)
	}
	if err := checkService(c.DNSService); err != nil {
		return err
	}
	for _, zone := range c.Zones {
		if err := checkZone(zone); err != nil {
			return err
		}
	}
	for _, server := range slices.Concat(c.DNSEndpoints, c.Upstreams) {
		if server.Addr().IsUnspecified() || server.Addr().IsMulticast() || server.Port() == 0 {
			return fmt.Errorf("DNS server %s: %w: give a host's address", server, ErrInvalid)
		}
		if server.Addr().Is6() && server.Addr().IsLinkLocalUnicast() && server.Addr().Zone() == "" {
			return fmt.Errorf("DNS server %s: %w: a link-local address is one on each link: name the interface, as in %s%%eth0",
				server, ErrInvalid, server.Addr())
		}
	}
	if err := checkOwn("kubeswitchAddress", c.KubeSwitchAddress); err != nil {
		return err
	}
	for _, address := range c.ClusterDNS {
		if err := checkOwn("clusterDNS", address); err != nil {
			return err
		}
	}
	for _, pattern := range c.Pods {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			return fmt.Errorf("pods %q: %w: write an interface name or a pattern such as veth*", pattern, ErrInvalid)
		}
	}
	if c.Wait <= 0 {
		return fmt.Errorf("wait %s: %w: give a time above zero, such as %s", c.Wait, ErrInvalid, DefaultWait)
	}
	if c.Linger < 0 || c.Linger > maxLinger {
		return fmt.Errorf("linger %s: %w: give a time up to %s, such as %s, or 0 not to", c.Linger, ErrInvalid, maxLinger, DefaultLinger)
	}
	for key, file := range map[string]string{
		"resolvConf": c.ResolvConf, "stateDir": c.StateDir, "runDir": c.RunDir, "bpffs": c.BPFFS,
	} {
		if !filepath.IsAbs(file) && !path.IsAbs(file) { // a Linux host's are checked on other systems too
			return fmt.Errorf("%s %q: %w: give an absolute path", key, file, ErrInvalid)
		}
	}
	return nil
}

// SetKubeSwitch sets the KubeSwitch address to an IP, or to none.
func (c *Config) SetKubeSwitch(text string) error {
	if text == "none" {
		c.KubeSwitchAddress, c.NoKubeSwitch = netip.Addr{}, true
		return nil
	}
	address, err := netip.ParseAddr(text)
	if err != nil {
		return fmt.Errorf("%q: %w: write an IP address, or none", text, ErrInvalid)
	}
	c.KubeSwitchAddress, c.NoKubeSwitch = address.Unmap(), false
	return nil
}

// checkOwn refuses what queries can't be intercepted at for others; no address at all is the default. An IPv6 link-local
// address is one on each link, which neither the kernel programs nor the resolver files of most clients can tell apart.
func checkOwn(key string, address netip.Addr) error {
	switch {
	case !address.IsValid():
	case address.Is6() && (address.Zone() != "" || address.IsLinkLocalUnicast()):
		return fmt.Errorf("%s %s: %w: a link-local address can't be told from the same one on another link: give a unique local or a global one",
			key, address, ErrInvalid)
	case address.IsLoopback() || address.IsUnspecified() || address.IsMulticast():
		return fmt.Errorf("%s %s: %w: give an address that other hosts can ask at", key, address, ErrInvalid)
	}
	return nil
}

// checkService wants NAMESPACE/NAME, or nothing.
func checkService(text string) error {
	namespace, name, ok := strings.Cut(text, "/")
	if text != "" && (!ok || namespace == "" || name == "" || strings.ContainsAny(name, "/ ")) {
		return fmt.Errorf("dnsService %q: %w: write NAMESPACE/NAME, such as kube-system/kube-dns", text, ErrInvalid)
	}
	return nil
}

// checkZone refuses what can't be a zone that queries are steered for. The root would take every name there is.
func checkZone(zone string) error {
	name := strings.TrimSuffix(zone, ".")
	if name == "" {
		return fmt.Errorf("zone %q: %w: the root zone would take every name from the host's own servers", zone, ErrInvalid)
	}
	if len(name) > 253 {
		return fmt.Errorf("zone %q: %w: a name has at most 253 characters", zone, ErrInvalid)
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 {
			return fmt.Errorf("zone %q: %w: a label has 1 to 63 characters", zone, ErrInvalid)
		}
		for _, octet := range []byte(label) {
			if octet <= ' ' || octet > '~' || octet == '\\' {
				return fmt.Errorf("zone %q: %w: write it in printable ASCII, without escapes", zone, ErrInvalid)
			}
		}
	}
	return nil
}

// ParseServer reads IP[:PORT], with the port DNSPort if there is none: 10.0.0.1, 10.0.0.1:5353, fe80::1%eth0,
// [2001:db8::1]:5353.
func ParseServer(text string) (netip.AddrPort, error) {
	bare := text
	if inside, ok := strings.CutPrefix(text, "["); ok && strings.Contains(inside, ":") {
		if inside, ok := strings.CutSuffix(inside, "]"); ok {
			bare = inside
		}
	}
	if address, err := netip.ParseAddr(bare); err == nil {
		return netip.AddrPortFrom(address.Unmap(), DNSPort), nil
	}
	server, err := netip.ParseAddrPort(text)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("DNS server %s: %w: write IP or IP:PORT, such as 10.0.0.1 or [2001:db8::1]:53",
			strconv.Quote(text), ErrInvalid)
	}
	return netip.AddrPortFrom(server.Addr().Unmap(), server.Port()), nil
}
