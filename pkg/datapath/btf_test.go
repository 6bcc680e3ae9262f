//go:build linux

package datapath

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// Who looks into a pinned map with bpftool finds names, not octets: the kernel has kept the types of each.
func TestPinnedMapsHaveTypes(t *testing.T) {
	pinDir := newNamespace(t)
	load(t, Options{PinDir: pinDir})
	// What a dump of each map must be able to name: the struct of its key or value that says most.
	structs := map[string]string{
		"dns_config": "dns_config", "dns_listeners": "dns_listener_key", "dns_zones": "dns_zone", "dns_backends": "dns_backend",
		"dns_sources": "dns_prefix", "dns_reply_via": "", "dns_flows": "dns_flow", "dns_stats": "dns_counters",
	}
	entries, err := os.ReadDir(filepath.Join(pinDir, "maps"))
	if err != nil {
		t.Fatal(err)
	}
	var pinned []string
	for _, entry := range entries {
		// No subtests: they run on other threads, which have another file system.
		pinned = append(pinned, entry.Name())
		checkTypes(t, filepath.Join(pinDir, "maps", entry.Name()), structs[entry.Name()])
	}
	if want := slices.Sorted(maps.Keys(structs)); !slices.Equal(pinned, want) {
		t.Errorf("pinned maps %q, want %q", pinned, want)
	}
}

func checkTypes(t *testing.T, pin, name string) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	if base := filepath.Base(pin); info.Name != base || len(base) > kernelNameMax {
		t.Errorf("pinned as %s, in the kernel it is %q", base, info.Name)
	}
	id, ok := info.BTFID()
	if !ok || id == 0 {
		t.Errorf("%s: the kernel has no types of it", info.Name)
		return
	}
	handle, err := btf.NewHandleFromID(id)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	types, err := handle.Spec(nil)
	if err != nil {
		t.Fatal(err)
	}
	var found *btf.Struct
	if name == "" {
		return
	}
	if err := types.TypeByName(name, &found); err != nil {
		t.Errorf("%s: struct %s: %v", info.Name, name, err)
	}
}
