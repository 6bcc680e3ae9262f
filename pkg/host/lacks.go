//go:build linux

package host

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/privilege"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
)

// Lacks says what this process, which root has started, lacks for an attach: each with what to do. It changes nothing.
func Lacks(c config.Config) (lacks []error) {
	errs := []error{CheckFiles(), checkCapabilities(c)}
	if c.BPF {
		errs = append(errs, datapath.CheckPinDir(c.BPFFS))
		if errs[1] == nil {
			errs = append(errs, datapath.CheckPrivilege())
		}
		for _, name := range plan.LoopbackSysctls() {
			errs = append(errs, netdev.CheckSysctl(name, "1"))
		}
	}
	for _, err := range errs {
		if err != nil {
			lacks = append(lacks, err)
		}
	}
	return lacks
}

func checkCapabilities(c config.Config) error {
	var wanted []privilege.Capability
	remedy := "run it as root, or give it these (CapabilityBoundingSet of a unit)"
	if c.BPF {
		wanted = append(wanted, privilege.BPF, privilege.Perfmon, privilege.NetAdmin)
		remedy += ", or do without all but CAP_NET_BIND_SERVICE by --no-bpf"
	}
	if first, err := netdev.FirstFreePort(); err != nil || first > config.DNSPort {
		wanted = append(wanted, privilege.NetBindService)
	}
	missing := privilege.Missing(wanted...)
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("this process has no %s: %s", missing, remedy)
}

// leastFiles is the smallest limit of open files that a daemon gets along with: some fifty are maps, programs, links and sockets of a
// host at rest, and half of all is for queries on their way to other servers.
const leastFiles = 256

// CheckFiles fails if this process may open too few files for a daemon.
func CheckFiles() error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur >= leastFiles {
		return nil //nolint:nilerr // what can't be told is no reason
	}
	return fmt.Errorf("the limit of open files is %d, and a daemon takes %d: raise it (LimitNOFILE of a unit, ulimit -n)", limit.Cur, leastFiles)
}
