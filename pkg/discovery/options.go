package discovery

import (
	"cmp"
	"os"
	"os/user"

	"go.uber.org/zap"
)

// Defaults of [Options].
const (
	DefaultNamespace = "kube-system"
	DefaultService   = "kube-dns"
	DefaultPortName  = "dns"
	DefaultAdminConf = "/etc/kubernetes/admin.conf"
)

// Options configure [New] and [FindKubeconfig]. The zero value is valid.
type Options struct {
	// Kubeconfig is the file the user named with --kubeconfig. If empty, it is
	// searched for, see [FindKubeconfig].
	Kubeconfig string

	// Namespace and Service name the Service in front of CoreDNS.
	// Default kube-system and kube-dns.
	Namespace, Service string

	// PortName is the name of the slices' port for DNS over UDP. Default "dns".
	PortName string

	// Env looks up an environment variable. Default os.Getenv.
	Env func(key string) string

	// HomeOf returns a user's home directory; the empty name is the user that
	// this process runs as. Default: the user database.
	HomeOf func(user string) (string, error)

	// AdminConf is kubeadm's kubeconfig. Default /etc/kubernetes/admin.conf.
	AdminConf string

	// Logger takes what a person may want to know. Default: none.
	Logger *zap.Logger
}

// withDefaults returns a copy in which every field is set, but for Kubeconfig.
func (o Options) withDefaults() Options {
	o.Namespace = cmp.Or(o.Namespace, DefaultNamespace)
	o.Service = cmp.Or(o.Service, DefaultService)
	o.PortName = cmp.Or(o.PortName, DefaultPortName)
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
