package config

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
)

// fileConfig is the file's form of Config: what YAML can't read by itself is text first.
type fileConfig struct {
	Topology           *Topology           `yaml:"topology"`
	Kubeconfig         *string             `yaml:"kubeconfig"`
	DNSEndpoints       []serverText        `yaml:"dnsEndpoints"`
	DNSService         *string             `yaml:"dnsService"`
	CorefileConfigMap  *string             `yaml:"corefileConfigMap"`
	StubZones          *bool               `yaml:"stubZones"`
	EndpointPreference *EndpointPreference `yaml:"endpointPreference"`
	NodeName           *string             `yaml:"nodeName"`
	Zones              []string            `yaml:"zones"`
	ServiceCIDRs       []prefixText        `yaml:"serviceCIDRs"`
	PodCIDRs           []prefixText        `yaml:"podCIDRs"`
	KubeSwitchAddress  *kubeSwitchText     `yaml:"kubeswitchAddress"`
	Upstreams          []serverText        `yaml:"upstreams"`
	Allowed            []prefixText        `yaml:"allowed"`
	Pods               []string            `yaml:"pods"`
	ClusterDNS         []addressText       `yaml:"clusterDNS"`
	Resolver           *ResolverMode       `yaml:"resolver"`
	OnForeignChange    *ChangePolicy       `yaml:"onForeignChange"`
	InPlace            *bool               `yaml:"inPlace"`
	OverrideImmutable  *bool               `yaml:"overrideImmutable"`
	BPF                *bool               `yaml:"bpf"`
	Wait               *durationText       `yaml:"wait"`
	Linger             *durationText       `yaml:"linger"`
	ResolvConf         *string             `yaml:"resolvConf"`
	StateDir           *string             `yaml:"stateDir"`
	RunDir             *string             `yaml:"runDir"`
	BPFFS              *string             `yaml:"bpffs"`
	LogLevel           *string             `yaml:"logLevel"`
}

type (
	serverText   netip.AddrPort
	prefixText   netip.Prefix
	addressText  netip.Addr
	durationText time.Duration

	kubeSwitchText string
)

func (s *serverText) UnmarshalYAML(node *yaml.Node) error {
	server, err := ParseServer(node.Value)
	if err != nil {
		return atLine(node, err)
	}
	*s = serverText(server)
	return nil
}

func (p *prefixText) UnmarshalYAML(node *yaml.Node) error {
	prefix, err := netip.ParsePrefix(node.Value)
	if err != nil {
		return atLine(node, fmt.Errorf("%q: %w: write a range such as 172.21.0.0/16", node.Value, ErrInvalid))
	}
	*p = prefixText(prefix)
	return nil
}

func (a *addressText) UnmarshalYAML(node *yaml.Node) error {
	address, err := netip.ParseAddr(node.Value)
	if err != nil {
		return atLine(node, fmt.Errorf("%q: %w: write an IP address", node.Value, ErrInvalid))
	}
	*a = addressText(address)
	return nil
}

func (k *kubeSwitchText) UnmarshalYAML(node *yaml.Node) error {
	*k = kubeSwitchText(node.Value)
	if err := new(Config).SetKubeSwitch(node.Value); err != nil {
		return atLine(node, err)
	}
	return nil
}

func (d *durationText) UnmarshalYAML(node *yaml.Node) error {
	duration, err := time.ParseDuration(node.Value)
	if err != nil {
		return atLine(node, fmt.Errorf("%q: %w: write a time such as 30s", node.Value, ErrInvalid))
	}
	*d = durationText(duration)
	return nil
}

func atLine(node *yaml.Node, err error) error {
	return fmt.Errorf("line %d: %w", node.Line, err)
}

// maxFile bounds a configuration file, in bytes.
const maxFile = 1 << 20

// Load returns the defaults, changed by the file at path. A missing file is no error unless it is required: the one at
// DefaultFile is optional, one that the user named is not. Errors name file, line and key; beside one come the settings as
// far as the file is good.
func Load(ctx context.Context, path string, required bool) (Config, error) {
	c := Default()
	data, err := safefile.ReadFile(ctx, path, maxFile)
	if errors.Is(err, os.ErrNotExist) && !required {
		return c, nil
	}
	if err != nil {
		return c, fmt.Errorf("read configuration: %w: name a file that can be read, or leave --config out", err)
	}
	var document yaml.Node
	if err := yaml.Unmarshal(data, &document); err != nil {
		return c, fmt.Errorf("configuration %s: %w: %w", path, ErrInvalid, err)
	}
	if err := c.applyKeys(document); err != nil {
		return c, fmt.Errorf("configuration %s: %w", path, err)
	}
	// Once more as a whole, for keys that are unknown or there twice.
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	decoder.KnownFields(true)
	if err := decoder.Decode(new(fileConfig)); err != nil && !errors.Is(err, io.EOF) {
		return c, fmt.Errorf("configuration %s: %w", path, oneLine(err))
	}
	var second yaml.Node
	if err := decoder.Decode(&second); !errors.Is(err, io.EOF) {
		return c, fmt.Errorf("configuration %s: line %d: %w: a second document, which nobody reads: write one", path, second.Line, ErrInvalid)
	}
	return c, nil
}

// applyKeys applies the keys one by one: an error then knows whose it is, also one that Validate finds. The error is the
// first one; a bad key changes nothing.
func (c *Config) applyKeys(document yaml.Node) (first error) {
	if len(document.Content) == 0 || document.Content[0].Tag == "!!null" {
		return nil
	}
	if top := document.Content[0]; top.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: %w: write keys with values, such as logLevel: debug", top.Line, ErrInvalid)
	}
	pairs := document.Content[0].Content
	for i := 0; i+1 < len(pairs); i += 2 {
		key := pairs[i]
		if !slices.Contains(fileKeys(), key.Value) {
			first = cmp.Or(first, unknownKey(key))
			continue
		}
		single := yaml.Node{Kind: yaml.MappingNode, Content: pairs[i : i+2]}
		var file fileConfig
		before := *c
		err := single.Decode(&file)
		if err != nil {
			err = fmt.Errorf("key %s: %w", say.Printable(key.Value, ""), oneLine(err))
		} else if file.apply(c); c.Validate() != nil {
			err = fmt.Errorf("line %d: key %s: %w", key.Line, say.Printable(key.Value, ""), c.Validate())
		}
		if err != nil {
			*c = before
			first = cmp.Or(first, err)
		}
	}
	return first
}

// fileKeys are the keys that a file may have.
func fileKeys() (keys []string) {
	kind := reflect.TypeFor[fileConfig]()
	for i := range kind.NumField() {
		keys = append(keys, kind.Field(i).Tag.Get("yaml"))
	}
	return keys
}

// maxKey is more than any key has, in octets.
const maxKey = 64

// unknownKey names the nearest key that there is, if one is near.
func unknownKey(key *yaml.Node) error {
	best, lowered := "", make(map[string]string)
	for _, known := range fileKeys() {
		lowered[strings.ToLower(known)] = known
	}
	if len(key.Value) <= maxKey {
		best = lowered[say.Nearest(strings.ToLower(key.Value), slices.Sorted(maps.Keys(lowered)))]
	}
	hint := "this version has no such key"
	if best != "" {
		hint = "did you mean " + best + "?"
	}
	return fmt.Errorf("line %d: unknown key %s: %w: %s", key.Line, say.Printable(key.Value, ""), ErrInvalid, hint)
}

// oneLine joins the lines of a YAML error, which has one for each fault, and drops the Go type that it names.
func oneLine(err error) error {
	var faults *yaml.TypeError
	if !errors.As(err, &faults) {
		return err
	}
	text := strings.Join(faults.Errors, "; ")
	text = strings.ReplaceAll(strings.ReplaceAll(text, " in type config.fileConfig", ""), "into config.fileConfig", "into settings")
	return fmt.Errorf("%w: %s", ErrInvalid, say.Printable(text, ""))
}

func (f fileConfig) apply(c *Config) {
	set(&c.Topology, f.Topology)
	set(&c.Kubeconfig, f.Kubeconfig)
	set(&c.DNSService, f.DNSService)
	set(&c.CorefileConfigMap, f.CorefileConfigMap)
	set(&c.StubZones, f.StubZones)
	set(&c.EndpointPreference, f.EndpointPreference)
	set(&c.NodeName, f.NodeName)
	set(&c.Resolver, f.Resolver)
	set(&c.InPlace, f.InPlace)
	set(&c.OverrideImmutable, f.OverrideImmutable)
	set(&c.OnForeignChange, f.OnForeignChange)
	set(&c.BPF, f.BPF)
	set(&c.ResolvConf, f.ResolvConf)
	set(&c.StateDir, f.StateDir)
	set(&c.RunDir, f.RunDir)
	set(&c.BPFFS, f.BPFFS)
	set(&c.LogLevel, f.LogLevel)
	if f.Wait != nil {
		c.Wait = time.Duration(*f.Wait)
	}
	if f.Linger != nil {
		c.Linger = time.Duration(*f.Linger)
	}
	if f.KubeSwitchAddress != nil {
		_ = c.SetKubeSwitch(string(*f.KubeSwitchAddress)) // it was valid when it was read
	}
	if f.Zones != nil {
		c.Zones = f.Zones
	}
	if f.Pods != nil {
		c.Pods = f.Pods
	}
	setList(&c.Allowed, f.Allowed, func(p prefixText) netip.Prefix { return netip.Prefix(p) })
	setList(&c.ClusterDNS, f.ClusterDNS, func(a addressText) netip.Addr { return netip.Addr(a).Unmap() })
	setList(&c.DNSEndpoints, f.DNSEndpoints, func(s serverText) netip.AddrPort { return netip.AddrPort(s) })
	setList(&c.Upstreams, f.Upstreams, func(s serverText) netip.AddrPort { return netip.AddrPort(s) })
	setList(&c.ServiceCIDRs, f.ServiceCIDRs, func(p prefixText) netip.Prefix { return netip.Prefix(p) })
	setList(&c.PodCIDRs, f.PodCIDRs, func(p prefixText) netip.Prefix { return netip.Prefix(p) })
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

func setList[T, F any](to *[]T, from []F, convert func(F) T) {
	if from == nil {
		return
	}
	*to = make([]T, 0, len(from))
	for _, element := range from {
		*to = append(*to, convert(element))
	}
}
