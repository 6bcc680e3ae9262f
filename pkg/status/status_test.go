package status

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

var update = flag.Bool("update", false, "rewrite the files in testdata")

func reports() map[string]Report {
	since := time.Date(2026, 3, 1, 12, 30, 0, 0, time.UTC)
	last := since.Add(time.Minute)
	return map[string]Report{
		"attached": {
			Attached: true, Healthy: true, Topology: "native-linux", Since: &since, Version: "0.1.0", PID: 4711,
			Resolver: Resolver{
				State: "ours", File: "/etc/resolv.conf", Owner: "systemd-resolved",
				Upstreams: []string{"192.0.2.1:53", "[2001:db8::1]:53"}, Search: []string{"example.com"},
			},
			Datapath: Datapath{
				Programs: []Program{
					{Name: "dns_from_host", Attach: "tcx/egress", Interface: "lo", KernelID: 42},
					{Name: "dns_from_backend", Attach: "tcx/ingress", Interface: "cni0", KernelID: 43},
				},
				Pinned: "/sys/fs/bpf/k2s-dnsbpf",
			},
			Zones: []Zone{
				{Name: "cluster.local", Group: "cluster", Source: "Corefile kube-system/coredns"},
				{Name: "21.172.in-addr.arpa", Group: "cluster", Source: "ServiceCIDR kubernetes"},
			},
			Endpoints: []Endpoint{
				{Address: "172.20.0.10:53", Interface: "cni0", Healthy: true, Source: "endpointslice"},
				{Address: "172.20.0.11:53", Source: "endpointslice", Note: "no route"},
			},
			Forwarder: Forwarder{Listen: []string{"127.0.0.1:53", "[::1]:53"}, Queries: 12, Failures: 1},
			Counters: map[string]Counters{
				"kubeswitch": {Steered: 7}, "host": {Steered: 1000, Answered: 2, Passed: 300, Refused: 4},
			},
			Discovery: &Discovery{
				Service: "kube-system/kube-dns", Updated: since.Add(time.Minute),
				Notes: []string{"not allowed to read nodes: the reverse zones of pods are not known"},
			},
			Reasons:  map[string]Reasons{"host": {"steered": 1000, "passed_external": 300}},
			Guardian: &Guardian{PID: 4712, Restarts: 1},
		},
		"unhealthy": {
			Attached: true, Problems: []string{"no endpoint is healthy", "the forwarder does not answer"}, Topology: "native-linux",
			Resolver: Resolver{State: "contended", File: "/etc/resolv.conf", Upstreams: []string{}, Events: []ResolverEvent{
				{Time: since, What: "removed", By: "unknown", Action: "ours put back"},
				{Time: since, What: "replaced", By: "dhclient, process 7 (sh)", Action: "contended", Count: 12, Last: &last},
			}},
			Zones:     []Zone{},
			Endpoints: []Endpoint{},
			Counters:  map[string]Counters{},
			Discovery: &Discovery{Service: "kube-system/kube-dns", Updated: since, AgeSeconds: 130, Stale: true, Reason: "connection refused"},
		},
		"transparent": {
			Attached: true, Healthy: true, Topology: "native-linux", Since: &since, Version: "0.1.0", PID: 4711,
			Resolver: Resolver{
				State: "transparent", File: "/etc/resolv.conf", Owner: "systemd-resolved (stub)",
				Upstreams: []string{"127.0.0.53:53"}, SteeredAt: []string{"127.0.0.53"},
			},
			Zones: []Zone{{Name: "cluster.local", Group: "cluster", Source: "default"}}, Endpoints: []Endpoint{},
			Counters: map[string]Counters{"host": {}, "transparent": {Steered: 5, Replied: 5, Answered: 1, Passed: 30}},
		},
		"detached": {
			Resolver: Resolver{State: "original", File: "/etc/resolv.conf", Upstreams: []string{"192.0.2.1:53"}},
			Zones:    []Zone{}, Endpoints: []Endpoint{}, Counters: map[string]Counters{},
		},
		"lingering": {
			Resolver: Resolver{State: "original", File: "/etc/resolv.conf", Upstreams: []string{"192.0.2.1:53"}},
			Zones:    []Zone{}, Endpoints: []Endpoint{}, Counters: map[string]Counters{},
			Lingering: &Lingering{PID: 4711, Until: since, Listen: []string{"127.0.0.1:53", "[::1]:53"}},
		},
	}
}

func TestWrite(t *testing.T) {
	for name, report := range reports() {
		for _, format := range []Format{Table, JSON, YAML} {
			t.Run(name+"/"+string(format), func(t *testing.T) {
				var out bytes.Buffer
				if err := report.Write(&out, format); err != nil {
					t.Fatal(err)
				}
				golden := filepath.Join("testdata", name+"."+string(format))
				if *update {
					if err := os.WriteFile(golden, out.Bytes(), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(golden)
				if err != nil {
					t.Fatalf("%v: make it with -update", err)
				}
				if diff := cmp.Diff(string(want), out.String()); diff != "" {
					t.Errorf("%s (-want +got):\n%s", golden, diff)
				}
			})
		}
	}
}

// A list of nothing is written as an empty one, whether it is nil or not.
var equateEmpty = cmp.FilterValues(func(a, b any) bool {
	x, y := reflect.ValueOf(a), reflect.ValueOf(b)
	return x.Kind() == reflect.Slice && y.Kind() == reflect.Slice && x.Len() == 0 && y.Len() == 0
}, cmp.Comparer(func(any, any) bool { return true }))

// No list is null, even of a report that nobody has filled in.
func TestWriteEmpty(t *testing.T) {
	for _, format := range []Format{JSON, YAML} {
		var out bytes.Buffer
		if err := (Report{}).Write(&out, format); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), "null") {
			t.Errorf("%s of an empty report:\n%s", format, out.String())
		}
	}
}

// Both forms for programs say the same, and enough to make the report from it again.
func TestWriteReadsBack(t *testing.T) {
	for name, report := range reports() {
		var asJSON, asYAML bytes.Buffer
		if err := errors.Join(report.Write(&asJSON, JSON), report.Write(&asYAML, YAML)); err != nil {
			t.Fatal(err)
		}
		var fromJSON, fromYAML Report
		if err := json.Unmarshal(asJSON.Bytes(), &fromJSON); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := yaml.Unmarshal(asYAML.Bytes(), &fromYAML); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(report, fromJSON, equateEmpty); diff != "" {
			t.Errorf("%s from JSON (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(fromJSON, fromYAML); diff != "" {
			t.Errorf("%s: JSON and YAML differ:\n%s", name, diff)
		}

		var keysJSON, keysYAML map[string]any
		if err := errors.Join(json.Unmarshal(asJSON.Bytes(), &keysJSON), yaml.Unmarshal(asYAML.Bytes(), &keysYAML)); err != nil {
			t.Fatal(err)
		}
		for key := range keysJSON {
			if _, ok := keysYAML[key]; !ok {
				t.Errorf("%s: key %s is missing in YAML", name, key)
			}
		}
	}
}

func TestParseFormat(t *testing.T) {
	for _, name := range []string{"table", "json", "yaml"} {
		if got, err := ParseFormat(name); err != nil || string(got) != name {
			t.Errorf("ParseFormat(%q) = %q, %v", name, got, err)
		}
	}
	for _, name := range []string{"", "JSON", "text", "yml"} {
		if got, err := ParseFormat(name); err == nil {
			t.Errorf("ParseFormat(%q) = %q", name, got)
		}
	}
}

// failing is a writer of which a pipe's other end is closed.
type failing struct{}

var errClosed = errors.New("closed")

func (failing) Write([]byte) (int, error) { return 0, errClosed }

func TestWriteFails(t *testing.T) {
	for name, report := range reports() {
		for _, format := range []Format{Table, JSON, YAML} {
			// The YAML package keeps the text of the error only.
			if err := report.Write(failing{}, format); err == nil || !strings.Contains(err.Error(), errClosed.Error()) {
				t.Errorf("%s as %s: %v", name, format, err)
			}
		}
	}
}
