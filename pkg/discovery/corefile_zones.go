package discovery

import (
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// kubernetesPlugin is the plugin that answers for the cluster itself.
const kubernetesPlugin = "kubernetes"

// A plugin that answers names from data of its own, and its zones among its
// arguments. Without any it answers for the zones of its server block.
type authority struct {
	skip int                 // arguments before the first zone
	zone func(string) string // the zone in an argument, nil if it is the zone
}

// authorities are the plugins of CoreDNS, and the usual external ones, that serve
// zones themselves. (template may too: see answersAll.)
var authorities = map[string]authority{
	kubernetesPlugin: {},
	"k8s_external":   {},
	"k8s_gateway":    {},
	"multicluster":   {},
	"etcd":           {},
	"auto":           {},
	"secondary":      {},
	"nomad":          {},
	"dynupdate":      {},
	"file":           {skip: 1},                // file DBFILE [ZONES...]
	"hosts":          {skip: 1},                // hosts [FILE [ZONES...]]
	"template":       {skip: 2},                // template CLASS TYPE [ZONES...]
	"route53":        {zone: beforeFirstColon}, // route53 ZONE:HOSTED_ZONE_ID...
	"clouddns":       {zone: beforeFirstColon}, // clouddns ZONE:PROJECT:HOSTED_ZONE...
	"azure":          {zone: afterLastColon},   // azure RESOURCE_GROUP:ZONE...
	"erratic":        {},
	"whoami":         {},
}

// forwarders are the plugins that ask somebody else. Their first argument is the zone that they do so for.
var forwarders = []string{"forward", "grpc", "proxy", "fanout", "unbound"}

// helpers are the plugins that change how others answer, or for whom, or nothing.
// One that is in none of the lists is taken for one that answers, unless the block
// forwards.
var helpers = []string{
	"acl", "any", "autopath", "bind", "bufsize", "cache", "cancel", "chaos", "debug", "dns64", "dnssec", "dnstap",
	"errors", "geoip", "grpc_server", "header", "health", "https", "https3", "import", "loadbalance", "local",
	"log", "loop", "metadata", "minimal", "multisocket", "nsid", "on", "pprof", "prometheus", "proxyproto", "quic", "ready",
	"reload", "rewrite", "root", "shed", "siit", "sign", "timeouts", "tls", "trace", "transfer", "tsig", "view",
}

func beforeFirstColon(s string) string { zone, _, _ := strings.Cut(s, ":"); return zone }
func afterLastColon(s string) string   { return s[strings.LastIndex(s, ":")+1:] }

// servedZones are those of a Corefile.
type servedZones struct {
	cluster []string // the kubernetes plugin's, as written: the first one is the cluster's domain
	others  []string
	notes   []string // for a person: what can't be known from here, or is left out
	unclear bool     // some zone can't be known
}

func (s servedZones) names() []string { return distinct(slices.Concat(s.cluster, s.others)) }

// zones returns the zones that CoreDNS serves itself at one of ports, and with
// stubs also those that it forwards.
//
// Zones that would take somebody else's names are left out: the root, which is
// what a server block forwards by, and all of in-addr.arpa and ip6.arpa, which the
// usual Corefile names although the cluster has but a few addresses.
func (c *corefile) zones(ports []uint16, stubs bool) (servedZones, error) {
	r := zoneReader{ports: ports}
	for _, b := range c.blocks {
		scope := r.scope(b)
		if len(scope) == 0 {
			continue
		}
		r.read(b, scope)
		if stubs && b.has(forwarders...) {
			r.others = append(r.others, scope...)
		}
		if r.cost > maxCorefileWords {
			return servedZones{}, errCorefileTooLarge
		}
	}
	for _, file := range c.imports {
		r.note("the Corefile imports %s, which can't be seen from here: name the zones in it with --zone, beside all others", plain(file))
	}
	if slices.Contains(r.cluster, "") {
		r.note("the Corefile gives the kubernetes plugin the root zone, which holds all names: it is left out")
	}
	s := r.servedZones
	if r.noted > maxNotes {
		s.notes = append(s.notes, fmt.Sprintf("the Corefile gives reason for %d more notes", r.noted-maxNotes))
	}
	s.cluster = slices.DeleteFunc(distinct(s.cluster), tooWide)
	s.others = slices.DeleteFunc(distinct(s.others), tooWide)
	s.notes = distinct(s.notes)
	if len(s.cluster)+len(s.others) > maxCorefileZones {
		return servedZones{}, errCorefileTooLarge
	}
	return s, nil
}

// maxNotes bounds the notes about one Corefile.
const maxNotes = 16

// zoneReader collects zones.
type zoneReader struct {
	servedZones
	ports []uint16
	cost  int // names made and compared
	noted int // notes, those that are too many among them
}

func (r *zoneReader) note(format string, arguments ...any) {
	if r.noted++; r.noted <= maxNotes {
		r.notes = append(r.notes, fmt.Sprintf(format, arguments...))
	}
}

// parse reads zones, and notes what is none.
func (r *zoneReader) parse(texts ...string) (zones []string) {
	for _, text := range texts {
		found, err := zonesOf(text)
		if err != nil {
			r.note("%v", err)
			r.unclear = true
		}
		if r.cost += 1 + len(found); r.cost > maxCorefileWords {
			break
		}
		zones = append(zones, found...)
	}
	return zones
}

// scope returns the zones of the block's keys, if they are served as plain DNS at
// one of the ports, or at any as long as those are not known. A key without a port
// is served at the server's own, and one whose port only CoreDNS knows is taken for
// one of ours.
func (r *zoneReader) scope(b serverBlock) (scope []string) {
	for _, key := range b.keys {
		scheme, _, port := splitZone(key)
		number, err := strconv.ParseUint(port, 10, 16)
		if elsewhere := err == nil && len(r.ports) > 0 && !slices.Contains(r.ports, uint16(number)); elsewhere || scheme != "dns" {
			continue
		}
		scope = append(scope, r.parse(key)...)
	}
	return scope
}

// read collects the zones within scope that the block's plugins answer themselves: every name and every type of them.
// What falls through to servers that this host does not ask is none of them, but for the kubernetes plugin's own.
func (r *zoneReader) read(b serverBlock, scope []string) {
	answers := false
	var zones []string
	for _, plugin := range slices.Sorted(maps.Keys(b.plugins)) {
		a, ok := authorities[plugin]
		if !ok {
			continue
		}
		for _, use := range b.plugins[plugin] {
			named := use.args[min(a.skip, len(use.args)):]
			served := scope
			if len(named) > 0 {
				if a.zone != nil {
					named = slices.Clone(named)
					for i := range named {
						named[i] = a.zone(named[i])
					}
				}
				served = r.within(scope, r.parse(named...))
			}
			if plugin == kubernetesPlugin {
				r.cluster, answers = append(r.cluster, served...), true
				continue
			}
			if plugin == "template" && !b.answersAll(use) {
				continue
			}
			answers = true
			zones = append(zones, r.kept(b, use, served)...)
		}
	}
	if answers && b.has("rewrite") || len(zones) == 0 && !answers && !b.has(forwarders...) && b.hasUnknown() {
		zones = append(zones, slices.DeleteFunc(slices.Clone(scope), b.forwards)...)
	}
	if b.has("view") { // another block may answer this host
		if len(zones) > 0 {
			r.note("the Corefile answers %s to some clients only (view): name it with --zone, beside all others, if this host is one", few(zones))
		}
		return
	}
	slices.Sort(zones)
	r.others = append(r.others, zones...)
}

// kept are those of a plugin's zones that it answers to their end.
func (r *zoneReader) kept(b serverBlock, use pluginUse, zones []string) (kept []string) {
	through, falls := use.directive("fallthrough")
	if !falls {
		return zones
	}
	beyond := []string{""}
	if len(through) > 0 {
		beyond = r.parse(through...)
	}
	for _, zone := range zones {
		switch {
		case !r.meets(zone, beyond) || !b.forwards(zone):
			kept = append(kept, zone)
		case !tooWide(zone):
			r.note("the Corefile answers some names of %s, and forwards the others to servers that this host does not ask: it is left out; name it with --zone, beside all others, to have it from CoreDNS", zone)
		}
	}
	return kept
}

// answersAll reports whether a template answers every type, and has data of its own: the others only filter.
func (b serverBlock) answersAll(use pluginUse) bool {
	_, data := use.directive("answer")
	return data && len(use.args) > 1 && strings.EqualFold(use.args[1], "ANY")
}

// forwards reports whether the block sends names of a zone to servers of its own, not to those of its node's resolver file.
func (b serverBlock) forwards(zone string) bool {
	for _, plugin := range forwarders {
		for _, use := range b.plugins[plugin] {
			if len(use.args) == 0 {
				return true
			}
			own := slices.ContainsFunc(use.args[1:], func(to string) bool { return !path.IsAbs(to) })
			from, err := zonesOf(use.args[0])
			concerns := err != nil || slices.ContainsFunc(from, func(f string) bool { return cluster.Below(zone, f) || cluster.Below(f, zone) })
			except, _ := use.directive("except")
			if own && concerns && !slices.ContainsFunc(except, func(e string) bool {
				zones, err := zonesOf(e)
				return err == nil && slices.ContainsFunc(zones, func(e string) bool { return cluster.Below(zone, e) })
			}) {
				return true
			}
		}
	}
	return false
}

func (b serverBlock) has(plugins ...string) bool {
	return slices.ContainsFunc(plugins, func(p string) bool { _, ok := b.plugins[p]; return ok })
}

// hasUnknown reports whether the block has a plugin that may answer.
func (b serverBlock) hasUnknown() bool {
	for plugin := range b.plugins {
		if _, known := authorities[plugin]; !known && !slices.Contains(helpers, plugin) && !slices.Contains(forwarders, plugin) {
			return true
		}
	}
	return false
}

// within cuts zones to scope: of two zones of which one is below the other, the
// lower one.
func (r *zoneReader) within(scope, zones []string) []string {
	if r.cost += len(scope) * len(zones); r.cost > maxCorefileWords {
		return nil
	}
	var out []string
	for _, s := range scope {
		for _, z := range zones {
			switch {
			case cluster.Below(z, s):
				out = append(out, z)
			case cluster.Below(s, z):
				out = append(out, s)
			}
		}
	}
	return out
}

// meets reports whether zone has names in common with one of others.
func (r *zoneReader) meets(zone string, others []string) bool {
	r.cost += len(others)
	return slices.ContainsFunc(others, func(o string) bool { return cluster.Below(zone, o) || cluster.Below(o, zone) })
}

// splitZone takes a zone of a Corefile apart as CoreDNS does: SCHEME://ZONE:PORT, of which it ignores scheme and port but in
// a server block's key.
func splitZone(text string) (scheme, name, port string) {
	scheme, name = "dns", text
	if s, rest, ok := strings.Cut(text, "://"); ok {
		scheme, name = strings.ToLower(s), rest
	}
	if i := strings.LastIndexByte(name, ':'); i >= 0 {
		port := name[i+1:]
		if _, err := strconv.Atoi(port); err == nil || strings.HasPrefix(port, "{"+masked) && strings.HasSuffix(port, "}") {
			return scheme, name[:i], port
		}
	}
	return scheme, name, ""
}

// zonesOf reads a zone of a Corefile: a name, or a range of addresses that stands
// for its reverse zones. The root is the empty string.
func zonesOf(text string) ([]string, error) {
	_, name, _ := splitZone(text)
	if prefix, err := netip.ParsePrefix(name); err == nil {
		return cluster.ReverseZones(prefix)
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if name == "" {
		return []string{""}, nil
	}
	if strings.Contains(name, masked) {
		return nil, fmt.Errorf("the Corefile's zone %s is known to CoreDNS only: name it with --zone, beside all others", plain(text))
	}
	if !isZoneName(name) {
		return nil, fmt.Errorf("the Corefile's zone %q is not a name that queries can be steered for", text)
	}
	return []string{name}, nil
}

// plain is a word of the Corefile as it was written.
func plain(text string) string {
	if text == masked {
		return "(in quotes)"
	}
	return printable(strings.ReplaceAll(text, masked, ""))
}

// isZoneName accepts names of letters, digits, hyphens and underscores, within the limits of RFC 1035 section 2.3.4, and
// what RFC 2317 has beside them. An address is no zone, whatever it looks like.
func isZoneName(name string) bool {
	if _, err := netip.ParseAddr(name); err == nil || len(name) > 253 {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 {
			return false
		}
		for _, octet := range []byte(label) {
			switch {
			case 'a' <= octet && octet <= 'z', 'A' <= octet && octet <= 'Z', '0' <= octet && octet <= '9', octet == '-', octet == '_':
			case octet == '/' && cluster.Below(name, "in-addr.arpa"):
			default:
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
func distinct(texts []string) []string {
	var out []string
	seen := make(map[string]struct{}, len(texts))
	for _, t := range texts {
		if _, ok := seen[t]; !ok {
			seen[t] = struct{}{}
			out = append(out, t)
		}
	}
	return out
}
