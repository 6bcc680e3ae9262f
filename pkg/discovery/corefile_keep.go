package discovery

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// byAsker are the plugins with which an answer depends on who asks, or on the transport.
var byAsker = []string{"acl", "view", "autopath", "geoip", "dns64", "whoami", "erratic"}

// keeping says whether answers of a zone may be kept, why not, and whether what changes them is no object of the cluster. It is judged by the
// server blocks that answer names of the zone: the one with the longest zone above it, and those below it.
func (c *corefile) keeping(zone string, ports []uint16) (uncached string, unvouched bool) {
	if len(c.imports) > 0 {
		return "the Corefile imports " + plain(c.imports[0]) + ", which can't be seen from here", true
	}
	blocks := c.answering(zone, ports)
	for _, block := range blocks {
		why, more := block.keeping(zone)
		if why != "" {
			return why, true
		}
		unvouched = unvouched || more
	}
	return "", unvouched || len(blocks) == 0
}

// answering returns the server blocks that answer names of a zone, or may.
func (c *corefile) answering(zone string, ports []uint16) (blocks []serverBlock) {
	longest := -1
	above := make(map[int][]serverBlock) // by the length of the zone
	reader := zoneReader{ports: ports}
	for _, block := range c.blocks {
		scopes := reader.scope(block)
		if reader.unclear { // which zones a block answers is known to CoreDNS only: this one, perhaps
			blocks, reader.unclear = append(blocks, block), false
			continue
		}
		for _, scope := range scopes {
			switch {
			case cluster.Below(zone, scope):
				longest = max(longest, len(scope))
				above[len(scope)] = append(above[len(scope)], block)
			case cluster.Below(scope, zone):
				blocks = append(blocks, block)
			}
		}
	}
	return append(blocks, above[longest]...)
}

func (b serverBlock) keeping(zone string) (uncached string, unvouched bool) {
	for _, plugin := range slices.Sorted(maps.Keys(b.plugins)) {
		_, answers := authorities[plugin]
		switch {
		case slices.Contains(byAsker, plugin):
			return fmt.Sprintf("with the plugin %s, answers depend on who asks", plugin), true
		case plugin == "rewrite" || plugin == "template":
			if b.looksAtAsker(plugin) {
				return fmt.Sprintf("with the plugin %s, as it is used, answers depend on who asks", plugin), true
			}
			unvouched = true
		case plugin == kubernetesPlugin: // nobody tells of labels, nor of another cluster's objects
			unvouched = unvouched || b.hasDirective(plugin, "labels", "namespace_labels", "endpoint", "kubeconfig", "multicluster")
		case plugin == "loadbalance" && b.ordersBy(plugin):
			return "with the plugin loadbalance, as it is used, the order of addresses has a meaning", true
		case plugin == "cache": // an old answer that is given as a new one
			unvouched = unvouched || b.hasDirective(plugin, "keepttl")
		case slices.Contains(forwarders, plugin):
		case answers:
			unvouched = unvouched || b.serves(plugin, zone)
		case !slices.Contains(helpers, plugin):
			return fmt.Sprintf("what the plugin %s does is not known", plugin), true
		}
	}
	return "", unvouched
}

func (b serverBlock) hasDirective(plugin string, names ...string) bool {
	return slices.ContainsFunc(b.plugins[plugin], func(use pluginUse) bool {
		return slices.ContainsFunc(names, func(name string) bool {
			_, ok := use.directive(name)
			return ok
		})
	})
}

// ordersBy reports whether loadbalance does more than to let addresses take turns (weighted, prefer).
func (b serverBlock) ordersBy(plugin string) bool {
	return slices.ContainsFunc(b.plugins[plugin], func(use pluginUse) bool {
		return len(use.directives) > 0 || len(use.args) > 0 && (use.args[0] != "round_robin" || len(use.args) > 1)
	})
}

var (
	ofQuery     = regexp.MustCompile(`\.(Remote|Meta|Message)\b`) // in a template
	placeholder = regexp.MustCompile(`\{[^0-9}]`)                 // in a rewrite; {1} is of the name
)

// looksAtAsker reports whether a rewrite or a template takes more of a query than its question.
func (b serverBlock) looksAtAsker(plugin string) bool {
	asks := func(words []string) bool {
		return slices.ContainsFunc(words, func(word string) bool {
			return word == "edns0" || strings.Contains(word, masked) || ofQuery.MatchString(word) || plugin == "rewrite" && placeholder.MatchString(word)
		})
	}
	return slices.ContainsFunc(b.plugins[plugin], func(use pluginUse) bool {
		return asks(use.args) || slices.ContainsFunc(use.directives, asks)
	})
}

// serves reports whether a plugin has data for names of a zone.
func (b serverBlock) serves(plugin, zone string) bool {
	a := authorities[plugin]
	return slices.ContainsFunc(b.plugins[plugin], func(use pluginUse) bool {
		named := use.args[min(a.skip, len(use.args)):]
		return len(named) == 0 || a.zone != nil || slices.ContainsFunc(named, func(text string) bool {
			zones, err := zonesOf(text)
			return err != nil || slices.ContainsFunc(zones, func(z string) bool { return cluster.Below(zone, z) || cluster.Below(z, zone) })
		})
	})
}
