//go:build linux

package datapath

import (
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"unicode"

	"github.com/cilium/ebpf"
)

// Counters are the packets of one scope since the maps were created, summed over all CPUs.
type Counters struct {
	// ByReason has each outcome by its name in reasons.h, such as steered or passed_external.
	ByReason map[string]uint64 `json:"byReason"`
	// LatencyMicrosecondsLog2 counts accepted replies, one in 16 of them: bucket i those that took less than 2^i microseconds (and not
	// less than the bucket before), the last one all slower ones.
	LatencyMicrosecondsLog2 []uint64 `json:"latencyMicrosecondsLog2"`
}

// Steered is the number of queries sent to an endpoint, or to an upstream server while the daemon is dead.
func (c Counters) Steered() uint64 { return c.sum("steered") }

// Answered is the number of queries that the kernel made a reply of.
func (c Counters) Answered() uint64 { return c.sum("answered_") }

// Passed is the number of queries left to user space, for whatever reason.
func (c Counters) Passed() uint64 { return c.sum("passed_") }

// Refused is the number of packets that were dropped because they may not or can't be queries.
func (c Counters) Refused() uint64 { return c.sum("refused_") }

func (c Counters) sum(prefix string) (sum uint64) {
	for reason, count := range c.ByReason {
		if strings.HasPrefix(reason, prefix) {
			sum += count
		}
	}
	return sum
}

// Counters returns the counters of every scope.
func (d *Datapath) Counters() (map[Scope]Counters, error) { return readCounters(d.objects.DnsStats) }

// PinnedCounters returns the counters of programs that are pinned below pinDir, for those who did not load them.
func PinnedCounters(pinDir string) (map[Scope]Counters, error) {
	stats, err := ebpf.LoadPinnedMap(filepath.Join(pinDir, "maps", dnsbpfMapDnsStats), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open map dns_stats: %w", err)
	}
	defer stats.Close()
	return readCounters(stats)
}

func readCounters(stats *ebpf.Map) (map[Scope]Counters, error) {
	result := make(map[Scope]Counters, scopeMax)
	for scope := range scopeMax {
		var cpus []dnsbpfDnsCounters
		if err := stats.Lookup(uint32(scope), &cpus); err != nil {
			return nil, fmt.Errorf("read map dns_stats: %w", err)
		}
		result[scope] = sumCounters(cpus)
	}
	return result, nil
}

func sumCounters(cpus []dnsbpfDnsCounters) Counters {
	var latency [len(dnsbpfDnsCounters{}.LatencyUsLog2)]uint64
	sum := Counters{ByReason: make(map[string]uint64)}
	for _, cpu := range cpus {
		fields := reflect.ValueOf(cpu)
		for i := range fields.NumField() {
			if field := fields.Field(i); field.Kind() == reflect.Uint64 {
				sum.ByReason[reasonName(fields.Type().Field(i).Name)] += field.Uint()
			}
		}
		for i, count := range cpu.LatencyUsLog2 {
			latency[i] += count
		}
	}
	sum.LatencyMicrosecondsLog2 = latency[:]
	return sum
}

// reasonName turns a generated field name back into that of reasons.h: PassedExternal is passed_external.
func reasonName(field string) string {
	var name strings.Builder
	for i, letter := range field {
		if i > 0 && unicode.IsUpper(letter) {
			name.WriteByte('_')
		}
		name.WriteRune(unicode.ToLower(letter))
	}
	return name.String()
}
