//go:build linux

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// maxSysctls bounds the copy that is read, in octets.
const maxSysctls = 4096

// copySysctl writes down outside the state directory what a sysctl was before. What is there already stays: only the first copy
// knows what was there before us.
func copySysctl(c config.Config, name string, change sysctlChange) error {
	known, err := copiedSysctls(c)
	if err != nil {
		return err
	}
	if _, ok := known[name]; ok {
		return nil
	}
	known[name] = change
	content, err := json.Marshal(known)
	if err != nil {
		return err
	}
	return state.WriteFile(rundir.Sysctls(c), append(content, '\n'), 0o600)
}

func copiedSysctls(c config.Config) (map[string]sysctlChange, error) {
	known := make(map[string]sysctlChange)
	content, err := safefile.ReadFile(context.Background(), rundir.Sysctls(c), maxSysctls)
	if errors.Is(err, os.ErrNotExist) {
		return known, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read what sysctls were before: %w", err)
	}
	if err := json.Unmarshal(content, &known); err != nil {
		return nil, fmt.Errorf("read what sysctls were before: %s: %w", rundir.Sysctls(c), err)
	}
	return known, nil
}

// undoCopiedSysctls sets back what a lost journal would have. Where there were programs of ours it names what nobody knows the
// former value of.
func undoCopiedSysctls(c config.Config, ours bool) (done []string, err error) {
	known, err := copiedSysctls(c)
	errs := []error{err}
	for _, name := range plan.LoopbackSysctls() {
		change, ok := known[name]
		if !ok {
			if now, err := netdev.Sysctl(name); ours && err == nil && now == "1" {
				done = append(done, fmt.Sprintf("sysctl %s is 1, and no record is left of what it was: set it to 0 unless something else needs it", name))
			}
			continue
		}
		line, err := undoSysctl(name, change)
		if line != "" {
			done = append(done, line)
		}
		errs = append(errs, err)
	}
	return done, errors.Join(errs...)
}
