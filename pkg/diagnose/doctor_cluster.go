package diagnose

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
)

// resolvedFile is what kubeadm gives to a kubelet on a host with systemd-resolved.
const resolvedFile = "/run/systemd/resolve/resolv.conf"

func checkKubelet(f Facts) []Finding {
	if len(f.Kubelets) == 0 {
		if !f.Privileged {
			return unknown("no kubelet can be seen: other users' processes are hidden from this one")
		}
		return ok("no kubelet on this host")
	}
	var out []Finding
	for _, k := range f.Kubelets {
		out = append(out, checkOneKubelet(f, k))
	}
	return out
}

// checkOneKubelet judges the file that a kubelet hands to every pod at its start. Pods never see a later change of it.
func checkOneKubelet(f Facts, k Kubelet) Finding {
	who := k.Name
	if k.PID != 0 {
		who = fmt.Sprintf("%s (process %d)", k.Name, k.PID)
	}
	fix := fmt.Sprintf("set resolvConf: %s (%s) and restart it, then recreate the DNS pods", f.PodFile.Path, k.Source)
	loops := []string{"pods that inherit it ask their own loopback; CoreDNS forwards to itself and ends with \"Loop detected\""}
	if k.Name == "k3s" || k.Name == "rke2" {
		fix = fmt.Sprintf("start it with --resolv-conf %s", f.PodFile.Path)
		loops = append(loops, "on its next start it falls back on 8.8.8.8")
	}
	file := path.Clean(k.ResolvConf)
	served := slices.DeleteFunc(slices.Clone(k.Servers), func(a netip.Addr) bool { return !a.IsLoopback() && !f.serves(a) })
	switch {
	case k.ResolvConf == "":
		return Finding{Result: Warn, Says: who + " has an empty resolvConf", Consequence: "pods with the host's DNS policy have no servers", Fix: fix}
	case k.Missing:
		return Finding{Result: Fail, Says: who + " hands out " + file + ", which does not exist", Consequence: "every pod fails to start", Fix: fix}
	case file == f.PodFile.Path && len(served) == 0:
		return Finding{Result: OK, Says: who + " hands out " + file + ": " + list(k.Servers)}
	case len(served) > 0:
		return Finding{Result: Fail, Says: fmt.Sprintf("%s hands out %s, which names %s", who, file, list(served)), Consequence: strings.Join(loops, "; "), Fix: fix}
	case file == path.Clean(f.Resolver.Path) && f.Attachment.Takeover:
		return Finding{Result: Warn, Says: who + " hands out " + file + ", which is taken over while attached", Consequence: strings.Join(loops, "; "), Fix: fix}
	case file == resolvedFile && f.Attachment.Takeover:
		return Finding{
			Result: Warn, Says: who + " hands out " + file, Fix: fix,
			Consequence: "while attached systemd-resolved reads our file, and may publish 127.0.0.1 there",
		}
	}
	return Finding{Result: OK, Says: who + " hands out " + file + ": " + list(k.Servers)}
}

func checkPodFile(f Facts) []Finding {
	p := f.PodFile
	bad := slices.DeleteFunc(slices.Clone(p.Servers), func(a netip.Addr) bool { return !a.IsLoopback() && !f.serves(a) })
	switch {
	case !p.Exists && !f.Attachment.Attached:
		return ok("%s is made by the first attach", p.Path)
	case !p.Exists:
		return []Finding{{
			Result: Warn, Says: p.Path + " does not exist: no server of this host can be reached from a pod",
			Consequence: "there is no file that a kubelet could hand out", Fix: "name a server with --upstream",
		}}
	case len(p.Servers) == 0 || len(bad) > 0:
		return []Finding{{
			Result: Fail, Says: fmt.Sprintf("%s is damaged: its servers are %s", p.Path, list(p.Servers)),
			Consequence: "pods that are started with it have no DNS", Fix: "remove it, and attach again",
		}}
	}
	return ok("%s names %s", p.Path, list(p.Servers))
}

func checkDocker(f Facts) []Finding {
	switch {
	case !f.System.Docker:
		return ok("dockerd does not run")
	case f.System.DockerOK || !f.Attachment.Takeover:
		return ok("dockerd runs, and is not affected")
	}
	return []Finding{{
		Result: Warn, Says: "dockerd runs, and /etc/docker/daemon.json names no dns",
		Consequence: "containers on the default bridge that are made while attached ask 8.8.8.8, since the host's file names only loopback",
		Fix:         `set "dns": ["ADDRESS"] in /etc/docker/daemon.json`,
	}}
}

const coreDNSFix = "let its Corefile forward to the host's upstream servers, such as those in the file for pods, and restart its pods"

// checkCoreDNS finds a cluster DNS that would forward queries to their sender.
func checkCoreDNS(f Facts) []Finding {
	var out []Finding
	if f.Attachment.Loop != "" {
		out = append(out, Finding{
			Result: Fail, Says: "cluster DNS forwards to us: " + f.Attachment.Loop,
			Consequence: "such names are answered SERVFAIL", Fix: coreDNSFix,
		})
	}
	for _, c := range f.CoreDNS {
		if finding := checkOneCoreDNS(f, c); finding.Says != "" {
			out = append(out, finding)
		}
	}
	switch {
	case len(out) > 0:
		return out
	case len(f.CoreDNS) == 0 && !f.Privileged:
		return unknown("no CoreDNS can be seen: other users' processes are hidden from this one")
	case len(f.CoreDNS) == 0:
		return ok("no CoreDNS on this host, and none was asked")
	}
	return ok("no CoreDNS forwards to us or to itself (%d looked at)", len(f.CoreDNS))
}

func checkOneCoreDNS(f Facts, c CoreDNS) Finding {
	if c.Endpoint != "" {
		if !c.AsksUs {
			return Finding{}
		}
		return Finding{
			Result: Warn, Says: "CoreDNS " + c.Endpoint + " forwards to us: a marked query came back through it",
			Consequence: "pods lose all other names with a detach, and a name in a cluster zone that CoreDNS does not know goes in circles until that is noticed",
			Fix:         coreDNSFix,
		}
	}
	where := fmt.Sprintf("CoreDNS (process %d)", c.PID)
	loopback := slices.IndexFunc(c.Forwards, netip.Addr.IsLoopback)
	ours := slices.IndexFunc(c.Forwards, f.serves)
	switch {
	case ours >= 0 && (c.HostNetwork || !c.Forwards[ours].IsLoopback()):
		return Finding{
			Result: Fail, Says: fmt.Sprintf("%s forwards to %s, which we serve while attached (%s)", where, c.Forwards[ours], c.Source),
			Consequence: "a name in a cluster zone that it does not know goes in circles until that is noticed", Fix: coreDNSFix,
		}
	case loopback >= 0 && !c.HostNetwork:
		return Finding{
			Result: Fail, Says: fmt.Sprintf("%s forwards to %s, which is itself (%s)", where, c.Forwards[loopback], c.Source),
			Consequence: "names outside the cluster fail in pods; with its loop plugin it ends with \"Loop detected\"", Fix: coreDNSFix,
		}
	}
	return Finding{}
}

// checkPods finds containers that were given our file. A pod's is made once, at its start.
func checkPods(f Facts) []Finding {
	if !f.Privileged {
		return unknown("other users' containers can't be looked into")
	}
	if len(f.Pods) == 0 {
		return ok("no container has our loopback address in its resolver file")
	}
	names := make([]string, 0, len(f.Pods))
	for _, p := range f.Pods {
		names = append(names, fmt.Sprintf("%s (process %d)", p.Name, p.PID))
	}
	return []Finding{{
		Result: Fail, Says: "containers whose resolver file names our loopback address: " + strings.Join(names, ", "),
		Consequence: "that address is their own, so they have no DNS, and detach does not change it", Fix: "mend the kubelet, see there, and recreate these pods",
	}}
}
