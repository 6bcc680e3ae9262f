//go:build linux

package main

import "github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"

// addDiscoveryFlags adds the flags that say where in the cluster endpoints and zones are found.
func (s *settings) addDiscoveryFlags() {
	bind(s, s.names.StringVar, "dns-service", func(c *config.Config) *string { return &c.DNSService },
		"`NAMESPACE/NAME` of the Service in front of CoreDNS (default kube-system/kube-dns, else the one there with the label k8s-app=kube-dns)")
	bind(s, s.names.StringVar, "corefile-configmap", func(c *config.Config) *string { return &c.CorefileConfigMap },
		"`NAME` of the ConfigMap with the Corefile, in the namespace of the Service (default coredns, else the name of the Service)")
	bind(s, s.names.BoolVar, "stub-zones", func(c *config.Config) *bool { return &c.StubZones },
		"ask CoreDNS for the zones too that it only forwards")
	s.text("endpoint-preference", string(s.flags.EndpointPreference), "which ready endpoints to ask: all, node (those on this node) or zone (those for its topology zone)",
		func(c *config.Config, text string) error {
			c.EndpointPreference = config.EndpointPreference(text)
			return nil
		})
	bind(s, s.names.StringVar, "node-name", func(c *config.Config) *string { return &c.NodeName },
		"`NAME` of this host's Node, for --endpoint-preference (default: the host's name)")
}
