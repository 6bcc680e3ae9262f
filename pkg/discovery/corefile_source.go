package discovery

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// corefilePlace is a key of a ConfigMap.
type corefilePlace struct{ configMap, key string }

// corefileSource is where the Corefile is.
type corefileSource struct {
	corefilePlace
	layout layout // of the container that reads it, zero if that is not known
}

// readCorefile is the newest Corefile that could be read, and what was made of it. The zero value is none.
type readCorefile struct {
	source corefileSource
	parsed *corefile // nil if there was no good one yet
	served []string  // its zones, the cluster's domain first
	domain []string  // those of the cluster itself
	unseen int       // imports that could not be seen

	// gone are zones that an earlier one had, and whether they were the cluster's: somebody may still use their names.
	gone map[string]bool

	input *corefileInput // that was read last, good or not
	err   error          // of it
}

// corefileInput is all that a Corefile is made from.
type corefileInput struct {
	configMap, text, path string
	container             container
}

func (a *corefileInput) equal(b *corefileInput) bool {
	return a != nil && a.configMap == b.configMap && a.text == b.text && a.path == b.path && maps.Equal(a.container.files, b.container.files) && maps.Equal(a.container.dirs, b.container.dirs)
}

// fallbackMaps are the ConfigMaps that may have the Corefile of a Service whose workload does not say so: those by the
// usual name and by the Service's own, which Helm's chart gives to both. One without a selector is of nobody's chart:
// nothing else is asked for than the likelier of the two.
func (w *Watcher) fallbackMaps(service *corev1.Service) []string {
	names := []string{w.name, DefaultConfigMap}
	if w.name == DefaultService {
		slices.Reverse(names)
	}
	if len(service.Spec.Selector) == 0 {
		names = names[:1]
	}
	return distinct(names)
}

// layout finds out how the container behind the Service reads its Corefile.
func (w *Watcher) layout(service *corev1.Service) layout {
	return behind(service.Spec.Selector, templates(stored[*appsv1.Deployment](w.optional.deployments), stored[*appsv1.DaemonSet](w.optional.daemonSets)))
}

// seekCorefile starts what is needed to find the Corefile, step by step: nothing is asked for that is not. w.mu is held.
func (w *Watcher) seekCorefile(s *starter, service *corev1.Service) {
	o := &w.optional
	if len(service.Spec.Selector) > 0 {
		if !s.need(&o.deployments, func() *request { return deploymentRequest(w.api, w.opts.Namespace, w.timeouts, w.health) }, &appsv1.Deployment{}) {
			return
		}
		if w.layout(service).corefile == "" &&
			!s.need(&o.daemonSets, func() *request { return daemonSetRequest(w.api, w.opts.Namespace, w.timeouts, w.health) }, &appsv1.DaemonSet{}) {
			return
		}
	}
	l := w.layout(service)
	for _, name := range l.configMaps() {
		w.needConfigMap(s, name)
	}
	switch {
	case w.opts.ConfigMap != "":
		w.needConfigMap(s, w.opts.ConfigMap)
		return
	case l.corefile != "":
		return
	}
	for _, name := range w.fallbackMaps(service) {
		if !w.needConfigMap(s, name) {
			return
		}
		if data, known := w.configMap(name); !known || data[corefileName] != "" {
			return
		}
	}
	if len(service.Spec.Selector) == 0 {
		return
	}
	s.need(&o.labelledMaps, func() *request { return labelledMapRequest(w.api, w.opts.Namespace, w.timeouts, w.health) }, &corev1.ConfigMap{})
}

// configMap returns what a ConfigMap holds, nothing for one that does not exist, and whether that is known.
func (w *Watcher) configMap(name string) (data map[string]string, known bool) {
	i := w.optional.configMaps[name]
	if i == nil || i.SharedIndexInformer == nil || !i.HasSynced() {
		return nil, false
	}
	for _, m := range stored[*corev1.ConfigMap](*i) {
		if m.Name == name {
			data = m.Data
		}
	}
	return data, true
}

func (w *Watcher) hasCorefile(name string) bool {
	data, _ := w.configMap(name)
	_, ok := data[corefileName]
	return ok
}

// findCorefile returns the Corefile's place and text. Without one, looked says where it could have been, and is empty as
// long as that is not known.
func (w *Watcher) findCorefile() (source corefileSource, text string, looked []string) {
	service := w.service()
	if service == nil {
		return source, "", nil
	}
	source.layout = w.layout(service)
	places := source.layout.sources()
	switch {
	case w.opts.ConfigMap != "":
		places = []corefilePlace{{w.opts.ConfigMap, corefileName}}
	case len(places) == 0:
		for _, name := range w.fallbackMaps(service) {
			places = append(places, corefilePlace{name, corefileName})
		}
	}
	for _, place := range places {
		data, known := w.configMap(place.configMap)
		if !known {
			return source, "", nil
		}
		if text, ok := data[place.key]; ok {
			source.corefilePlace = place
			return source, text, nil
		}
		looked = append(looked, "ConfigMap "+place.configMap)
	}
	labelled := stored[*corev1.ConfigMap](w.optional.labelledMaps)
	slices.SortFunc(labelled, func(a, b *corev1.ConfigMap) int { return strings.Compare(a.Name, b.Name) })
	for _, m := range labelled {
		if text, ok := m.Data[corefileName]; ok {
			source.configMap = m.Name
			return source, text, nil
		}
	}
	if w.optional.labelledMaps.SharedIndexInformer != nil {
		looked = append(looked, "those with the label "+dnsLabel)
	}
	return source, "", looked
}

// addCorefile adds the Corefile's zones. What was good once stays until there is another one. w.mu is held.
func (w *Watcher) addCorefile(s *zoneSet, ports []uint16) {
	c := &w.corefile
	source, text, looked := w.findCorefile()
	switch {
	case source.configMap != "":
		c.read(source, text, w.configMap)
	case len(looked) == 0: // not known, which health says if it stays so
	case c.parsed != nil:
		s.note("the ConfigMap %s/%s is gone: the zones of its last Corefile stay", w.opts.Namespace, c.source.configMap)
	default:
		s.note("no Corefile was found in %s (looked at %s): the zones that CoreDNS serves are not known; name its ConfigMap with --corefile-configmap, or the zones with --zone",
			w.opts.Namespace, strings.Join(looked, ", "))
	}
	err := c.err
	if c.parsed != nil {
		err = cmp.Or(err, c.serve(s, w.opts.Namespace+"/"+c.source.configMap, ports, w.opts.StubZones))
	}
	if err != nil {
		kept := "its zones are not known"
		if c.parsed != nil {
			kept = "the zones of the one before stay"
		}
		s.note("the Corefile of %s/%s is broken: %s; %s", w.opts.Namespace, source.configMap, plain(err.Error()), kept)
	}
}

// read parses a Corefile unless it has been.
func (c *readCorefile) read(source corefileSource, text string, lookup func(string) (map[string]string, bool)) {
	at := source.layout.corefile
	if at == "" {
		at = corefilePath
	}
	input := &corefileInput{source.configMap, text, at, source.layout.container(lookup)}
	if c.input.equal(input) {
		return
	}
	c.input = input
	parsed, err := parseCorefile(input.text, input.path, input.container)
	if c.err = err; err == nil {
		c.source, c.parsed = source, parsed
	}
}

// serve adds the zones. One that was served and is no longer named is reported for as long as that lasts: where the new Corefile says
// clearly what it serves instead the zone is given up, else it stays.
func (c *readCorefile) serve(s *zoneSet, found string, ports []uint16, stubs bool) error {
	from := "Corefile " + found
	z, err := c.parsed.zones(ports, stubs)
	if err != nil {
		s.addCluster(from, c.domain...)
		s.add(from, c.served...)
		return err
	}
	names := z.names()
	unseen := len(c.parsed.imports)
	lost := slices.DeleteFunc(slices.Clone(c.served), func(zone string) bool { return slices.Contains(names, zone) })
	if unclear := z.unclear || len(z.cluster) == 0 || unseen > c.unseen; unclear && len(lost) > 0 {
		names = append(names, lost...)
		s.problem("zones that the Corefile of %s no longer names, not clearly at least, stay in use: %s; name them with --zone, or attach again to give them up", found, few(lost))
	} else {
		for _, zone := range lost {
			c.gone[zone] = slices.Contains(c.domain, zone)
		}
	}
	var cluster, others []string
	for _, zone := range slices.Sorted(maps.Keys(c.gone)) {
		switch {
		case slices.Contains(names, zone):
			delete(c.gone, zone)
		case c.gone[zone]:
			cluster = append(cluster, zone)
		default:
			others = append(others, zone)
		}
	}
	tell := func(say func(string, ...any), zones []string) {
		if len(zones) > 0 {
			say("zones that the Corefile of %s no longer names go to this host's own servers: %s; name them with --zone to keep them, or attach again if that is meant", found, few(zones))
		}
	}
	tell(s.problem, cluster)
	tell(s.note, others)
	domain := distinct(append(z.cluster, slices.DeleteFunc(slices.Clone(c.domain), func(zone string) bool { return !slices.Contains(names, zone) })...))
	if len(ports) > 0 { // else it is not known yet which of them are served there
		c.domain, c.served, c.unseen = domain, names, unseen
	}
	s.addCluster(from, domain...)
	s.add(from, names...)
	s.notes = append(s.notes, z.notes...)
	if len(names)+len(z.notes) == 0 {
		s.note("the Corefile of %s names no zone that CoreDNS answers itself where it is asked: name the cluster's with --zone", found)
	}
	return nil
}
