package config

//go:generate go test -run TestSettingsDocument . -args -update

import (
	"net/netip"
	"time"
)

// table describes all settings. A new one needs a field in Config and a row here.
var table = []Setting{
	word(Setting{Key: "topology", Flag: "topology", Usage: "kind of host"},
		func(c *Config) *Topology { return &c.Topology }, TopologyNativeLinux, TopologyNativeLinux),

	text(Setting{
		Key: "kubeconfig", Flag: "kubeconfig", Usage: "kubeconfig `FILE`", Example: "/etc/kubernetes/admin.conf", Live: true,
		Otherwise: "$KUBECONFIG, the sudo user's, root's, /etc/kubernetes/admin.conf, in-cluster",
	}, func(c *Config) *string { return &c.Kubeconfig }, "", nil),
	list(Setting{
		Key: "dnsEndpoints", Flag: "dns-endpoint", Usage: "`IP[:PORT]` of a CoreDNS to ask", Example: `[172.20.0.10, "172.20.0.11:53"]`,
		Live: true, Otherwise: "discovered",
	}, func(c *Config) *[]netip.AddrPort { return &c.DNSEndpoints }, ParseServer, checkServer),
	text(Setting{
		Key: "dnsService", Flag: "dns-service", Usage: "`NAMESPACE/NAME` of the Service in front of CoreDNS", Example: "kube-system/kube-dns",
		Live: true, Otherwise: "kube-system/kube-dns, else the one there with the label k8s-app=kube-dns",
	}, func(c *Config) *string { return &c.DNSService }, "", checkService),
	text(Setting{
		Key: "corefileConfigMap", Flag: "corefile-configmap", Usage: "`NAME` of the ConfigMap with the Corefile, in the namespace of the Service",
		Example: "coredns", Live: true, Otherwise: "coredns, else the name of the Service",
	}, func(c *Config) *string { return &c.CorefileConfigMap }, "", nil),
	toggle(Setting{
		Key: "stubZones", Flag: "stub-zones", Usage: "also ask CoreDNS for zones that it only forwards", Live: true,
	}, func(c *Config) *bool { return &c.StubZones }, false),
	word(Setting{
		Key: "endpointPreference", Flag: "endpoint-preference", Live: true,
		Usage: "which ready endpoints to ask: all, node (those on this node) or zone (those for its topology zone)",
	}, func(c *Config) *EndpointPreference { return &c.EndpointPreference }, PreferAll, PreferAll, PreferNode, PreferZone),
	text(Setting{
		Key: "nodeName", Flag: "node-name", Usage: "`NAME` of this host's Node, for the endpoint preference", Example: "k2s-master", Live: true,
		Otherwise: "the host's name",
	}, func(c *Config) *string { return &c.NodeName }, "", nil),

	list(Setting{
		Key: "zones", Flag: "zone", Usage: "cluster zone `NAME`", Example: "[cluster.local]", Live: true,
		Otherwise: "those of the Corefile; " + DefaultZone + " if there is none",
	}, func(c *Config) *[]string { return &c.Zones }, asIs, checkZone),
	list(Setting{
		Key: "serviceCIDRs", Flag: "service-cidr", Usage: "range of Service addresses, `PREFIX`, whose reverse zones belong to the cluster",
		Example: "[172.21.0.0/16]", Live: true, Otherwise: "those of the ServiceCIDR objects",
	}, func(c *Config) *[]netip.Prefix { return &c.ServiceCIDRs }, parsePrefix, nil),
	list(Setting{
		Key: "podCIDRs", Flag: "pod-cidr", Usage: "range of Pod addresses, `PREFIX`, whose reverse zones belong to the cluster",
		Example: "[172.20.0.0/16]", Live: true, Otherwise: "the nodes' podCIDRs",
	}, func(c *Config) *[]netip.Prefix { return &c.PodCIDRs }, parsePrefix, nil),
	list(Setting{
		Key: "upstreams", Flag: "upstream", Usage: "`IP[:PORT]` of a server for all other names", Example: "[192.0.2.53]", Live: true,
		Otherwise: "those of the resolver configuration",
	}, func(c *Config) *[]netip.AddrPort { return &c.Upstreams }, ParseServer, checkServer),

	kubeSwitch(Setting{
		Key: "kubeswitchAddress", Flag: "kubeswitch-address", Usage: "this host's `IP` on the KubeSwitch, or none", Example: "172.19.1.1",
		Otherwise: DefaultKubeSwitchAddress.String() + " when an interface has it",
	}),
	list(Setting{
		Key: "allowed", Flag: "allow", Usage: "`PREFIX` that may ask at the KubeSwitch address", Example: "[172.19.1.0/24]", Live: true,
		Otherwise: "the subnets of its interface",
	}, func(c *Config) *[]netip.Prefix { return &c.Allowed }, parsePrefix, nil),
	list(Setting{
		Key: "pods", Flag: "pods", Example: "[cni0]", Live: true,
		Usage: "`PATTERN` of interfaces that lead to Pods, such as cni0, veth*, cali*: their queries to the cluster's DNS address are steered too",
	}, func(c *Config) *[]string { return &c.Pods }, asIs, checkPattern),
	list(Setting{
		Key: "clusterDNS", Flag: "cluster-dns", Usage: "`IP` that pods ask", Example: "[172.21.0.10]", Live: true,
		Otherwise: "the addresses of the kube-dns Service",
	}, func(c *Config) *[]netip.Addr { return &c.ClusterDNS }, parseAddress, checkOwn),

	word(Setting{
		Key: "resolver", Flag: "resolver", Anchors: true,
		Usage: "what to do with the resolver configuration: takeover, transparent (leave it, and steer queries to the host's own resolver on loopback) or none",
	}, func(c *Config) *ResolverMode { return &c.Resolver }, ResolverTakeover, ResolverTakeover, ResolverTransparent, ResolverNone),
	word(Setting{
		Key: "onForeignChange", Flag: "on-foreign-change", Live: true,
		Usage: "when somebody else rewrites the resolver configuration: retake it (and let detach restore theirs), or yield",
	}, func(c *Config) *ChangePolicy { return &c.OnForeignChange }, ChangeRetake, ChangeRetake, ChangeYield),
	toggle(Setting{
		Key: "inPlace", Flag: "in-place", Usage: "overwrite a resolver configuration that can't be exchanged because it is a bind mount, as in a container",
	}, func(c *Config) *bool { return &c.InPlace }, false),
	toggle(Setting{
		Key: "overrideImmutable", Flag: "override-immutable",
		Usage: "remove the attribute of chattr +i or +a from the resolver configuration while attached",
	}, func(c *Config) *bool { return &c.OverrideImmutable }, false),
	toggle(Setting{
		Key: "bpf", Flag: "no-bpf", Negated: true, Usage: "do everything in user space", Anchors: true,
	}, func(c *Config) *bool { return &c.BPF }, true),

	toggle(Setting{
		Key: "cache", Flag: "no-cache", Negated: true, Live: true,
		Usage: "keep no answers, neither for the kernel nor in the forwarder: ask for each query",
	}, func(c *Config) *bool { return &c.Cache }, true),
	number(Setting{
		Key: "cacheEntries", Flag: "cache-entries", Usage: "`NUMBER` of answers that the kernel has room for, 64 to 262144; there is room for an eighth as many large ones beside",
	}, func(c *Config) *int { return &c.CacheEntries }, DefaultCacheEntries, checkEntries),
	list(Setting{
		Key: "cacheOff", Flag: "cache-off", Usage: "zone `NAME` of which no answer is kept, and of all below it", Example: "[ingress.cluster.local]", Live: true,
	}, func(c *Config) *[]string { return &c.CacheOff }, asIs, checkZone),

	duration(Setting{
		Key: "wait", Flag: "wait", Usage: "how long to wait for the cluster", Live: true,
	}, func(c *Config) *time.Duration { return &c.Wait }, DefaultWait, checkWait),
	duration(Setting{
		Key: "linger", Flag: "linger", Live: true,
		Usage: "how long the daemon keeps answering after a detach, at least; 0 turns that off. It ends once nobody has asked it for half of that time, or after six times as long",
	}, func(c *Config) *time.Duration { return &c.Linger }, DefaultLinger, checkLinger),

	text(Setting{
		Key: "resolvConf", Flag: "resolv-conf", Common: true, Usage: "resolver configuration `FILE` of the host", Anchors: true,
	}, func(c *Config) *string { return &c.ResolvConf }, DefaultResolvConf, checkPath),
	text(Setting{
		Key: "stateDir", Flag: "state-dir", Common: true, Usage: "`DIR` of the journal, which must survive a reboot",
	}, func(c *Config) *string { return &c.StateDir }, DefaultStateDir, checkPath),
	text(Setting{
		Key: "runDir", Flag: "run-dir", Common: true, Usage: "`DIR` of the lock and the control socket",
	}, func(c *Config) *string { return &c.RunDir }, DefaultRunDir, checkPath),
	text(Setting{
		Key: "bpffs", Flag: "bpffs", Common: true, Usage: "`DIR` on a BPF file system for the pins", Anchors: true,
	}, func(c *Config) *string { return &c.BPFFS }, DefaultBPFFS, checkPath),
	text(Setting{
		Key: "logLevel", Flag: "log-level", Common: true, Usage: "log `LEVEL`: debug, info, warn or error",
	}, func(c *Config) *string { return &c.LogLevel }, DefaultLogLevel, nil),
}
