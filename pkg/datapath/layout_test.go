//go:build linux

package datapath

import (
	"encoding/binary"
	"reflect"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
)

// The generated Go types must have the layout that the object's BTF says, and no hole that encoding/binary would skip.
func TestLayout(t *testing.T) {
	spec, err := loadDnsbpf()
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]any{
		"dns_backend": dnsbpfDnsBackend{}, "dns_backend_key": dnsbpfDnsBackendKey{}, "dns_config": dnsbpfDnsConfig{},
		"dns_counters": dnsbpfDnsCounters{}, "dns_flow": dnsbpfDnsFlow{},
		"dns_listener": dnsbpfDnsListener{}, "dns_listener_key": dnsbpfDnsListenerKey{}, "dns_scratch": dnsbpfDnsScratch{},
		"dns_zone": dnsbpfDnsZone{}, "dns_zone_shape": dnsbpfDnsZoneShape{}, "dns_prefix": dnsbpfDnsPrefix{},
	} {
		t.Run(name, func(t *testing.T) {
			var kernel *btf.Struct
			if err := spec.Types.TypeByName(name, &kernel); err != nil {
				t.Fatal(err)
			}
			goType := reflect.TypeOf(value)
			if goType.Size() != uintptr(kernel.Size) || binary.Size(value) != int(kernel.Size) {
				t.Errorf("Go type of %d octets, %d when encoded; kernel's of %d", goType.Size(), binary.Size(value), kernel.Size)
			}
			var fields []reflect.StructField
			for field := range goType.Fields() {
				if field.Name != "_" {
					fields = append(fields, field)
				}
			}
			if len(fields) != len(kernel.Members) {
				t.Fatalf("%d fields, the kernel's type has %d", len(fields), len(kernel.Members))
			}
			for i, member := range kernel.Members {
				field := fields[i]
				size, err := btf.Sizeof(member.Type)
				if err != nil {
					t.Fatal(err)
				}
				if field.Offset != uintptr(member.Offset.Bytes()) || field.Type.Size() != uintptr(size) {
					t.Errorf("%s at %d of %d octets, the kernel's %s at %d of %d",
						field.Name, field.Offset, field.Type.Size(), member.Name, member.Offset.Bytes(), size)
				}
				if !strings.EqualFold(field.Name, strings.ReplaceAll(member.Name, "_", "")) {
					t.Errorf("field %s stands where the kernel has %s", field.Name, member.Name)
				}
			}
		})
	}
}

// Counters are read by the names that Go derives; they must be those of enum dns_reason, in its order.
func TestReasonNames(t *testing.T) {
	spec, err := loadDnsbpf()
	if err != nil {
		t.Fatal(err)
	}
	var counters *btf.Struct
	if err := spec.Types.TypeByName("dns_counters", &counters); err != nil {
		t.Fatal(err)
	}
	got := sumCounters([]dnsbpfDnsCounters{{}}).ByReason
	reasons := counters.Members[:len(counters.Members)-1] // the last one is the histogram
	if len(got) != len(reasons) {
		t.Errorf("%d reasons, the kernel has %d", len(got), len(reasons))
	}
	for i, reason := range reasons {
		if _, ok := got[reason.Name]; !ok {
			t.Errorf("no reason %s in %v", reason.Name, got)
		}
		field := reflect.TypeFor[dnsbpfDnsCounters]().Field(i + 1)
		if name := reasonName(field.Name); name != reason.Name {
			t.Errorf("field %s reads as %s, the kernel has %s there", field.Name, name, reason.Name)
		}
	}
}

// What is the sum over CPUs and scopes stays apart by reason.
func TestSumCounters(t *testing.T) {
	sum := sumCounters([]dnsbpfDnsCounters{
		{Steered: 1, PassedExternal: 2, PassedLabel: 4, ErrorRewrite: 8, LatencyUsLog2: [24]uint64{0: 1, 23: 2}},
		{Steered: 16, PassedExternal: 32, Replied: 64, LatencyUsLog2: [24]uint64{0: 4, 7: 8}},
	})
	if sum.Steered() != 17 || sum.Passed() != 38 || sum.ByReason["replied"] != 64 || sum.ByReason["error_rewrite"] != 8 {
		t.Errorf("sum %+v", sum)
	}
	for bucket, count := range sum.LatencyMicrosecondsLog2 {
		if want := map[int]uint64{0: 5, 7: 8, 23: 2}[bucket]; count != want {
			t.Errorf("bucket %d is %d, want %d", bucket, count, want)
		}
	}
}

func TestScopeNames(t *testing.T) {
	for scope, want := range map[Scope]string{
		ScopeHost: "host", ScopeKubeSwitch: "kubeswitch", ScopePod: "pod", ScopeTransparent: "transparent", ScopeShared: "shared", scopeMax: "scope(5)",
	} {
		if got := scope.String(); got != want {
			t.Errorf("scope %d is %q, want %q", uint32(scope), got, want)
		}
	}
}
