package discovery

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
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
// cluster; a malformed one is an error, because continuing would mean working
// silently with another cluster than the user's own.
//
// A file that somebody else than root or ourselves could have written is refused if
// it makes its reader run a command, read another file, ask through a proxy or act
// as another user: we would do that with our rights, not theirs. That is judged each
// time that a file is read, wherever it is and however it was named.
//
// If there is none, the error is [ErrNoCluster].
func FindKubeconfig(o Options) (path, why string, err error) {
	k, err := findKubeconfig(o.withDefaults())
	return k.path, k.why, err
}

// kubeconfig is what was read of one, or of a list.
type kubeconfig struct {
	path, why string
	broken    string               // the file of a list that an error is about
	config    *clientcmdapi.Config // nil for InCluster

	// sum is of all files that were read: with another one there is something new.
	sum [sha256.Size]byte
}

// candidate is a kubeconfig at a well-known place.
type candidate struct{ path, why string }

// findKubeconfig is FindKubeconfig that also returns the content.
func findKubeconfig(o Options) (kubeconfig, error) {
	if o.Kubeconfig != "" {
		return readNamed("--kubeconfig", o.Kubeconfig)
	}
	if list := o.Env(clientcmd.RecommendedConfigPathEnvVar); list != "" {
		return readNamed("$KUBECONFIG", list)
	}
	candidates, skipped := o.candidates()
	for _, c := range candidates {
		k, err := readKubeconfig(c.path)
		k.path, k.why = c.path, c.why
		switch {
		case errors.Is(err, fs.ErrNotExist) && k.config == nil:
			skipped = append(skipped, c.path+" (missing)")
			continue
		case errors.Is(err, fs.ErrPermission) && k.config == nil:
			skipped = append(skipped, c.path+" (not readable)")
			continue
		case errors.Is(err, errNoCluster):
			skipped = append(skipped, c.path+" (names no cluster)")
			continue
		case err != nil:
			return k, fmt.Errorf("kubeconfig %s (%s): %w; repair it, or name one with --kubeconfig", c.path, c.why, oneLine(err))
		}
		return k, nil
	}

	if o.Env("KUBERNETES_SERVICE_HOST") != "" && o.Env("KUBERNETES_SERVICE_PORT") != "" {
		return kubeconfig{path: InCluster, why: "service account of the pod"}, nil
	}
	return kubeconfig{}, fmt.Errorf("%w: looked at $KUBECONFIG (not set), %s and a pod's service account (not in a pod); name a kubeconfig with --kubeconfig, or a CoreDNS with --dns-endpoint",
		ErrNoCluster, strings.Join(skipped, ", "))
}

// again reads the same files as before.
func (k kubeconfig) again() (kubeconfig, error) {
	if k.path == InCluster {
		return k, nil // client-go follows the files of a pod
	}
	return readNamed(k.why, k.path)
}

// candidates lists the implicit places in order, and those that can't be told.
func (o Options) candidates() (cs []candidate, skipped []string) {
	if sudoer := o.Env("SUDO_USER"); sudoer != "" && sudoer != "root" {
		if home, err := o.HomeOf(sudoer); err != nil {
			skipped = append(skipped, fmt.Sprintf("~%s/.kube/config (%v)", sudoer, oneLine(err)))
		} else {
			cs = append(cs, candidate{filepath.Join(home, ".kube", "config"), "home of sudo user " + sudoer})
		}
	}
	if home, err := o.HomeOf(""); err != nil {
		skipped = append(skipped, fmt.Sprintf("~/.kube/config (%v)", oneLine(err)))
	} else {
		cs = append(cs, candidate{filepath.Join(home, ".kube", "config"), "own home"})
	}
	return append(cs, candidate{o.AdminConf, "kubeadm's admin.conf"}), skipped
}

// readNamed reads a file, or a list, that the user named by way of how, or that was
// found so before.
func readNamed(how, list string) (kubeconfig, error) {
	k, err := readKubeconfig(filepath.SplitList(list)...)
	k.path, k.why = list, how
	if err != nil {
		return k, fmt.Errorf("kubeconfig %s (%s): %w; repair it or name another one with --kubeconfig", cmp.Or(k.broken, list), how, oneLine(err))
	}
	return k, nil
}

// Bounds of a kubeconfig, and of each file that it names.
const maxKubeconfig = 4 << 20

var errNoCluster = errors.New("it names no cluster")

// readKubeconfig reads files and joins them as kubectl does: what is first counts.
// Some of them may be missing, but not all. The files that the result names are read
// too, and are part of it.
func readKubeconfig(paths ...string) (k kubeconfig, err error) {
	r := reader{sum: sha256.New()}
	missing, suspect := error(fs.ErrNotExist), ""
	for _, path := range paths {
		if path == "" {
			continue
		}
		content, whose, err := r.read(path)
		if errors.Is(err, fs.ErrNotExist) {
			missing = err
			continue
		}
		k.broken = path
		if err != nil {
			return k, err
		}
		suspect = cmp.Or(suspect, whose)
		config, err := clientcmd.Load(content)
		if err != nil {
			return k, err
		}
		k.config = joined(k.config, config, filepath.Dir(path))
	}
	if k.config == nil {
		return k, pathless(missing)
	}
	if len(paths) > 1 {
		k.broken = ""
	}
	switch {
	case clientcmdapi.IsConfigEmpty(k.config):
		return k, errNoCluster
	case k.config.CurrentContext == "":
		return k, errors.New("it has no current-context")
	}
	if suspect != "" {
		if what := powers(k.config); what != "" {
			return k, fmt.Errorf("%s, since %s; make it root's alone, or use a file without (kubectl config view --raw --minify --flatten)", what, suspect)
		}
	}
	if err := r.inline(k.config); err != nil {
		return k, err
	}
	k.sum = [sha256.Size]byte(r.sum.Sum(nil))
	return k, clientcmd.ConfirmUsable(*k.config, "")
}

// reader reads files and sums up what they hold.
type reader struct{ sum hash.Hash }

// read returns a file's content, and who else could have written it.
func (r reader) read(path string) (content []byte, suspect string, err error) {
	content, err = safefile.Read(context.Background(), path, maxKubeconfig, func() (file *os.File, err error) {
		file, suspect, err = safefile.OpenTrusted(path)
		return file, err
	})
	if err != nil {
		return nil, "", pathless(err)
	}
	fmt.Fprintf(r.sum, "%s %d\n%s", path, len(content), content)
	return content, suspect, nil
}

// joined adds to a configuration what it does not have. Paths become absolute.
func joined(to, more *clientcmdapi.Config, dir string) *clientcmdapi.Config {
	absolute := func(path *string) {
		if *path != "" && !filepath.IsAbs(*path) {
			*path = filepath.Join(dir, *path)
		}
	}
	for _, c := range more.Clusters {
		absolute(&c.CertificateAuthority)
	}
	for _, u := range more.AuthInfos {
		absolute(&u.ClientCertificate)
		absolute(&u.ClientKey)
		absolute(&u.TokenFile)
		if u.Exec != nil && strings.ContainsRune(u.Exec.Command, filepath.Separator) {
			absolute(&u.Exec.Command)
		}
	}
	if to == nil {
		to = clientcmdapi.NewConfig()
	}
	addMissing(to.Clusters, more.Clusters)
	addMissing(to.AuthInfos, more.AuthInfos)
	addMissing(to.Contexts, more.Contexts)
	to.CurrentContext = cmp.Or(to.CurrentContext, more.CurrentContext)
	return to
}

func addMissing[V any](to, more map[string]V) {
	for name, v := range more {
		if _, ok := to[name]; !ok {
			to[name] = v
		}
	}
}

// current returns the cluster and the user of the current context, empty ones for
// those that are not there.
func current(config *clientcmdapi.Config) (*clientcmdapi.Cluster, *clientcmdapi.AuthInfo) {
	cluster, user := clientcmdapi.NewCluster(), clientcmdapi.NewAuthInfo()
	if c := config.Contexts[config.CurrentContext]; c != nil {
		if found := config.Clusters[c.Cluster]; found != nil {
			cluster = found
		}
		if found := config.AuthInfos[c.AuthInfo]; found != nil {
			user = found
		}
	}
	return cluster, user
}

// inline reads the files that the current context names.
func (r reader) inline(config *clientcmdapi.Config) error {
	cluster, user := current(config)
	var token []byte
	for _, f := range []struct {
		path *string
		data *[]byte
		what string
	}{
		{&cluster.CertificateAuthority, &cluster.CertificateAuthorityData, "certificate-authority"},
		{&user.ClientCertificate, &user.ClientCertificateData, "client-certificate"},
		{&user.ClientKey, &user.ClientKeyData, "client-key"},
		{&user.TokenFile, &token, "tokenFile"},
	} {
		if *f.path == "" {
			continue
		}
		if len(*f.data) == 0 { // data come before files
			content, _, err := r.read(*f.path)
			if err == nil && len(bytes.TrimSpace(content)) == 0 {
				err = errors.New("it is empty") // it is being written, perhaps; without it we would be nobody, or trust anybody
			}
			if err != nil {
				return fmt.Errorf("%s %s: %w", f.what, *f.path, err)
			}
			*f.data = content
		}
		*f.path = ""
	}
	if len(token) > 0 {
		user.Token = strings.TrimSpace(string(token))
	}
	return nil
}

// powers says what a configuration would make us do that its writer may not, empty if
// nothing.
func powers(config *clientcmdapi.Config) string {
	cluster, user := current(config)
	switch {
	case user.Exec != nil:
		return fmt.Sprintf("root won't run the command %q for others", user.Exec.Command)
	case user.AuthProvider != nil:
		return fmt.Sprintf("root won't use the auth provider %q for others", user.AuthProvider.Name)
	case user.Impersonate != "" || user.ImpersonateUID != "" || len(user.ImpersonateGroups) > 0 || len(user.ImpersonateUserExtra) > 0:
		return fmt.Sprintf("root won't act as the user %q for others", user.Impersonate)
	case cluster.ProxyURL != "":
		return "root won't ask through a proxy (proxy-url) for others"
	}
	for _, path := range []string{user.TokenFile, user.ClientCertificate, user.ClientKey, cluster.CertificateAuthority} {
		if path != "" {
			return fmt.Sprintf("root won't read the file %q for others", path)
		}
	}
	return ""
}

// pathless strips the path, which our messages name themselves.
func pathless(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// rest turns it into a client configuration.
func (k kubeconfig) rest() (*rest.Config, error) {
	if k.config == nil {
		return rest.InClusterConfig()
	}
	return clientcmd.NewDefaultClientConfig(*k.config, nil).ClientConfig()
}
