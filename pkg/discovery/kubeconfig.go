package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// InCluster is the path that [FindKubeconfig] returns for a pod's service account.
const InCluster = "in-cluster"

// FindKubeconfig returns the kubeconfig to use and why it is that one, for a log
// line or for status. The first of these counts:
//
//  1. Options.Kubeconfig, the --kubeconfig flag;
//  2. $KUBECONFIG, which may be a list (it is returned as a list);
//  3. ~/.kube/config of the user who called sudo ($SUDO_USER);
//  4. ~/.kube/config of the user this process runs as, root as a rule;
//  5. Options.AdminConf;
//  6. a pod's service account, for which the path is [InCluster].
//
// What the user named (1, 2) must be there and valid: it is never skipped. Of a
// list in $KUBECONFIG some files may be missing, as with kubectl, but not all.
// The others are skipped when they are missing, not readable for us or name no
// cluster; a malformed one is an error, because to go on would mean to work
// silently with another cluster than the user's own.
//
// The sudo user's file is refused if it makes its reader run a command or read a
// token file: we would do that as root, for a user who may have been allowed no
// more than to run this program.
//
// If there is none, the error is [ErrNoCluster].
func FindKubeconfig(o Options) (path, why string, err error) {
	path, why, _, err = findKubeconfig(o.withDefaults())
	return path, why, err
}

// candidate is a kubeconfig at a well-known place.
type candidate struct {
	path, why string
	untrusted bool // belongs to somebody who may have fewer rights than we
}

// findKubeconfig is FindKubeconfig that also returns the parsed content, nil for InCluster.
func findKubeconfig(o Options) (path, why string, cfg *clientcmdapi.Config, err error) {
	if o.Kubeconfig != "" {
		cfg, err := loadNamed("--kubeconfig", o.Kubeconfig)
		return o.Kubeconfig, "--kubeconfig", cfg, err
	}
	if list := o.Env(clientcmd.RecommendedConfigPathEnvVar); list != "" {
		cfg, err := loadNamed("$KUBECONFIG", filepath.SplitList(list)...)
		return list, "$KUBECONFIG", cfg, err
	}

	candidates, skipped := o.candidates()
	for _, c := range candidates {
		cfg, err := load(c.path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			skipped = append(skipped, c.path+" (missing)")
			continue
		case errors.Is(err, fs.ErrPermission):
			skipped = append(skipped, c.path+" (not readable)")
			continue
		case err == nil && clientcmdapi.IsConfigEmpty(cfg):
			skipped = append(skipped, c.path+" (names no cluster)")
			continue
		case err == nil:
			err = usable(cfg)
		}
		if err == nil && c.untrusted {
			err = harmless(cfg)
		}
		if err != nil {
			return c.path, c.why, nil, fmt.Errorf("kubeconfig %s (%s): %w; repair it, or name one with --kubeconfig", c.path, c.why, oneLine(err))
		}
		return c.path, c.why, cfg, nil
	}

	if o.Env("KUBERNETES_SERVICE_HOST") != "" && o.Env("KUBERNETES_SERVICE_PORT") != "" {
		return InCluster, "service account of the pod", nil, nil
	}
	return "", "", nil, fmt.Errorf("%w: looked at $KUBECONFIG (not set), %s and a pod's service account (not in a pod); name a kubeconfig with --kubeconfig, or a CoreDNS with --dns-endpoint",
		ErrNoCluster, strings.Join(skipped, ", "))
}

// candidates lists the implicit places in order, and those that can't be told.
func (o Options) candidates() (cs []candidate, skipped []string) {
	if sudoer := o.Env("SUDO_USER"); sudoer != "" && sudoer != "root" {
		if home, err := o.HomeOf(sudoer); err != nil {
			skipped = append(skipped, fmt.Sprintf("~%s/.kube/config (%v)", sudoer, oneLine(err)))
		} else {
			cs = append(cs, candidate{filepath.Join(home, ".kube", "config"), "home of sudo user " + sudoer, true})
		}
	}
	if home, err := o.HomeOf(""); err != nil {
		skipped = append(skipped, fmt.Sprintf("~/.kube/config (%v)", oneLine(err)))
	} else {
		cs = append(cs, candidate{filepath.Join(home, ".kube", "config"), "own home", false})
	}
	return append(cs, candidate{o.AdminConf, "kubeadm's admin.conf", false}), skipped
}

// loadNamed loads files that the user named by way of how.
func loadNamed(how string, paths ...string) (*clientcmdapi.Config, error) {
	rules := clientcmd.ClientConfigLoadingRules{Precedence: paths}
	var missing error
	present := 0
	for _, p := range paths {
		if p == "" {
			continue
		}
		switch _, err := load(p); {
		case errors.Is(err, fs.ErrNotExist):
			missing = err
		case err != nil:
			return nil, fmt.Errorf("kubeconfig %s (%s): %w; repair it or name another one", p, how, oneLine(err))
		default:
			present++
		}
	}
	if present == 0 {
		if missing == nil {
			missing = fs.ErrNotExist
		}
		return nil, fmt.Errorf("kubeconfig %s (%s): %w; name an existing file", strings.Join(paths, string(filepath.ListSeparator)), how, oneLine(missing))
	}
	cfg, err := rules.Load()
	if err == nil {
		err = usable(cfg)
	}
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s (%s): %w; repair it or name another one", strings.Join(paths, string(filepath.ListSeparator)), how, oneLine(err))
	}
	return cfg, nil
}

// load reads one file and makes the paths in it absolute.
func load(path string) (*clientcmdapi.Config, error) {
	// LoadFromFile takes an empty file and a directory's error alike; look first.
	if fi, err := os.Stat(path); err != nil {
		return nil, pathless(err)
	} else if fi.IsDir() {
		return nil, errors.New("it is a directory")
	}
	cfg, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return nil, pathless(err)
	}
	if err := clientcmd.ResolveLocalPaths(cfg); err != nil {
		return nil, err
	}
	return cfg, nil
}

// pathless strips the path, which our messages name themselves.
func pathless(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// usable checks that the current context leads to a cluster.
func usable(cfg *clientcmdapi.Config) error {
	if clientcmdapi.IsConfigEmpty(cfg) {
		return errors.New("it names no cluster")
	}
	if cfg.CurrentContext == "" {
		return errors.New("it has no current-context")
	}
	return clientcmd.ConfirmUsable(*cfg, "")
}

// harmless refuses what would make us act for the file's owner.
func harmless(cfg *clientcmdapi.Config) error {
	user := cfg.AuthInfos[cfg.Contexts[cfg.CurrentContext].AuthInfo]
	switch {
	case user == nil:
		return nil
	case user.Exec != nil:
		return fmt.Errorf("root won't run the command %q from another user's file", user.Exec.Command)
	case user.AuthProvider != nil:
		return fmt.Errorf("root won't use the auth provider %q from another user's file", user.AuthProvider.Name)
	case user.TokenFile != "":
		return fmt.Errorf("root won't read the token file %s for another user", user.TokenFile)
	}
	return nil
}

// restConfig turns what findKubeconfig found into a client configuration.
func restConfig(cfg *clientcmdapi.Config) (*rest.Config, error) {
	if cfg == nil {
		return rest.InClusterConfig()
	}
	return clientcmd.NewDefaultClientConfig(*cfg, nil).ClientConfig()
}
