package discovery

import (
	"cmp"
	"path"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// maxMounts bounds the ConfigMaps that are followed for one CoreDNS. A real one has one or two.
const maxMounts = 8

// mount is a ConfigMap in CoreDNS's container.
type mount struct {
	configMap string
	path      string            // where it is, a directory unless file is set
	file      string            // the key whose content path is (subPath), empty for all
	keys      map[string]string // paths below path, by key; nil for all keys by their own names
}

// layout is how CoreDNS's container finds its Corefile.
type layout struct {
	workload string // that mounts it, for messages
	corefile string // its path
	mounts   []mount
}

// configMaps are the names of those mounted, each once.
func (l layout) configMaps() (names []string) {
	for _, m := range l.mounts {
		names = append(names, m.configMap)
	}
	return distinct(names)
}

// sources returns where the Corefile may be from: a directory can be made of several ConfigMaps.
func (l layout) sources() (places []corefilePlace) {
	for _, m := range l.mounts {
		below, inside := strings.CutPrefix(l.corefile, strings.TrimSuffix(m.path, "/")+"/")
		switch {
		case m.file != "" && m.path == l.corefile:
			places = append(places, corefilePlace{m.configMap, m.file})
		case m.file != "" || !inside || strings.Contains(below, "/") && m.keys == nil: // keys have no slash
		case m.keys == nil:
			places = append(places, corefilePlace{m.configMap, below})
		default:
			for key, at := range m.keys {
				if at == below {
					places = append(places, corefilePlace{m.configMap, key})
				}
			}
		}
	}
	return places
}

// container returns the files that are known: those of the ConfigMaps that lookup finds. It is false for one that may
// not be read; one that does not exist, which is then optional, has no files.
func (l layout) container(lookup func(name string) (data map[string]string, known bool)) container {
	c := container{files: make(map[string]string), dirs: make(map[string]struct{})}
	for _, m := range l.mounts {
		data, known := lookup(m.configMap)
		if !known {
			continue
		}
		if m.file == "" {
			c.dirs[m.path] = struct{}{}
		}
		for key, text := range data {
			switch at, listed := m.keys[key]; {
			case m.file == key:
				c.files[m.path] = text
			case m.file != "" || m.keys != nil && !listed:
			default:
				c.files[path.Join(m.path, cmp.Or(at, key))] = text
			}
		}
	}
	return c
}

// layoutOf finds out where a Pod template's CoreDNS reads its Corefile. The zero layout is for none.
func layoutOf(workload string, pod *corev1.PodSpec) layout {
	for i := range pod.Containers {
		c := &pod.Containers[i]
		l := layout{workload: workload, corefile: corefileArgument(slices.Concat(c.Command, c.Args))}
		for _, vm := range c.VolumeMounts {
			for j := range pod.Volumes {
				if v := &pod.Volumes[j]; v.Name == vm.Name {
					l.mounts = append(l.mounts, mountsOf(v, vm)...)
				}
			}
		}
		if len(l.sources()) > 0 && len(l.mounts) <= maxMounts {
			return l
		}
	}
	return layout{}
}

// corefileArgument is the value of CoreDNS's flag -conf.
func corefileArgument(args []string) string {
	for i, arg := range args {
		name, value, assigned := strings.Cut(strings.TrimPrefix(arg, "-"), "=")
		switch {
		case name != "-conf" && name != "conf" || !strings.HasPrefix(arg, "-"):
		case assigned:
			return path.Clean(value)
		case i+1 < len(args):
			return path.Clean(args[i+1])
		}
	}
	return corefilePath
}

func mountsOf(v *corev1.Volume, at corev1.VolumeMount) (mounts []mount) {
	add := func(name string, items []corev1.KeyToPath) {
		m := mount{configMap: name, path: path.Clean(at.MountPath)}
		for _, item := range items {
			if m.keys == nil {
				m.keys = make(map[string]string)
			}
			m.keys[item.Key] = path.Clean(item.Path)
		}
		if at.SubPath != "" {
			m.file, m.keys = at.SubPath, nil
			for _, item := range items {
				if path.Clean(item.Path) == at.SubPath {
					m.file = item.Key
				}
			}
		}
		mounts = append(mounts, m)
	}
	switch {
	case v.ConfigMap != nil:
		add(v.ConfigMap.Name, v.ConfigMap.Items)
	case v.Projected != nil:
		for _, s := range v.Projected.Sources {
			if s.ConfigMap != nil {
				add(s.ConfigMap.Name, s.ConfigMap.Items)
			}
		}
	}
	return mounts
}

// template is the Pod template of a Deployment or a DaemonSet.
type template struct {
	workload string
	labels   map[string]string
	pod      *corev1.PodSpec
}

func templates(deployments []*appsv1.Deployment, daemonSets []*appsv1.DaemonSet) (all []template) {
	for _, d := range deployments {
		all = append(all, template{"Deployment " + d.Name, d.Spec.Template.Labels, &d.Spec.Template.Spec})
	}
	for _, d := range daemonSets {
		all = append(all, template{"DaemonSet " + d.Name, d.Spec.Template.Labels, &d.Spec.Template.Spec})
	}
	slices.SortFunc(all, func(a, b template) int { return cmp.Compare(a.workload, b.workload) })
	return all
}

// behind returns the layout of the CoreDNS that a Service's selector finds, the first by kind and name.
func behind(selector map[string]string, all []template) layout {
	for _, t := range all {
		if len(selector) > 0 && labels.SelectorFromSet(selector).Matches(labels.Set(t.labels)) {
			if l := layoutOf(t.workload, t.pod); len(l.mounts) > 0 {
				return l
			}
		}
	}
	return layout{}
}

// trimTemplate keeps of a Pod template what [layoutOf] reads.
func trimTemplate(t *corev1.PodTemplateSpec) corev1.PodTemplateSpec {
	trimmed := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: t.Labels}}
	for _, v := range t.Spec.Volumes {
		if v.ConfigMap != nil || v.Projected != nil {
			trimmed.Spec.Volumes = append(trimmed.Spec.Volumes, v)
		}
	}
	for _, c := range t.Spec.Containers {
		trimmed.Spec.Containers = append(trimmed.Spec.Containers, corev1.Container{
			Name: c.Name, Command: c.Command, Args: c.Args, VolumeMounts: c.VolumeMounts,
		})
	}
	return trimmed
}
