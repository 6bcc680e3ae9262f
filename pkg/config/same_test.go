package config

import (
	"encoding/json"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"
)

var (
	endpointA = netip.MustParseAddrPort("172.20.0.10:53")
	endpointC = netip.MustParseAddrPort("[fd00:20::10]:5353")
)

func TestSameSettings(t *testing.T) {
	if !Default().Same(Default()) {
		t.Error("the defaults are not the same as themselves")
	}
	// An empty list says no more than none.
	empty := Default()
	empty.DNSEndpoints, empty.Upstreams, empty.ClusterDNS = []netip.AddrPort{}, []netip.AddrPort{}, []netip.Addr{}
	empty.ServiceCIDRs, empty.PodCIDRs, empty.Allowed = []netip.Prefix{}, []netip.Prefix{}, []netip.Prefix{}
	empty.Pods = []string{}
	if !empty.Same(Default()) {
		t.Error("empty lists are not the same as none")
	}
	// What crossed the control socket is the same as before.
	full := Default()
	full.DNSEndpoints = []netip.AddrPort{endpointA, endpointC}
	full.Allowed = []netip.Prefix{netip.MustParsePrefix("172.19.1.0/24")}
	full.KubeSwitchAddress = DefaultKubeSwitchAddress
	wire, err := json.Marshal(full)
	if err != nil {
		t.Fatal(err)
	}
	var crossed Config
	if err := json.Unmarshal(wire, &crossed); err != nil {
		t.Fatal(err)
	}
	if !full.Same(crossed) {
		t.Error("settings that crossed the socket are others")
	}

	// Each field counts, also one that is added later.
	kind := reflect.TypeFor[Config]()
	for i := range kind.NumField() {
		changed := Default()
		field := reflect.ValueOf(&changed).Elem().Field(i)
		switch field.Interface().(type) {
		case string, Topology, ResolverMode, EndpointPreference, ChangePolicy:
			field.SetString(field.String() + "x")
		case bool:
			field.SetBool(!field.Bool())
		case int, time.Duration:
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
		if changed.Same(Default()) || Default().Same(changed) {
			t.Errorf("another %s is taken for the same settings", kind.Field(i).Name)
		}
	}
	// The order of a list may matter: of upstreams the first one is asked first.
	swapped := full
	swapped.DNSEndpoints = []netip.AddrPort{endpointC, endpointA}
	if full.Same(swapped) {
		t.Error("another order is taken for the same")
	}
}

// TestFileThatIsNone: what can't be meant, and what was meant perhaps.
func TestFileThatIsNone(t *testing.T) {
	for text, says := range map[string]string{
		"zonez: [a]\n": "did you mean zones?", "POD_CIDRS: []\n": "did you mean podCIDRs?", "chroot: off\n": "no such key",
		"zones: [a]\n---\nzones: [b]\n": "a second document", "- zones\n": "write keys with values", "zones\n": "write keys with values",
	} {
		_, err := Load(t.Context(), writeFile(t, text), true)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
	for _, text := range []string{"---\nzones: [a]\n", "zones: [a]\n...\n", "\ufeffzones: [a]\n", "zones: [a]\r\n", "---\n"} {
		if _, err := Load(t.Context(), writeFile(t, text), true); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
}
