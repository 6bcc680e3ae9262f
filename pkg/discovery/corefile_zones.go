package discovery

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// A plugin that answers names from data of its own, and its zones among its
// arguments. Without any it answers for the zones of its server block.
type authority struct {
	skip int                 // arguments before the first zone
	zone func(string) string // the zone in an argument, nil if it is the zone
}

// authorities are the plugins of CoreDNS, and the usual external ones, that serve
// zones themselves.
var authorities = map[string]authority{
	"kubernetes":   {},
	"k8s_external": {},
	"multicluster": {},
	"etcd":         {},
	"auto":         {},
	"secondary":    {},
	"nomad":        {},
	"file":         {skip: 1},                // file DBFILE [ZONES...]
	"hosts":        {skip: 1},                // hosts [FILE [ZONES...]]
	"template":     {skip: 2},                // template CLASS TYPE [ZONES...]
	"route53":      {zone: beforeFirstColon}, // route53 ZONE:HOSTED_ZONE_ID...
	"clouddns":     {zone: beforeFirstColon}, // clouddns ZONE:PROJECT:HOSTED_ZONE...
	"azure":        {zone: afterLastColon},   // azure RESOURCE_GROUP:ZONE...
	"erratic":      {},
	"whoami":       {},
}

// forwarders are the plugins that ask somebody else.
var forwarders = []string{"forward", "grpc", "proxy", "fanout", "unbound"}

// helpers are the plugins that change how others answer, or nothing. One that is
// in none of the lists is taken for one that answers, unless the block forwards.
var helpers = []string{
	"acl", "any", "autopath", "bind", "bufsize", "cache", "cancel", "chaos", "debug", "dns64", "dnssec", "dnstap",
	"dynupdate", "errors", "geoip", "grpc_server", "header", "health", "https", "https3", "import", "loadbalance", "local",
	"log", "loop", "metadata", "minimal", "multisocket", "nsid", "on", "pprof", "prometheus", "proxyproto", "quic", "ready",
	"reload", "rewrite", "root", "shed", "siit", "sign", "timeouts", "tls", "trace", "transfer", "tsig", "view",
}

func beforeFirstColon(s string) string { zone, _, _ := strings.Cut(s, ":"); return zone }
func afterLastColon(s string) string   { return s[strings.LastIndex(s, ":")+1:] }

// zones returns the zones that CoreDNS serves itself at one of ports, those of the
// kubernetes plugin first, and with stubs also those that it forwards. notes say,
// for a person, what can't be known from here.
//
// Zones that would take somebody else's names are left out: the root, which is
// what a server block forwards by, and all of in-addr.arpa and ip6.arpa, which the
// usual Corefile names although the cluster has but a few addresses.
func (c *corefile) zones(ports []uint16, stubs bool) (names, notes []string) {
	var cluster, others []string
	for _, b := range c.blocks {
		scope, unclear := b.scope(ports)
		notes = append(notes, unclear...)
		if len(scope) == 0 {
			continue
		}
		served, unclear := b.served(scope)
		notes = append(notes, unclear...)
		if _, ok := b.plugins["kubernetes"]; ok {
			cluster = append(cluster, served...)
		} else {
			others = append(others, served...)
		}
		if stubs && b.has(forwarders...) {
			others = append(others, scope...)
		}
	}
	for _, file := range c.imports {
		notes = append(notes, fmt.Sprintf("the Corefile imports %s, which can't be seen from here: name the zones in it with --zone, beside all others", plain(file)))
	}
	names = slices.DeleteFunc(unique(slices.Concat(cluster, others)), tooWide)
	return names, unique(notes)
}

// scope returns the zones of the block's keys, if they are served as plain DNS at
// one of the ports. A key without a port is served at the server's own.
func (b serverBlock) scope(ports []uint16) (zones, notes []string) {
	for _, key := range b.keys {
		name := key
		if scheme, rest, ok := strings.Cut(key, "://"); ok {
			if scheme != "dns" {
				continue
			}
			name = rest
		}
		if i := strings.LastIndexByte(name, ':'); i >= 0 {
			if port, err := strconv.ParseUint(name[i+1:], 10, 16); err == nil {
				if !slices.Contains(ports, uint16(port)) {
					continue
				}
				name = name[:i]
			}
		}
		found, err := zonesOf(name)
		if err != nil {
			notes = append(notes, err.Error())
		}
		zones = append(zones, found...)
	}
	return zones, notes
}

// served returns the zones within scope that the block's plugins answer
// themselves.
func (b serverBlock) served(scope []string) (zones, notes []string) {
	whole := false // scope itself is answered
	for plugin, a := range authorities {
		for _, arguments := range b.plugins[plugin] {
			arguments = arguments[min(a.skip, len(arguments)):]
			whole = whole || len(arguments) == 0 || b.has("rewrite")
			for _, argument := range arguments {
				if a.zone != nil {
					argument = a.zone(argument)
				}
				found, err := zonesOf(argument)
				if err != nil {
					notes = append(notes, err.Error())
				}
				zones = append(zones, within(scope, found)...)
			}
		}
	}
	whole = whole || len(zones) == 0 && !b.has(forwarders...) && b.hasUnknown()
	if whole {
		zones = append(zones, scope...)
	}
	slices.Sort(zones) // the plugins come from a map
	slices.Sort(notes)
	return b.asWritten(zones), notes
}

// asWritten puts the zones of the kubernetes plugin first, in their order: the
// first one is the cluster's domain.
func (b serverBlock) asWritten(zones []string) []string {
	var first []string
	for _, arguments := range b.plugins["kubernetes"] {
		for _, argument := range arguments {
			if found, err := zonesOf(argument); err == nil {
				for _, zone := range found {
					if slices.Contains(zones, zone) {
						first = append(first, zone)
					}
				}
			}
		}
	}
	return append(first, zones...)
}

func (b serverBlock) has(plugins ...string) bool {
	return slices.ContainsFunc(plugins, func(p string) bool { _, ok := b.plugins[p]; return ok })
}

// hasUnknown reports whether the block has a plugin that may answer.
func (b serverBlock) hasUnknown() bool {
	for plugin := range b.plugins {
		if !slices.Contains(helpers, plugin) && !slices.Contains(forwarders, plugin) {
			return true
		}
	}
	return false
}

// within cuts zones to scope: of two zones of which one is below the other, the
// lower one.
func within(scope, zones []string) []string {
	var out []string
	for _, s := range scope {
		for _, z := range zones {
			switch {
			case below(z, s):
				out = append(out, z)
			case below(s, z):
				out = append(out, s)
			}
		}
	}
	return out
}

// below reports whether zone is parent or in it.
func below(zone, parent string) bool {
	return parent == "" || zone == parent || strings.HasSuffix(zone, "."+parent)
}

// zonesOf reads a zone of a Corefile: a name, or a range of addresses that stands
// for its reverse zones. The root is the empty string.
func zonesOf(text string) ([]string, error) {
	if prefix, err := netip.ParsePrefix(text); err == nil {
		return ReverseZones(prefix)
	}
	name := strings.ToLower(strings.TrimSuffix(text, "."))
	if text == "." || name == "" {
		return []string{""}, nil
	}
	if strings.Contains(name, masked) {
		return nil, fmt.Errorf("the Corefile's zone %s is known to CoreDNS only: name it with --zone, beside all others", plain(text))
	}
	if !isZoneName(name) {
		return nil, fmt.Errorf("the Corefile's zone %q is no name that queries can be steered for", text)
	}
	return []string{name}, nil
}

// plain is a word of the Corefile as it was written.
func plain(text string) string {
	if text == masked {
		return "(in quotes)"
	}
	return strings.ReplaceAll(text, masked, "")
}

// isZoneName accepts names in printable ASCII without escapes, within the limits
// of RFC 1035 section 2.3.4.
func isZoneName(name string) bool {
	if len(name) > 253 {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 {
			return false
		}
		for _, octet := range []byte(label) {
			if octet <= ' ' || octet > '~' || octet == '\\' {
				return false
			}
		}
	}
	return true
}

// tooWide reports whether zone holds names of others than the cluster.
func tooWide(zone string) bool {
	return slices.Contains([]string{"", "arpa", "in-addr.arpa", "ip6.arpa"}, zone)
}

// unique drops repetitions and keeps the order.
func unique(texts []string) []string {
	var out []string
	for _, t := range texts {
		if !slices.Contains(out, t) {
			out = append(out, t)
		}
	}
	return out
}
