//go:build linux

package daemon

import (
	"encoding/json"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// AttachedPaths returns c with the directories and the resolver file of the attachment that the journal in c's state
// directory knows, if there is one and it can be read.
func AttachedPaths(c config.Config) config.Config {
	journal, err := state.Open(c.StateDir)
	if err != nil || journal.Empty() {
		return c
	}
	var attached config.Config
	if err := json.Unmarshal(journal.Header().Params, &attached); err != nil {
		return c
	}
	c.RunDir, c.BPFFS, c.ResolvConf = attached.RunDir, attached.BPFFS, attached.ResolvConf
	return c
}
