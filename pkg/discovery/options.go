package discovery

import (
	"cmp"
	"os"
	"os/user"
	"strings"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// Defaults of [Options].
const (
	DefaultNamespace = "kube-system"
	DefaultService   = "kube-dns"
	DefaultConfigMap = "coredns"
	DefaultAdminConf = "/etc/kubernetes/admin.conf"
)

// A Service's port for DNS: its number, and its usual name where it is none of the well-known number.
const (
	dnsPort     = 53
	dnsPortName = "dns"
)

// Options configure [New] and [FindKubeconfig]. The zero value is valid.
type Options struct {
	// Kubeconfig is the file the user named with --kubeconfig. If empty, it is
	// searched for, see [FindKubeconfig].
	Kubeconfig string

	// Namespace and Service name the Service in front of CoreDNS. Default
	// kube-system and kube-dns; if that one does not exist, or can't be asked, it is
	// the one with the label k8s-app=kube-dns, of several the one that kubelets hand
	// out.
	Namespace, Service string

	// ConfigMap has the Corefile, in the Service's namespace. Default: the one that
	// the Service's Deployment or DaemonSet mounts, or else the first that has one:
	// coredns, the one with the Service's name, those with CoreDNS's label.
	ConfigMap string

	// StubZones counts the zones that CoreDNS only forwards among its own.
	StubZones bool

	// NoCorefile, NoServiceCIDRs and NoPodCIDRs leave a source of zones out, since
	// the user has named what it would tell.
	NoCorefile, NoServiceCIDRs, NoPodCIDRs bool

	// Prefer chooses among the ready endpoints. Default [PreferAll].
	Prefer Preference

	// NodeName is the name of this host's Node, for Prefer. Default the host's name.
	NodeName string

	// Changes is told every change of Services, EndpointSlices and namespaces, and of the Corefile, one at a time and in
	// order, from goroutines of Run. It must not block, nor call the Watcher. Default: none, and nothing of that is asked for.
	Changes func(cluster.Change)

	// Env looks up an environment variable. Default os.Getenv.
	Env func(key string) string

	// HomeOf returns a user's home directory; the empty name is the user that
	// this process runs as. Default: the user database.
	HomeOf func(user string) (string, error)

	// AdminConf is kubeadm's kubeconfig. Default /etc/kubernetes/admin.conf.
	AdminConf string

	// Logger takes what a person may want to know. Default: none.
	Logger *zap.Logger

	search bool // for a Service with the label, if there is none with the name
}

// withDefaults returns a copy in which every field is set, but for Kubeconfig and
// ConfigMap, which are searched for.
func (o Options) withDefaults() Options {
	o.search = o.Service == ""
	o.Namespace = cmp.Or(o.Namespace, DefaultNamespace)
	o.Service = cmp.Or(o.Service, DefaultService)
	o.Prefer = cmp.Or(o.Prefer, PreferAll)
	if o.NodeName == "" {
		name, _ := os.Hostname()           // without a name no endpoint is on this node
		o.NodeName = strings.ToLower(name) // as a kubelet does
	}
	o.AdminConf = cmp.Or(o.AdminConf, DefaultAdminConf)
	if o.Env == nil {
		o.Env = os.Getenv
	}
	if o.HomeOf == nil {
		o.HomeOf = homeOf
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	return o
}

func homeOf(name string) (string, error) {
	if name == "" {
		u, err := user.Current()
		if err != nil {
			return "", err
		}
		return u.HomeDir, nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return "", err
	}
	return u.HomeDir, nil
}
