package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

// Make makes the plan of a host. It fails if the settings are invalid.
func Make(in Input) (Desired, error) {
	switch in.Settings.Topology {
	case config.TopologyNativeLinux:
		return in.nativeLinux()
	}
	return Desired{}, fmt.Errorf("topology %q: %w", in.Settings.Topology, config.ErrInvalid)
}

// nativeLinux plans a Linux host that runs programs, perhaps Pods, and has workers behind its KubeSwitch.
func (in Input) nativeLinux() (d Desired, err error) {
	configured, err := ConfiguredZones(in.Settings)
	if err != nil {
		return d, err
	}
	d.Listen, d.Shared, d.SteeredAt = in.listen(), in.shared(), in.steeredAt()
	d.KubeSwitch, d.Allowed = in.Facts.KubeSwitch.Interface, in.allowed()
	var aboutZones, aboutEndpoints, aboutPods []string
	d.Zones, aboutZones = zonesOf(configured, in.Snapshot.Zones, in.Facts.Resolver.Search)
	d.Endpoints, aboutEndpoints = in.endpoints()
	for _, upstream := range in.upstreams() {
		d.Fallback = append(d.Fallback, in.newEndpoint(cluster.Endpoint{Address: upstream, Source: "upstream"}))
	}
	d.Forward = in.routes(d)
	clusterDNS, aboutPods := in.clusterDNS()
	var known []Source
	if d.KubeSwitch.Index != 0 || len(in.Facts.Pods) > 0 {
		known = sources(d.Allowed, d.KubeSwitch.Index, in.Facts.Addresses, in.Facts.Networks)
	}
	if d.KubeSwitch.Index != 0 {
		d.Permits = map[netip.Addr][]Permit{KubeSwitchAddress(in.Settings): permits(known, d.Allowed)}
	}
	if in.Settings.BPF {
		d.Kernel = in.kernel(d, known, clusterDNS)
	}
	d.Notes = slices.Concat(aboutZones, aboutEndpoints, aboutPods)
	if why := in.Facts.KubeSwitch.Not; why != "" {
		d.Notes = append(d.Notes, why+": what is asked at the KubeSwitch address is left to the server there, not steered")
	}
	d.Problems = in.problems(d)
	return d, nil
}

// allowed are the sources that may ask at the KubeSwitch address.
func (in Input) allowed() []netip.Prefix {
	if in.Facts.KubeSwitch.Interface.Index == 0 {
		return nil
	}
	if len(in.Settings.Allowed) > 0 {
		return in.Settings.Allowed
	}
	return in.Facts.KubeSwitch.Subnets
}

func (in Input) kernel(d Desired, known []Source, clusterDNS []netip.Addr) *Kernel {
	k := &Kernel{
		Sysctls: LoopbackSysctls(),
		Hooks:   in.hooks(d), Listeners: in.listeners(d, clusterDNS), Sources: known, ReplyVia: replyVia(in.Facts.Pods),
		Zones: ZoneNames(d.Zones), Backends: backends(d.Endpoints), Fallback: backends(d.Fallback), Trials: make(map[string]Backend),
	}
	for zone, e := range d.Trials() {
		k.Trials[zone] = e.Backend()
	}
	if d.KubeSwitch.Index != 0 && d.Shared == nil {
		k.IngressFilter = d.KubeSwitch
	}
	return k
}

// loopbackIfindex is lo's in every network namespace: the kernel makes it first.
const loopbackIfindex = 1

// hooks returns those for replies, then those for queries.
func (in Input) hooks(d Desired) (hooks []Hook) {
	add := func(kind HookKind, name string, index int) {
		if hook := (Hook{kind, name, index}); !slices.Contains(hooks, hook) {
			hooks = append(hooks, hook)
		}
	}
	for _, e := range slices.Concat(d.Endpoints, d.Fallback) {
		if e.Steerable() {
			add(FromBackend, e.Way.Interface, e.Way.Ifindex)
		}
	}
	add(FromHost, "lo", loopbackIfindex)
	if d.KubeSwitch.Index != 0 {
		add(FromClient, d.KubeSwitch.Name, d.KubeSwitch.Index)
	}
	for _, i := range in.Facts.Pods {
		add(FromClient, i.Name, i.Index)
	}
	return hooks
}

// replyVia maps each Pod interface that is a bridge port to the bridge.
func replyVia(pods []Interface) map[uint32]uint32 {
	via := make(map[uint32]uint32)
	for _, i := range pods {
		if i.Bridge != 0 {
			via[uint32(i.Index)] = uint32(i.Bridge)
		}
	}
	return via
}

// problems returns those that follow from the plan itself.
func (in Input) problems(d Desired) (problems []Problem) {
	say := func(kind ProblemKind, format string, arguments ...any) {
		problems = append(problems, Problem{kind, fmt.Sprintf(format, arguments...)})
	}
	if address := in.Settings.KubeSwitchAddress; address.IsValid() && d.KubeSwitch.Index == 0 {
		say(ProblemKubeSwitch, "no interface has the KubeSwitch address %s: workers are not answered until one does", address)
	}
	switch {
	case len(d.Endpoints) == 0 && !in.Snapshot.Stale:
		say(ProblemEndpoints, "%s: cluster names are answered SERVFAIL", cmp.Or(in.Snapshot.Reason, "none of the cluster's endpoints can be asked"))
	case len(d.Endpoints) > 0 && !slices.ContainsFunc(d.Endpoints, Endpoint.Lives):
		say(ProblemEndpoints, "no endpoint answers: check that CoreDNS is running and that this host can reach it")
	}
	for _, e := range d.Endpoints {
		if e.Severed {
			say(ProblemWay, "the kernel's path to %s is broken: queries steered to it over %s are not answered, but direct ones are: nothing is steered to it: look for something that drops or changes its replies on %s (tc, XDP, VLAN tags, MTU)",
				e.Address, e.Way.Interface, e.Way.Interface)
		}
		if !e.Asked() {
			say(ProblemWay, "endpoint %s is not asked: %s", e.Address, e.Way.Astray)
		}
	}
	return problems
}
