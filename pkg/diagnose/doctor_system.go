package diagnose

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
)

func checkDaemon(f Facts) []Finding {
	a := f.Attachment
	switch {
	case a.Unseen:
		return unknown("whether it is attached can't be seen")
	case !a.Attached:
		return ok("not attached")
	case !a.Alive:
		return []Finding{{
			Result: Fail, Says: "attached, and no daemon answers: " + strings.Join(a.Problems, "; "),
			Consequence: f.withoutDaemon(), Fix: "run sudo k2s-dnsbpf attach again, or detach",
		}}
	case len(a.Problems) == 0:
		return ok("attached and healthy, process %d", a.PID)
	}
	var out []Finding
	for _, problem := range a.Problems {
		if a.Loop != "" && strings.Contains(problem, a.Loop) {
			continue // told by the check coredns, with its remedy
		}
		out = append(out, Finding{Result: Fail, Says: problem, Fix: "see k2s-dnsbpf status"})
	}
	if len(out) == 0 {
		return ok("attached, process %d", a.PID)
	}
	return out
}

// withoutDaemon says what a host lacks whose daemon is dead.
func (f Facts) withoutDaemon() string {
	switch a := f.Attachment; {
	case a.Takeover && f.Resolver.State != "ours": // the guardian's work, or somebody else's
		return "programs ask the servers of " + f.Resolver.Path + ", which do not know cluster names"
	case a.Takeover && !a.BPF:
		return "no name is resolved"
	case a.Takeover:
		return "endpoints and zones are not followed; names outside the cluster are answered by UDP only, and nothing is over TCP"
	}
	return "endpoints and zones are not followed, and what the forwarder served is not answered"
}

func checkGuardian(f Facts) []Finding {
	switch {
	case !f.Attachment.Alive || !f.Attachment.Takeover:
		return ok("none is needed: no resolver file of ours is in place")
	case f.Guardian != 0:
		return ok("process %d restores the resolver file if the daemon dies", f.Guardian)
	case !f.Privileged:
		return unknown("the guardian's process can't be seen")
	}
	return []Finding{{
		Result: Warn, Says: "no guardian process",
		Consequence: "if the daemon dies, the resolver file points at nobody until somebody runs restore or attach",
		Fix:         "run sudo k2s-dnsbpf attach again, and look into the daemon's log if it is missing then, too",
	}}
}

func checkPort53(f Facts) []Finding {
	var out []Finding
	own := 0
	for _, s := range f.Sockets {
		if s.Ours {
			own++
			continue
		}
		onLoopback := slices.ContainsFunc(f.Attachment.Served, func(served netip.AddrPort) bool {
			return served != f.Attachment.KubeSwitch && s.Takes(served)
		})
		onKubeSwitch := s.Takes(f.Attachment.KubeSwitch)
		if !onLoopback && !onKubeSwitch {
			continue
		}
		if s.Owner.PID == 0 && f.Attachment.Alive {
			return unknown("whose sockets are on port 53 can't be seen")
		}
		owner := s.Owner.String()
		if s.Owner.PID == 0 {
			owner = "a process that can't be seen from here"
		}
		finding := Finding{Result: Fail, Says: fmt.Sprintf("%s/%s is taken by %s", s.Address, s.Protocol, owner)}
		switch {
		case !onLoopback && f.Attachment.BPF:
			finding.Result, finding.Says = OK, finding.Says+": it keeps it, and cluster names that are asked there by UDP are steered past it"
		case !onLoopback:
			finding.Result, finding.Says = OK, finding.Says+": it keeps it, and what is asked there is its own"
		case f.Attachment.Alive:
			finding.Consequence, finding.Fix = "queries there may come to it and not to us", "stop it"
		default:
			finding.Consequence, finding.Fix = "attach can't listen there, and refuses", f.loopbackFix()
		}
		out = append(out, finding)
	}
	switch {
	case len(out) > 0:
		return out
	case own > 0:
		return ok("the forwarder has %s", say.Count(own, "socket"))
	}
	return ok("port 53 is free on %s", list(f.Attachment.Served))
}

// loopbackFix is what to do about another server on loopback.
func (f Facts) loopbackFix() string {
	if slices.ContainsFunc(f.Resolver.Servers, netip.Addr.IsLoopback) {
		return "attach with --resolver transparent, which leaves it in charge and steers cluster names past it; or stop it"
	}
	return "stop it, or keep it off loopback (dnsmasq: bind-dynamic and except-interface=lo)"
}

// leastKernel is what the programs need; README.md says why.
var leastKernel = []int{5, 12}

func checkKernel(f Facts) []Finding {
	out := f.lacks()
	switch {
	case f.System.Kernel == "":
		return append(out, unknown("the kernel's release can't be read")...)
	case f.Attachment.Unseen:
		return append(out, unknown("whether programs are wanted can't be seen")...)
	case !f.Attachment.BPF && len(out) > 0:
		return out
	case !f.Attachment.BPF:
		return ok("Linux %s; everything is done in user space, as it was asked for", f.System.Kernel)
	}
	if !atLeast(f.System.Kernel, leastKernel) {
		out = append(out, Finding{
			Result: Fail, Says: fmt.Sprintf("Linux %s is older than %d.%d", f.System.Kernel, leastKernel[0], leastKernel[1]),
			Consequence: "the programs are refused", Fix: "use --no-bpf",
		})
	}
	if !f.System.BTF {
		out = append(out, Finding{
			Result: Warn, Says: "the kernel has no type information (/sys/kernel/btf/vmlinux)",
			Consequence: "the programs do without; tools such as bpftool say less", Fix: "use a kernel with CONFIG_DEBUG_INFO_BTF",
		})
	}
	if !f.Privileged {
		out = append(out, unknown("whether root may load programs here can't be seen by others")...)
	}
	if len(out) > 0 {
		return out
	}
	return ok("Linux %s, with BTF and a BPF file system", f.System.Kernel)
}

// lacks is what this process lacks for an attach. A daemon that has attached has it.
func (f Facts) lacks() (out []Finding) {
	if f.Attachment.Alive {
		return nil
	}
	for _, text := range f.System.Lacks {
		finding := Finding{Result: Fail, Says: text, Consequence: "attach refuses", Fix: "see there"}
		if i := strings.LastIndex(text, ": "); i >= 0 {
			finding.Says, finding.Fix = text[:i], text[i+len(": "):]
		}
		out = append(out, finding)
	}
	return out
}

func checkSysctls(f Facts) []Finding {
	if !f.Attachment.Attached || !f.Attachment.BPF {
		return ok("none is needed while nothing is steered")
	}
	var wrong []string
	for name, value := range f.System.Sysctls {
		if value != "1" {
			wrong = append(wrong, name+"="+value)
		}
	}
	if len(wrong) == 0 {
		return ok("what redirected replies need is set")
	}
	slices.Sort(wrong)
	return []Finding{{
		Result: Fail, Says: "somebody has set " + strings.Join(wrong, ", "),
		Consequence: "the kernel drops the replies of steered queries that host programs ask by IPv4",
		Fix:         "set it to 1 (sysctl -w), and look for who resets it: /etc/sysctl.d",
	}}
}

func checkBoot(f Facts) []Finding {
	s := f.System
	switch {
	case !s.Systemd:
		return ok("no systemd here: whoever starts this host is to run k2s-dnsbpf restore before the network")
	case s.BootUnit == "":
		return []Finding{{
			Result: Warn, Says: "no unit " + bootUnit,
			Consequence: "after a power loss while attached, the host boots with our resolver file", Fix: "install it, see README.md",
		}}
	case !s.Enabled:
		return []Finding{{
			Result: Warn, Says: s.BootUnit + " is not enabled",
			Consequence: "after a power loss while attached, the host boots with our resolver file", Fix: "systemctl enable " + bootUnit,
		}}
	}
	return ok("%s restores at boot", s.BootUnit)
}

// bootUnit restores a resolver file that a power loss left.
const bootUnit = "k2s-dnsbpf-restore.service"
