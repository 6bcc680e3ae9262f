package privilege

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Capability is one of capabilities(7).
type Capability uint

// Those that an attach takes.
const (
	BPF            Capability = unix.CAP_BPF
	NetAdmin       Capability = unix.CAP_NET_ADMIN
	NetBindService Capability = unix.CAP_NET_BIND_SERVICE
	Perfmon        Capability = unix.CAP_PERFMON
	SysAdmin       Capability = unix.CAP_SYS_ADMIN
)

// String returns the name, such as CAP_BPF.
func (c Capability) String() string {
	switch c {
	case BPF:
		return "CAP_BPF"
	case NetAdmin:
		return "CAP_NET_ADMIN"
	case NetBindService:
		return "CAP_NET_BIND_SERVICE"
	case Perfmon:
		return "CAP_PERFMON"
	case SysAdmin:
		return "CAP_SYS_ADMIN"
	}
	return fmt.Sprintf("capability %d", uint(c))
}

// Capabilities are some of them.
type Capabilities []Capability

// String joins their names.
func (c Capabilities) String() string {
	names := make([]string, 0, len(c))
	for _, one := range c {
		names = append(names, one.String())
	}
	return strings.Join(names, ", ")
}

// Missing returns those capabilities that this process does not have; none where that can't be told. CAP_SYS_ADMIN stands for
// those of BPF.
func Missing(wanted ...Capability) (missing Capabilities) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return nil
	}
	has := func(c Capability) bool { return data[c/32].Effective&(1<<(c%32)) != 0 }
	for _, c := range wanted {
		standIn := has(SysAdmin) && (c == BPF || c == Perfmon)
		if !has(c) && !standIn {
			missing = append(missing, c)
		}
	}
	return missing
}
