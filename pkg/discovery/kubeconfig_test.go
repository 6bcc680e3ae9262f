package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// kubeconfigFor is a minimal valid kubeconfig; user holds YAML of the user.
func kubeconfigFor(server, user string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: c
  cluster: {server: %q}
users:
- name: u
  user: %s
contexts:
- name: x
  context: {cluster: c, user: u}
current-context: x
`, server, user)
}

const (
	emptyConfig   = "apiVersion: v1\nkind: Config\n"
	brokenConfig  = "apiVersion: v1\nkind: Config\nclusters: [\n"
	noContext     = "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {server: https://192.0.2.1:6443}\n"
	danglingFiles = "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {server: https://192.0.2.1:6443, certificate-authority: nowhere.crt}\ncontexts:\n- name: x\n  context: {cluster: c}\ncurrent-context: x\n"
)

func TestFindKubeconfig(t *testing.T) {
	good := kubeconfigFor("https://192.0.2.1:6443", "{token: t}")
	const (
		flag   = "flag.conf"
		env    = "env.conf"
		alice  = "home/alice/.kube/config"
		own    = "root/.kube/config"
		admin  = "etc/kubernetes/admin.conf"
		second = "second.conf"
	)
	pod := map[string]string{"KUBERNETES_SERVICE_HOST": "172.21.0.1", "KUBERNETES_SERVICE_PORT": "443"}
	sudo := map[string]string{"SUDO_USER": "alice"}
	all := map[string]string{flag: good, env: good, alice: good, own: good, admin: good}

	tests := []struct {
		name  string
		files map[string]string // path below the test's root: content
		flag  string            // below the root
		env   map[string]string // KUBECONFIG's list holds paths below the root
		path  string            // want; below the root but for InCluster
		why   string
		err   []string // parts of the error; else none
		is    error
	}{
		{name: "flag first", files: all, flag: flag, env: map[string]string{"KUBECONFIG": env, "SUDO_USER": "alice"}, path: flag, why: "--kubeconfig"},
		{name: "flag missing is not skipped", files: map[string]string{admin: good}, flag: flag, err: []string{flag, "--kubeconfig", "no such file"}, is: fs.ErrNotExist},
		{name: "flag malformed", files: map[string]string{flag: brokenConfig, admin: good}, flag: flag, err: []string{flag, "--kubeconfig", "repair it"}},
		{name: "flag empty", files: map[string]string{flag: "", admin: good}, flag: flag, err: []string{flag, "names no cluster"}},
		{name: "flag without context", files: map[string]string{flag: noContext}, flag: flag, err: []string{"no current-context"}},
		{name: "flag with a missing CA file", files: map[string]string{flag: danglingFiles}, flag: flag, err: []string{"nowhere.crt"}},
		{name: "flag is a directory", files: map[string]string{flag + "/x": ""}, flag: flag, err: []string{"is a directory"}},
		{name: "flag may run a command", files: map[string]string{flag: kubeconfigFor("https://192.0.2.1:6443", "{exec: {apiVersion: client.authentication.k8s.io/v1, command: get-token, interactiveMode: Never}}")}, flag: flag, path: flag, why: "--kubeconfig"},

		{name: "environment second", files: all, env: map[string]string{"KUBECONFIG": env, "SUDO_USER": "alice"}, path: env, why: "$KUBECONFIG"},
		{name: "environment: a list with a gap", files: map[string]string{second: good}, env: map[string]string{"KUBECONFIG": env + ":" + second}, path: env + ":" + second, why: "$KUBECONFIG"},
		{name: "environment: all missing is not skipped", files: map[string]string{admin: good}, env: map[string]string{"KUBECONFIG": env + ":" + second}, err: []string{env, second, "$KUBECONFIG"}, is: fs.ErrNotExist},
		{name: "environment: one of the list malformed", files: map[string]string{env: good, second: brokenConfig}, env: map[string]string{"KUBECONFIG": env + ":" + second}, err: []string{second, "$KUBECONFIG"}},

		{name: "sudo user third", files: all, env: sudo, path: alice, why: "home of sudo user alice"},
		{name: "no sudo: own home", files: all, path: own, why: "own home"},
		{name: "sudo by root: own home", files: all, env: map[string]string{"SUDO_USER": "root"}, path: own, why: "own home"},
		{name: "unknown sudo user is skipped", files: all, env: map[string]string{"SUDO_USER": "nobody-such"}, path: own, why: "own home"},
		{name: "sudo user without a file", files: map[string]string{own: good}, env: sudo, path: own, why: "own home"},
		{name: "sudo user's file names no cluster", files: map[string]string{alice: emptyConfig, own: good}, env: sudo, path: own, why: "own home"},
		{name: "sudo user's file malformed", files: map[string]string{alice: brokenConfig, own: good}, env: sudo, err: []string{alice, "home of sudo user alice", "--kubeconfig"}},
		{name: "admin.conf", files: map[string]string{admin: good}, env: sudo, path: admin, why: "kubeadm's admin.conf"},
		{name: "admin.conf before the pod's account", files: map[string]string{admin: good}, env: pod, path: admin, why: "kubeadm's admin.conf"},
		{name: "pod", env: pod, path: InCluster, why: "service account of the pod"},
		{name: "nothing", env: sudo, err: []string{alice, own, admin, "--kubeconfig", "--dns-endpoint"}, is: ErrNoCluster},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			in := func(list string) string {
				if list == "" || list == InCluster {
					return list
				}
				parts := strings.Split(list, ":")
				for i := range parts {
					parts[i] = filepath.Join(root, parts[i])
				}
				return strings.Join(parts, ":")
			}
			for name, content := range tc.files {
				writeFile(t, in(name), content)
			}
			path, why, err := FindKubeconfig(Options{
				Kubeconfig: in(tc.flag),
				AdminConf:  in(admin),
				Env: func(k string) string {
					if k == "KUBECONFIG" {
						return in(tc.env[k])
					}
					return tc.env[k]
				},
				HomeOf: func(user string) (string, error) {
					switch user {
					case "":
						return in("root"), nil
					case "alice":
						return in("home/alice"), nil
					}
					return "", errors.New("unknown user " + user)
				},
			})
			if len(tc.err) > 0 {
				if err == nil {
					t.Fatalf("found %s (%s), want an error", path, why)
				}
				checkLine(t, err, tc.err...)
				if tc.is != nil && !errors.Is(err, tc.is) {
					t.Errorf("error %v is not %v", err, tc.is)
				}
				return
			}
			if err != nil || path != in(tc.path) || why != tc.why {
				t.Errorf("got %q, %q, %v; want %q, %q", path, why, err, in(tc.path), tc.why)
			}
		})
	}
}

// TestKubernetesOthersKubeconfig: what somebody else could have written does nothing with our rights, however it was named and
// whenever it changed.
func TestKubernetesOthersKubeconfig(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("gives files away, which takes root")
	}
	const server = "https://192.0.2.1:6443"
	exec := "{exec: {apiVersion: client.authentication.k8s.io/v1, command: /tmp/evil, interactiveMode: Never}}"
	secret := filepath.Join(t.TempDir(), "secret")
	writeFile(t, secret, "root's")
	plain := kubeconfigFor(server, "{token: t}")
	contents := map[string]struct{ content, refusal string }{
		"nothing special":    {plain, ""},
		"a command":          {kubeconfigFor(server, exec), `run the command "/tmp/evil"`},
		"an auth provider":   {kubeconfigFor(server, "{auth-provider: {name: gcp}}"), `the auth provider "gcp"`},
		"a token file":       {kubeconfigFor(server, "{tokenFile: "+secret+"}"), "read the file"},
		"a certificate":      {kubeconfigFor(server, "{client-certificate: "+secret+", client-key-data: eA==}"), "read the file"},
		"a key":              {kubeconfigFor(server, "{client-certificate-data: eA==, client-key: "+secret+"}"), "read the file"},
		"an authority":       {strings.Replace(plain, "}", ", certificate-authority: "+secret+"}", 1), "read the file"},
		"a proxy":            {strings.Replace(plain, "}", `, proxy-url: "http://192.0.2.2:3128"}`, 1), "a proxy"},
		"another user":       {kubeconfigFor(server, "{token: t, as: admin}"), `act as the user "admin"`},
		"groups of another":  {kubeconfigFor(server, "{token: t, as-groups: [system:masters]}"), "act as the user"},
		"an escape sequence": {kubeconfigFor(server, `{exec: {apiVersion: client.authentication.k8s.io/v1, command: "\e[31m", interactiveMode: Never}}`), `"\x1b[31m"`},
	}
	chown := func(t *testing.T, path string) {
		t.Helper()
		if err := os.Lchown(path, 4711, 4711); err != nil {
			t.Fatal(err)
		}
	}
	spoils := map[string]func(t *testing.T, root, file string) string{
		"ours": func(*testing.T, string, string) string { return "" },
		"another's": func(t *testing.T, _, file string) string {
			chown(t, file)
			return "belongs to the user with the ID 4711"
		},
		"in another's home": func(t *testing.T, root, _ string) string { chown(t, root+"/home"); return "belongs to" },
		"writable": func(t *testing.T, _, file string) string {
			if err := os.Chmod(file, 0o666); err != nil {
				t.Fatal(err)
			}
			return "can be written to by others"
		},
		"by another's link": func(t *testing.T, root, file string) string {
			if err := errors.Join(os.Rename(file, root+"/moved"), os.Symlink(root+"/moved", file)); err != nil {
				t.Fatal(err)
			}
			chown(t, file)
			return "belongs to"
		},
	}
	for what, c := range contents {
		for whose, spoil := range spoils {
			for _, how := range []string{"--kubeconfig", "$KUBECONFIG", "a list", "home of sudo user alice"} {
				t.Run(what+", "+whose+", by "+how, func(t *testing.T) {
					root := t.TempDir()
					file := filepath.Join(root, "home", ".kube", "config")
					writeFile(t, file, c.content)
					other := filepath.Join(root, "other")
					writeFile(t, other, plain)
					suspect := spoil(t, root, file)
					o := Options{AdminConf: "/nowhere", HomeOf: func(string) (string, error) { return root + "/home", nil }, Env: func(key string) string {
						switch {
						case key == "KUBECONFIG" && how == "$KUBECONFIG":
							return file
						case key == "KUBECONFIG" && how == "a list":
							return file + ":" + other
						case key == "SUDO_USER" && strings.HasPrefix(how, "home"):
							return "alice"
						}
						return ""
					}}
					if how == "--kubeconfig" {
						o.Kubeconfig = file
					}
					_, _, err := FindKubeconfig(o)
					switch refused := suspect != "" && c.refusal != ""; {
					case refused && err == nil:
						t.Fatal("not refused")
					case refused:
						checkLine(t, err, "root won't", c.refusal, suspect, file, "kubectl config view --raw --minify --flatten")
					case err != nil && strings.Contains(err.Error(), "root won't"):
						t.Errorf("refused: %v", err)
					}
				})
			}
		}
	}
}

// TestEmptyCredentials: a file that is just being written in place makes us neither anonymous nor trustful.
func TestEmptyCredentials(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "empty"), "\n")
	for _, user := range []string{"{tokenFile: empty}", "{client-certificate: empty, client-key-data: eA==}", "{client-certificate-data: eA==, client-key: empty}"} {
		file := filepath.Join(dir, "kubeconfig")
		writeFile(t, file, kubeconfigFor("https://192.0.2.1:6443", user))
		if _, _, err := FindKubeconfig(Options{Kubeconfig: file, Env: noEnv}); err == nil || !strings.Contains(err.Error(), filepath.Join(dir, "empty")+": it is empty") {
			t.Errorf("%s: error %v", user, err)
		}
	}
}

// TestFindKubeconfigUnreadable: a file that is there but closed to us, as on a
// home directory that NFS guards against root.
func TestFindKubeconfigUnreadable(t *testing.T) {
	if os.Geteuid() == 0 {
		// Root reads everything on a local file system; load's error is what counts.
		if !errors.Is(pathless(&fs.PathError{Op: "open", Path: "x", Err: fs.ErrPermission}), fs.ErrPermission) {
			t.Error("permission lost")
		}
		return
	}
	root := t.TempDir()
	closed, admin := filepath.Join(root, ".kube", "config"), filepath.Join(root, "admin.conf")
	writeFile(t, closed, kubeconfigFor("https://192.0.2.1:6443", "{}"))
	writeFile(t, admin, kubeconfigFor("https://192.0.2.2:6443", "{}"))
	if err := os.Chmod(closed, 0); err != nil {
		t.Fatal(err)
	}
	o := Options{AdminConf: admin, Env: noEnv, HomeOf: func(string) (string, error) { return root, nil }}
	if path, _, err := FindKubeconfig(o); err != nil || path != admin {
		t.Errorf("got %q, %v; want %q", path, err, admin)
	}
	o.Kubeconfig = closed
	if _, _, err := FindKubeconfig(o); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("named and closed: %v", err)
	}
}

func TestNewErrors(t *testing.T) {
	if _, err := New(Options{AdminConf: filepath.Join(t.TempDir(), "none"), Env: noEnv, HomeOf: func(string) (string, error) { return t.TempDir(), nil }}); !errors.Is(err, ErrNoCluster) {
		t.Errorf("no cluster: %v", err)
	}
	// A file that parses and whose credentials don't.
	path := filepath.Join(t.TempDir(), "kubeconfig")
	writeFile(t, path, kubeconfigFor("https://192.0.2.1:6443", "{client-certificate-data: bm8=, client-key-data: bm8=}"))
	_, err := New(Options{Kubeconfig: path, Env: noEnv})
	if err == nil {
		t.Fatal("made a watcher from a broken certificate")
	}
	checkLine(t, err, path, "PEM", "--kubeconfig")
}

// TestDefaults uses the machine's own environment and users.
func TestDefaults(t *testing.T) {
	o := Options{}.withDefaults()
	if o.Namespace != "kube-system" || o.Service != "kube-dns" || o.AdminConf != "/etc/kubernetes/admin.conf" {
		t.Errorf("defaults %+v", o)
	}
	t.Setenv("SUDO_USER", "x")
	if got := o.Env("SUDO_USER"); got != "x" {
		t.Errorf("Env: %q", got)
	}
	if home, err := o.HomeOf("root"); err != nil || home != "/root" {
		t.Errorf("home of root: %q, %v", home, err)
	}
	if home, err := o.HomeOf(""); err != nil || home == "" {
		t.Errorf("own home: %q, %v", home, err)
	}
	if _, err := o.HomeOf("no such user"); err == nil {
		t.Error("home of a user that does not exist")
	}
}

func noEnv(string) string { return "" }

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// checkLine wants err to be one line that holds every part.
func checkLine(t *testing.T, err error, parts ...string) {
	t.Helper()
	if strings.ContainsAny(err.Error(), "\n\r") {
		t.Errorf("more than one line: %q", err)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q lacks %q", err, p)
		}
	}
	if testing.Verbose() {
		t.Log(err)
	}
}
