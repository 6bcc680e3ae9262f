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
	// DefaultCacheEntries is for the names that a busy node asks for, in 11 MB.
	DefaultCacheEntries = 16384
	DefaultLogLevel     = "info"

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

// Config is a complete set of settings. What there is to say about each of them is in the table.
type Config struct {
	Topology           Topology           `json:"topology"`
	Kubeconfig         string             `json:"kubeconfig,omitempty"`
	DNSEndpoints       []netip.AddrPort   `json:"dnsEndpoints,omitempty"`
	DNSService         string             `json:"dnsService,omitempty"`
	CorefileConfigMap  string             `json:"corefileConfigMap,omitempty"`
	StubZones          bool               `json:"stubZones"`
	EndpointPreference EndpointPreference `json:"endpointPreference"`
	NodeName           string             `json:"nodeName,omitempty"`
	Zones              []string           `json:"zones,omitempty"`
	ServiceCIDRs       []netip.Prefix     `json:"serviceCIDRs,omitempty"`
	PodCIDRs           []netip.Prefix     `json:"podCIDRs,omitempty"`
	KubeSwitchAddress  netip.Addr         `json:"kubeswitchAddress,omitzero"`
	NoKubeSwitch       bool               `json:"noKubeSwitch,omitempty"` // kubeswitchAddress: none
	Upstreams          []netip.AddrPort   `json:"upstreams,omitempty"`
	Allowed            []netip.Prefix     `json:"allowed,omitempty"`
	Pods               []string           `json:"pods,omitempty"`
	ClusterDNS         []netip.Addr       `json:"clusterDNS,omitempty"`
	Resolver           ResolverMode       `json:"resolver"`
	OnForeignChange    ChangePolicy       `json:"onForeignChange"`
	InPlace            bool               `json:"inPlace,omitempty"`
	OverrideImmutable  bool               `json:"overrideImmutable,omitempty"`
	BPF                bool               `json:"bpf"`
	Cache              bool               `json:"cache"`
	CacheEntries       int                `json:"cacheEntries"`
	CacheOff           []string           `json:"cacheOff,omitempty"`
	Wait               time.Duration      `json:"wait"`
	Linger             time.Duration      `json:"linger"`
	ResolvConf         string             `json:"resolvConf"`
	StateDir           string             `json:"stateDir"`
	RunDir             string             `json:"runDir"`
	BPFFS              string             `json:"bpffs"`
	LogLevel           string             `json:"logLevel"`
}

// FromJournal reads the settings that a daemon, of this version or another, has recorded. Settings unknown to that version have their
// defaults; those unknown to this version are ignored.
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
func checkService(key, text string) error {
	namespace, name, ok := strings.Cut(text, "/")
	if text != "" && (!ok || namespace == "" || name == "" || strings.ContainsAny(name, "/ ")) {
		return fmt.Errorf("%s %q: %w: write NAMESPACE/NAME, such as kube-system/kube-dns", key, text, ErrInvalid)
	}
	return nil
}

// checkZone refuses what can't be a zone that queries are steered for. The root would take every name there is.
func checkZone(_, zone string) error {
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

func checkServer(_ string, server netip.AddrPort) error {
	if server.Addr().IsUnspecified() || server.Addr().IsMulticast() || server.Port() == 0 {
		return fmt.Errorf("DNS server %s: %w: give a host's address", server, ErrInvalid)
	}
	if server.Addr().Is6() && server.Addr().IsLinkLocalUnicast() && server.Addr().Zone() == "" {
		return fmt.Errorf("DNS server %s: %w: a link-local address is one on each link: name the interface, as in %s%%eth0",
			server, ErrInvalid, server.Addr())
	}
	return nil
}

func checkPattern(key, pattern string) error {
	if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
		return fmt.Errorf("%s %q: %w: write an interface name or a pattern such as veth*", key, pattern, ErrInvalid)
	}
	return nil
}

func checkPath(key, file string) error {
	if !filepath.IsAbs(file) && !path.IsAbs(file) { // a Linux host's are checked on other systems too
		return fmt.Errorf("%s %q: %w: give an absolute path", key, file, ErrInvalid)
	}
	return nil
}

func checkWait(key string, wait time.Duration) error {
	if wait <= 0 {
		return fmt.Errorf("%s %s: %w: give a time above zero, such as %s", key, wait, ErrInvalid, DefaultWait)
	}
	return nil
}

func checkLinger(key string, linger time.Duration) error {
	if linger < 0 || linger > maxLinger {
		return fmt.Errorf("%s %s: %w: give a time up to %s, such as %s, or 0 not to", key, linger, ErrInvalid, maxLinger, DefaultLinger)
	}
	return nil
}

func checkEntries(key string, entries int) error {
	const least, most = 64, 1 << 18
	if entries < least || entries > most {
		return fmt.Errorf("%s %d: %w: give a number from %d to %d, such as %d", key, entries, ErrInvalid, least, most, DefaultCacheEntries)
	}
	return nil
}

func asIs(text string) (string, error) { return text, nil }

func parseAddress(text string) (netip.Addr, error) {
	address, err := netip.ParseAddr(text)
	if err != nil {
		return address, fmt.Errorf("%q: %w: write an IP address", text, ErrInvalid)
	}
	return address.Unmap(), nil
}

func parsePrefix(text string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(strings.TrimSpace(text))
	if err != nil {
		return prefix, fmt.Errorf("%q: %w: write a range such as 172.21.0.0/16", text, ErrInvalid)
	}
	return prefix.Masked(), nil
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
