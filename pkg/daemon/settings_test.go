//go:build linux

package daemon

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

func TestSameSettings(t *testing.T) {
	if !sameSettings(config.Default(), config.Default()) {
		t.Error("the defaults are not the same as themselves")
	}
	// An empty list says no more than none.
	empty := config.Default()
	empty.DNSEndpoints, empty.Upstreams, empty.ClusterDNS = []netip.AddrPort{}, []netip.AddrPort{}, []netip.Addr{}
	empty.ServiceCIDRs, empty.PodCIDRs, empty.Allowed = []netip.Prefix{}, []netip.Prefix{}, []netip.Prefix{}
	empty.Pods = []string{}
	if !sameSettings(empty, config.Default()) {
		t.Error("empty lists are not the same as none")
	}
	// What crossed the control socket is the same as before.
	full := config.Default()
	full.DNSEndpoints = []netip.AddrPort{endpointA, endpointC}
	full.Allowed = []netip.Prefix{netip.MustParsePrefix("172.19.1.0/24")}
	full.KubeSwitchAddress = config.DefaultKubeSwitchAddress
	wire, err := json.Marshal(full)
	if err != nil {
		t.Fatal(err)
	}
	var crossed config.Config
	if err := json.Unmarshal(wire, &crossed); err != nil {
		t.Fatal(err)
	}
	if !sameSettings(full, crossed) {
		t.Error("settings that crossed the socket are others")
	}

	// Each field counts, also one that is added later.
	kind := reflect.TypeFor[config.Config]()
	for i := range kind.NumField() {
		changed := config.Default()
		field := reflect.ValueOf(&changed).Elem().Field(i)
		switch field.Interface().(type) {
		case string, config.Topology, config.ResolverMode, config.EndpointPreference, config.ChangePolicy:
			field.SetString(field.String() + "x")
		case bool:
			field.SetBool(!field.Bool())
		case time.Duration:
			field.SetInt(field.Int() + 1)
		case []string:
			field.Set(reflect.ValueOf(append([]string{"x"}, field.Interface().([]string)...)))
		case []netip.AddrPort:
			field.Set(reflect.ValueOf([]netip.AddrPort{endpointA}))
		case []netip.Prefix:
			field.Set(reflect.ValueOf(full.Allowed))
		case []netip.Addr:
			field.Set(reflect.ValueOf([]netip.Addr{endpointA.Addr()}))
		case netip.Addr:
			field.Set(reflect.ValueOf(endpointA.Addr()))
		default:
			t.Fatalf("field %s is of a type that this test does not know", kind.Field(i).Name)
		}
		if sameSettings(changed, config.Default()) || sameSettings(config.Default(), changed) {
			t.Errorf("another %s is taken for the same settings", kind.Field(i).Name)
		}
	}
	// The order of a list may matter: of upstreams the first one is asked first.
	swapped := full
	swapped.DNSEndpoints = []netip.AddrPort{endpointC, endpointA}
	if sameSettings(full, swapped) {
		t.Error("another order is taken for the same")
	}
}

func TestCanAdopt(t *testing.T) {
	base := config.Default()
	for name, c := range map[string]struct {
		edit func(*config.Config)
		want bool
	}{
		"the same":            {func(*config.Config) {}, true},
		"other zones":         {func(c *config.Config) { c.Zones = []string{"example"} }, true},
		"other endpoints":     {func(c *config.Config) { c.DNSEndpoints = []netip.AddrPort{endpointA} }, true},
		"other upstreams":     {func(c *config.Config) { c.Upstreams = []netip.AddrPort{endpointA} }, true},
		"other KubeSwitch":    {func(c *config.Config) { c.KubeSwitchAddress = endpointA.Addr() }, true},
		"other pods":          {func(c *config.Config) { c.Pods = []string{"veth*"} }, true},
		"without BPF":         {func(c *config.Config) { c.BPF = false }, false},
		"other BPF files":     {func(c *config.Config) { c.BPFFS += "2" }, false},
		"other resolver file": {func(c *config.Config) { c.ResolvConf += "2" }, false},
		"other resolver mode": {func(c *config.Config) { c.Resolver = config.ResolverNone }, false},
	} {
		t.Run(name, func(t *testing.T) {
			old := base
			c.edit(&old)
			params, err := json.Marshal(old)
			if err != nil {
				t.Fatal(err)
			}
			if got := New(base, "", zap.NewNop()).canAdopt(state.Header{Params: params}); got != c.want {
				t.Errorf("a daemon finds what one with %s left: adopts it %v, want %v", name, got, c.want)
			}
			// And the other way round.
			if params, err = json.Marshal(base); err != nil {
				t.Fatal(err)
			}
			if got := New(old, "", zap.NewNop()).canAdopt(state.Header{Params: params}); got != c.want {
				t.Errorf("a daemon with %s: adopts what another one left %v, want %v", name, got, c.want)
			}
		})
	}
	withoutBPF := base
	withoutBPF.BPF = false
	params, err := json.Marshal(withoutBPF)
	if err != nil {
		t.Fatal(err)
	}
	if New(withoutBPF, "", zap.NewNop()).canAdopt(state.Header{Params: params}) {
		t.Error("adopts an attachment without programs that could go on steering")
	}
	for _, damaged := range []string{"", "null", "{}", "[]", "{\"bpf\":"} {
		if New(base, "", zap.NewNop()).canAdopt(state.Header{Params: json.RawMessage(damaged)}) {
			t.Errorf("adopts an attachment of which it reads %q", damaged)
		}
	}
}
