package diagnose

import (
	"strings"

	"github.com/miekg/dns"
)

// candidates are the names that a resolver asks for, in its order: resolv.conf(5), "search" and "ndots". A name with a
// final dot is taken as it is.
func candidates(name string, search []string, dots int) []string {
	if dns.IsFqdn(name) {
		return []string{name}
	}
	var listed []string
	for _, domain := range search {
		if domain = strings.TrimSuffix(domain, "."); domain != "" {
			listed = append(listed, name+"."+domain+".")
		}
	}
	if strings.Count(name, ".") >= dots {
		return append([]string{name + "."}, listed...)
	}
	return append(listed, name+".")
}

// inZone returns the zone that a name is in, without its final dot.
func inZone(name string, zones []string) (zone string, ok bool) {
	for _, zone := range zones {
		if dns.IsSubDomain(dns.Fqdn(zone), name) {
			return strings.TrimSuffix(zone, "."), true
		}
	}
	return "", false
}

// serviceOf reads a Service out of a name by the Kubernetes DNS specification: [labels.]service.namespace.svc.zone.
func serviceOf(name string, zones []string) (namespace, service string, ok bool) {
	zone, ok := inZone(name, zones)
	if !ok {
		return "", "", false
	}
	labels := dns.SplitDomainName(strings.ToLower(name))
	labels = labels[:len(labels)-len(dns.SplitDomainName(zone))]
	if len(labels) < 3 || labels[len(labels)-1] != "svc" {
		return "", "", false
	}
	return labels[len(labels)-2], labels[len(labels)-3], true
}
