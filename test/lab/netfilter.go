package lab

import (
	"context"
	"fmt"
	"strconv"
	"strings"
)

// kubeProxyRules is what kube-proxy does for the kube-dns Service: DNAT of its address to a random endpoint, in
// prerouting and for the host's own packets, and masquerading of what was translated.
const kubeProxyRules = `
table %[1]s kube-proxy {
	chain service-kube-dns {
		meta mark set meta mark or 0x4000
		meta l4proto { tcp, udp } dnat to numgen random mod 2 map { 0 : %[3]s, 1 : %[4]s }
	}
	chain services {
		%[1]s daddr %[2]s meta l4proto { tcp, udp } th dport 53 goto service-kube-dns
	}
	chain nat-prerouting {
		type nat hook prerouting priority dstnat; policy accept;
		jump services
	}
	chain nat-output {
		type nat hook output priority -100; policy accept;
		jump services
	}
	chain nat-postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		meta mark & 0x4000 == 0x4000 masquerade fully-random
	}
}
`

// LoadKubeProxyLikeRules gives host0 the NAT rules that kube-proxy would, and with them connection tracking. From then
// on the kube-dns Service addresses answer, from the host and from whoever routes through it.
func (l *Lab) LoadKubeProxyLikeRules(ctx context.Context) error {
	cmd := l.Host().Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(fmt.Sprintf(kubeProxyRules, "ip", KubeDNS4, CoreDNS0v4, CoreDNS1v4) +
		fmt.Sprintf(kubeProxyRules, "ip6", KubeDNS6, CoreDNS0v6, CoreDNS1v6))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("load NAT rules into host0: %w: %s", err, out)
	}
	return nil
}

// Conntrack is what the connection tracking of a node knows.
type Conntrack struct {
	// Entries as `conntrack -L` prints them, both IP versions.
	Entries []string
	// Stats are the counters of `conntrack -S` added up over the processors, for example "insert_failed".
	Stats map[string]uint64
}

// Matching lists the entries that contain all the given texts, for example "dport=53".
func (c *Conntrack) Matching(texts ...string) []string {
	var found []string
entries:
	for _, e := range c.Entries {
		for _, text := range texts {
			if !strings.Contains(e+" ", text+" ") { // whole fields: "dport=53" is not "dport=5353"
				continue entries
			}
		}
		found = append(found, e)
	}
	return found
}

// Conntrack lists host0's connection tracking.
func (l *Lab) Conntrack(ctx context.Context) (*Conntrack, error) { return l.Host().Conntrack(ctx) }

// Conntrack lists the node's connection tracking.
func (n *Node) Conntrack(ctx context.Context) (*Conntrack, error) {
	c := &Conntrack{Stats: make(map[string]uint64)}
	for _, family := range []string{"ipv4", "ipv6"} {
		out, err := n.Output(ctx, "conntrack", "-L", "-f", family)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(out) {
			c.Entries = append(c.Entries, strings.TrimSpace(line))
		}
	}
	out, err := n.Output(ctx, "conntrack", "-S")
	if err != nil {
		return nil, err
	}
	for _, field := range strings.Fields(out) {
		name, value, ok := strings.Cut(field, "=")
		if number, err := strconv.ParseUint(value, 10, 64); ok && name != "cpu" && err == nil {
			c.Stats[name] += number
		}
	}
	return c, nil
}
