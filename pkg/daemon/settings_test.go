//go:build linux

package daemon

import (
	"encoding/json"
	"net/netip"
	"testing"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

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
