package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	clientapi "k8s.io/client-go/tools/clientcmd/api"
)

// auditPolicy has the apiserver record what others than its administrator ask.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: [admin, "system:apiserver"]
- level: Metadata
`

const auditLog = Dir + "/audit.log"

// Request is one that the apiserver has recorded. A watch is recorded when it begins, and again when it ends.
type Request struct {
	Verb  string `json:"verb"`
	URI   string `json:"requestURI"`
	Stage string `json:"stage"`
	User  struct {
		Username string `json:"username"`
	} `json:"user"`
	Response struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
}

// Requests are those of one user since the cluster was raised, in the order of their answers.
func (c *Cluster) Requests(user string) ([]Request, error) {
	content, err := c.Host().ReadFile(auditLog)
	if err != nil {
		return nil, err
	}
	var requests []Request
	scanner := bufio.NewScanner(bytes.NewReader(content))
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		var r Request
		if err := json.Unmarshal(scanner.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("read the audit log: %w", err)
		}
		if r.User.Username == user {
			requests = append(requests, r)
		}
	}
	return requests, scanner.Err()
}

// Apply creates the objects of a manifest, of the kinds that rights are made of.
func (c *Cluster) Apply(ctx context.Context, manifest []byte) error {
	for _, document := range bytes.Split(manifest, []byte("\n---\n")) {
		object, kind, err := scheme.Codecs.UniversalDeserializer().Decode(document, nil, nil)
		if err != nil {
			return fmt.Errorf("read the manifest: %w", err)
		}
		switch o := object.(type) {
		case *corev1.ServiceAccount:
			_, err = c.Client.CoreV1().ServiceAccounts(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
		case *rbacv1.Role:
			_, err = c.Client.RbacV1().Roles(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
		case *rbacv1.RoleBinding:
			_, err = c.Client.RbacV1().RoleBindings(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
		case *rbacv1.ClusterRole:
			_, err = c.Client.RbacV1().ClusterRoles().Create(ctx, o, metav1.CreateOptions{})
		case *rbacv1.ClusterRoleBinding:
			_, err = c.Client.RbacV1().ClusterRoleBindings().Create(ctx, o, metav1.CreateOptions{})
		default:
			return fmt.Errorf("the manifest has a %s, which Apply does not know", kind)
		}
		if err := ignoreExists(err); err != nil {
			return err
		}
	}
	return nil
}

// AccountKubeconfig writes a kubeconfig for host0 with a fresh token of a ServiceAccount in a file beside it, and returns
// its path. A second call renews the token.
func (c *Cluster) AccountKubeconfig(ctx context.Context, namespace, account string) (string, error) {
	token, err := c.Token(ctx, namespace, account)
	if err != nil {
		return "", err
	}
	tokenFile := path.Join(Dir, account+".token")
	if err := c.Host().WriteFile(tokenFile, []byte(token), 0o600); err != nil {
		return "", err
	}
	file := path.Join(Dir, account+".kubeconfig")
	return file, c.WriteKubeconfig(c.Host(), file, "127.0.0.1", &clientapi.AuthInfo{TokenFile: tokenFile})
}
