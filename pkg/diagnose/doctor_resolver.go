package diagnose

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
)

const restoreFix = "run sudo k2s-dnsbpf restore"

func checkFile(f Facts) []Finding {
	r := f.Resolver
	switch {
	case !f.Attachment.Takeover:
		return ok("%s is left alone, as it was asked for", r.Path)
	case r.State == "ours" && f.Attachment.Alive:
		return ok("%s is ours", r.Path)
	case r.State == "ours":
		return []Finding{{
			Result: Fail, Says: r.Path + " is ours, and no daemon is behind it",
			Consequence: "names are answered only as far as the kernel can, if at all", Fix: restoreFix + ", or attach again",
		}}
	case f.Attachment.Alive && r.Note != "":
		return []Finding{{
			Result: Warn, Says: fmt.Sprintf("%s is %s (owner: %s), %s", r.Path, r.State, r.Owner, r.Note),
			Consequence: "programs ask the servers in it, which know no cluster names", Fix: "attach with --on-foreign-change retake to have ours there",
		}}
	case f.Attachment.Alive:
		return []Finding{{
			Result: Fail, Says: fmt.Sprintf("%s is %s: somebody else replaced ours (owner: %s)", r.Path, r.State, r.Owner),
			Consequence: "programs ask the servers in it, which know no cluster names", Fix: "run sudo k2s-dnsbpf detach, and attach again",
		}}
	}
	var out []Finding
	for _, refusal := range r.Refusals {
		says, fix := refusal, ""
		if i := strings.LastIndex(refusal, ": "); i >= 0 {
			says, fix = refusal[:i], refusal[i+2:]
		}
		out = append(out, Finding{Result: Fail, Says: says, Consequence: "attach refuses to take it over", Fix: fix})
	}
	if len(out) > 0 {
		return out
	}
	return ok("%s (%s) can be taken over", r.Path, r.Type)
}

// checkOwner also says which resolver mode suits the host: where a resolver on loopback has its own routes for names,
// as systemd-resolved has for VPNs, a takeover of the file goes around it.
func checkOwner(f Facts) []Finding {
	r := f.Resolver
	says := fmt.Sprintf("%s: %s", r.Owner, strings.Join(r.Reasons, "; "))
	local := len(r.Servers) > 0 && !slices.ContainsFunc(r.Servers, func(a netip.Addr) bool { return !a.IsLoopback() })
	resolved := strings.HasPrefix(r.Owner, "systemd-resolved")
	if !f.Attachment.Takeover || !local && !resolved {
		return ok("%s", says)
	}
	whose := "another resolver on loopback (" + list(r.Servers) + ")"
	if resolved {
		whose = "systemd-resolved"
	}
	return []Finding{{
		Result: Warn, Says: says + "; recommended resolver mode: transparent",
		Consequence: "a takeover goes around " + whose + ": servers that it has for some names only, such as a VPN's, are not asked while attached",
		Fix:         "--resolver transparent leaves it in charge; not covered by it: " + strings.Join(config.TransparentLimits(), " "),
	}}
}

// elsewhere reports whether a server is none of the addresses that we serve.
func (f Facts) elsewhere(a netip.Addr) bool {
	return !slices.ContainsFunc(f.Attachment.Served, func(served netip.AddrPort) bool { return served.Addr() == a.Unmap() })
}

// checkLeftovers finds an attachment that nobody looks after.
func checkLeftovers(f Facts) []Finding {
	r := f.Resolver
	switch {
	case r.Parked == "":
		return ok("no original is parked beside %s without reason", r.Path)
	case f.Journal.Denied:
		return ok("an original is parked at %s: this host is attached", r.Parked)
	case !f.Journal.Knows:
		return []Finding{{
			Result: Fail, Says: r.Parked + " is from an attach whose journal is lost",
			Consequence: "it may be this host's original configuration, and the next attach would remove it",
			Fix:         "compare it with " + r.Path + ", then " + restoreFix + " or move it away",
		}}
	case !f.Attachment.Alive && r.State == "foreign" && slices.ContainsFunc(r.Servers, f.elsewhere):
		byHand := "mv -f"
		if r.Type == "bind mount" {
			byHand = "cp"
		}
		return []Finding{{
			Result: Warn, Says: fmt.Sprintf("%s is the original of before somebody else replaced %s", r.Parked, r.Path),
			Consequence: "theirs stays in place, also at a restore; the next attach forgets the original",
			Fix:         fmt.Sprintf("nothing, or to have the original back: %s %s %s", byHand, r.Parked, r.Path),
		}}
	case !f.Attachment.Alive:
		return []Finding{{
			Result: Fail, Says: r.Parked + " is the original of an attachment that ended without a detach",
			Consequence: "the original is not in place", Fix: restoreFix,
		}}
	}
	return ok("the original is parked at %s", r.Parked)
}

func checkJournal(f Facts) []Finding {
	j := f.Journal
	switch {
	case j.Denied:
		return unknown("the journal %s is readable by root only", j.Path)
	case j.Err != "":
		return []Finding{{
			Result: Fail, Says: "the journal can't be used: " + j.Err,
			Consequence: "what was changed is found by other signs only", Fix: restoreFix + ": it sets a damaged one aside",
		}}
	case j.Repair != "":
		return []Finding{{
			Result: Warn, Says: "the journal is damaged, the one before it is used: " + j.Repair,
			Consequence: "the last change may be missing in it", Fix: "check the disk, and detach",
		}}
	case j.Changes > 0:
		return ok("%s is whole, and records %s", j.Path, say.Count(j.Changes, "change"))
	}
	return ok("nothing is recorded as changed")
}

// checkNSSwitch finds lookups that never come to resolv.conf, nsswitch.conf(5).
func checkNSSwitch(f Facts) []Finding {
	if f.NSSwitch == "" {
		return ok("nsswitch.conf has no hosts line: the C library's own order ends with dns")
	}
	words := strings.Fields(f.NSSwitch)
	dns, resolve := slices.Index(words, "dns"), slices.Index(words, "resolve")
	switch {
	case dns < 0 && resolve < 0:
		return []Finding{{
			Result: Fail, Says: "hosts: " + f.NSSwitch + ": no dns in it",
			Consequence: "programs of the C library resolve no name by DNS", Fix: "add dns to the hosts line of /etc/nsswitch.conf",
		}}
	case resolve >= 0 && (dns < 0 || resolve < dns) && f.Managers.Resolved:
		return []Finding{{
			Result: Warn, Says: "hosts: " + f.NSSwitch + ": nss-resolve comes before dns, and systemd-resolved runs",
			Consequence: "programs of the C library ask systemd-resolved and not resolv.conf: it asks us and its links' servers, and the first answer counts, so a cluster name may leave for the LAN",
			Fix:         "put dns before resolve in /etc/nsswitch.conf",
		}}
	case dns < 0:
		return []Finding{{
			Result: Fail, Says: "hosts: " + f.NSSwitch + ": only nss-resolve, and systemd-resolved does not run",
			Consequence: "programs of the C library resolve no name by DNS", Fix: "add dns to the hosts line of /etc/nsswitch.conf",
		}}
	}
	return ok("hosts: %s", f.NSSwitch)
}

func checkResolved(f Facts) []Finding {
	m := f.Managers
	if !m.Resolved {
		return ok("systemd-resolved does not run")
	}
	if ours := slices.DeleteFunc(slices.Clone(m.ResolvedServers), func(a netip.Addr) bool { return !f.serves(a) }); len(ours) > 0 {
		return []Finding{{
			Result: Fail, Says: "systemd-resolved publishes our address " + list(ours) + " in /run/systemd/resolve/resolv.conf",
			Consequence: "who uses that file, as a kubelet that kubeadm set up does, asks its own loopback",
			Fix:         "point them at the file for pods, see the check kubelet; after detach: systemctl restart systemd-resolved",
		}}
	}
	if f.Attachment.Takeover && f.Resolver.State == "ours" {
		return []Finding{{
			Result: Warn, Says: "systemd-resolved is in foreign mode: it reads our file",
			Consequence: "it may keep 127.0.0.1 as a server until it is restarted, also after detach",
			Fix:         "after detach: systemctl restart systemd-resolved; or --resolver transparent",
		}}
	}
	return ok("systemd-resolved runs, servers: %s", list(m.ResolvedServers))
}

// checkNetworkManager foresees what it does to a file that is not its own, NetworkManager.conf(5) rc-manager.
func checkNetworkManager(f Facts) []Finding {
	m := f.Managers
	if !m.NetworkManager {
		return ok("NetworkManager does not run")
	}
	settings := fmt.Sprintf("NetworkManager runs with dns=%s, rc-manager=%s", orDefault(m.NMDNS), orDefault(m.NMRcManager))
	switch {
	case !f.Attachment.Takeover, m.NMDNS == "none", m.NMRcManager == "unmanaged":
		return ok("%s: it leaves the resolver file alone", settings)
	case m.NMDNS == "" && strings.HasPrefix(f.Resolver.Owner, "systemd-resolved"):
		return []Finding{{
			Result: Warn, Says: settings + ", and knows by the link to systemd-resolved that it has no say",
			Consequence: "our file replaces the link: if NetworkManager is restarted while attached, it writes the file itself",
			Fix:         "set dns=systemd-resolved in [main] of NetworkManager.conf",
		}}
	case m.NMRcManager == "resolvconf", m.NMRcManager == "netconfig":
		return ok("%s: it hands servers to %s", settings, m.NMRcManager)
	}
	return []Finding{{
		Result: Warn, Says: settings, Consequence: "it overwrites our file whenever a lease or a connection changes",
		Fix: "set rc-manager=unmanaged in [main] of NetworkManager.conf while attached",
	}}
}

func orDefault(value string) string {
	if value == "" {
		return "(default)"
	}
	return value
}

// signatureVersion is the openresolv since which a file without its first line is an error.
var signatureVersion = []int{3, 17}

func checkOpenresolv(f Facts) []Finding {
	version := f.Managers.Openresolv
	switch {
	case version == "":
		return ok("openresolv is not installed")
	case !f.Attachment.Takeover || !atLeast(version, signatureVersion):
		return ok("openresolv %s", version)
	}
	return []Finding{{
		Result: Warn, Says: "openresolv " + version + " refuses a resolver file that does not begin with its own signature",
		Consequence: "while attached, wg-quick with DNS= fails and takes its interface down again",
		Fix:         "bring tunnels up before attach, or set resolv_conf=/run/resolvconf.conf in /etc/resolvconf.conf",
	}}
}

// atLeast compares a version such as 3.17.0 or 6.12.41-generic, number by number.
func atLeast(version string, least []int) bool {
	parts := strings.FieldsFunc(version, func(r rune) bool { return r < '0' || r > '9' })
	for i, want := range least {
		if i >= len(parts) {
			return false
		}
		have, err := strconv.Atoi(parts[i])
		if err != nil || have < want {
			return false
		}
		if have > want {
			return true
		}
	}
	return true
}

func checkTakeovers(f Facts) []Finding {
	var out []Finding
	for _, b := range f.Managers.Backups {
		out = append(out, Finding{
			Result: Warn, Says: fmt.Sprintf("%s: %s has taken the resolver file over, or left this behind", b.Path, b.Program),
			Consequence: "two programs that replace one file undo each other's work", Fix: "end " + b.Program + "'s DNS before attach, or remove a stale backup",
		})
	}
	if len(out) == 0 {
		return ok("no other program's backup of the resolver file")
	}
	return out
}
