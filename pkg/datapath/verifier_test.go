//go:build linux

package datapath

import (
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
)

var update = flag.Bool("update", false, "rewrite the files in testdata")

// verifierCost is what the kernel says about a program that it has loaded.
type verifierCost struct {
	VerifiedInstructions uint32 `json:"verifiedInstructions"`
	TranslatedOctets     int    `json:"translatedOctets"`
	JITOctets            uint32 `json:"jitOctets"`
}

// The record shows in a review what a change costs. Its numbers are those of one kernel, so only names are compared.
func TestVerifierCost(t *testing.T) {
	h := newHarness(t)
	costs := make(map[string]verifierCost)
	for name, program := range map[Program]*ebpf.Program{
		FromHost: h.objects.DnsFromHost, FromClient: h.objects.DnsFromClient, FromBackend: h.objects.DnsFromBackend,
		IngressFilter: h.objects.DnsFilter,
	} {
		info, err := program.Info()
		if err != nil {
			t.Fatal(err)
		}
		var cost verifierCost
		cost.VerifiedInstructions, _ = info.VerifiedInstructions() // from 5.16 on
		if cost.TranslatedOctets, err = info.TranslatedSize(); err != nil {
			t.Fatal(err)
		}
		if cost.JITOctets, err = info.JitedSize(); err != nil {
			t.Logf("no JIT: %v", err)
		}
		costs[string(name)] = cost
		t.Logf("%s: %+v", name, cost)
	}

	path := filepath.Join("testdata", "verifier.json")
	if *update {
		record, err := json.MarshalIndent(costs, "", "  ") // sorts the keys
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, append(record, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	record, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v: make it with -update", err)
	}
	var recorded map[string]verifierCost
	if err := json.Unmarshal(record, &recorded); err != nil {
		t.Fatal(err)
	}
	got, want := slices.Sorted(maps.Keys(costs)), slices.Sorted(maps.Keys(recorded))
	if !slices.Equal(got, want) {
		t.Errorf("programs %v, recorded are %v: run with -update", got, want)
	}
}

// Every program of the object is one that the loader knows.
func TestProgramsOfObject(t *testing.T) {
	spec, err := loadDnsbpf()
	if err != nil {
		t.Fatal(err)
	}
	got := slices.Sorted(maps.Keys(spec.Programs))
	if want := []string{string(IngressFilter), string(FromBackend), string(FromClient), string(FromHost)}; !slices.Equal(got, want) {
		t.Errorf("programs %v, want %v", got, want)
	}
}
