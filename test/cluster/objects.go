package cluster

import (
	"context"
	"fmt"
	"net/netip"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// Names that every cluster has.
const (
	System     = "kube-system"
	DNSService = "kube-dns"
	coreDNS    = "coredns" // Deployment, ConfigMap, ServiceAccount and image
)

var dnsLabels = map[string]string{"k8s-app": "kube-dns"}

// dnsPorts of the Service, as every distribution has them.
var dnsPorts = []corev1.ServicePort{
	{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP},
	{Name: "dns-tcp", Port: 53, Protocol: corev1.ProtocolTCP},
	{Name: "metrics", Port: 9153, Protocol: corev1.ProtocolTCP},
}

// NewDNSService is the Service kube-system/kube-dns, with both its addresses. Without a selector its slices are whoever
// makes them; with one they are the controller's.
func NewDNSService(selector map[string]string) *corev1.Service {
	policy := corev1.IPFamilyPolicyRequireDualStack
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: DNSService, Namespace: System, Labels: dnsLabels},
		Spec: corev1.ServiceSpec{
			Selector: selector, Ports: dnsPorts, IPFamilyPolicy: &policy,
			ClusterIP: lab.KubeDNS4, ClusterIPs: []string{lab.KubeDNS4, lab.KubeDNS6},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
		},
	}
}

// NewSlice is a slice of a Service without selector, with ready endpoints of one address family.
func NewSlice(service *corev1.Service, name string, addresses ...string) *discoveryv1.EndpointSlice {
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: service.Namespace, Labels: map[string]string{discoveryv1.LabelServiceName: service.Name},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for _, address := range addresses {
		if netip.MustParseAddr(address).Is6() {
			slice.AddressType = discoveryv1.AddressTypeIPv6
		}
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{address}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}, NodeName: new(NodeName),
		})
	}
	for _, port := range service.Spec.Ports {
		number := port.Port
		if target := port.TargetPort.IntVal; target != 0 {
			number = target
		}
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: new(port.Name), Port: new(number), Protocol: new(port.Protocol)})
	}
	return slice
}

// CreateDNS makes the Service kube-system/kube-dns with the lab's own two CoreDNS as its endpoints, in slices for IPv4 and
// IPv6 that no controller looks after.
func (c *Cluster) CreateDNS(ctx context.Context) error {
	service, err := c.Client.CoreV1().Services(System).Create(ctx, NewDNSService(nil), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	for _, slice := range []*discoveryv1.EndpointSlice{
		NewSlice(service, "kube-dns-4", lab.CoreDNS0v4, lab.CoreDNS1v4),
		NewSlice(service, "kube-dns-6", lab.CoreDNS0v6, lab.CoreDNS1v6),
	} {
		if _, err := c.Client.DiscoveryV1().EndpointSlices(System).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// Corefile is the one that kubeadm installs, without its cache: every query is answered from the plugin kubernetes.
const Corefile = `.:53 {
    errors
    health {
       lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus :9153
    forward . /etc/resolv.conf
}
`

// DeployCoreDNS makes what a cluster has for its DNS: account, rights, ConfigMap, Deployment and Service, and returns when
// all replicas are ready and in the slices. It needs Options.Controllers.
func (c *Cluster) DeployCoreDNS(ctx context.Context, replicas int32, corefile string) error {
	if err := c.allowCoreDNS(ctx); err != nil {
		return err
	}
	if err := c.SetCorefile(ctx, corefile); err != nil {
		return err
	}
	if _, err := c.Client.CoreV1().Services(System).Create(ctx, NewDNSService(dnsLabels), metav1.CreateOptions{}); err != nil {
		return err
	}
	deployment := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: coreDNS, Namespace: System, Labels: dnsLabels},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: dnsLabels},
			// As kubeadm has it.
			Strategy: appsv1.DeploymentStrategy{RollingUpdate: &appsv1.RollingUpdateDeployment{MaxUnavailable: new(intstr.FromInt32(1))}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: dnsLabels},
				Spec: corev1.PodSpec{
					NodeName:           NodeName, // there is no scheduler
					ServiceAccountName: coreDNS,
					Containers: []corev1.Container{{
						Name: coreDNS, Image: coreDNS,
						Ports: []corev1.ContainerPort{
							{Name: "dns", ContainerPort: 53, Protocol: corev1.ProtocolUDP},
							{Name: "dns-tcp", ContainerPort: 53, Protocol: corev1.ProtocolTCP},
						},
					}},
				},
			},
		},
	}
	if _, err := c.Client.AppsV1().Deployments(System).Create(ctx, deployment, metav1.CreateOptions{}); err != nil {
		return err
	}
	return c.AwaitEndpoints(ctx, System, DNSService, int(replicas))
}

func (c *Cluster) allowCoreDNS(ctx context.Context) error {
	meta := metav1.ObjectMeta{Name: "system:coredns"}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: coreDNS, Namespace: System}}
	if _, err := c.Client.CoreV1().ServiceAccounts(System).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return err
	}
	role := &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"endpoints", "services", "pods", "namespaces"}, Verbs: []string{"list", "watch"}},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"list", "watch"}},
	}}
	if _, err := c.Client.RbacV1().ClusterRoles().Create(ctx, role, metav1.CreateOptions{}); err != nil {
		return err
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: coreDNS, Namespace: System}},
	}
	_, err := c.Client.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{})
	return err
}

// SetCorefile writes the ConfigMap that CoreDNS Pods take their Corefile from, when they start.
func (c *Cluster) SetCorefile(ctx context.Context, corefile string) error {
	maps := c.Client.CoreV1().ConfigMaps(System)
	object := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: coreDNS, Namespace: System}, Data: map[string]string{"Corefile": corefile},
	}
	if _, err := maps.Create(ctx, object, metav1.CreateOptions{}); ignoreExists(err) != nil {
		return err
	} else if err == nil {
		return nil
	}
	_, err := maps.Update(ctx, object, metav1.UpdateOptions{})
	return err
}

// RestartCoreDNS replaces the Pods of CoreDNS one after the other, as `kubectl rollout restart` does, and returns when the
// old ones are gone and the new ones ready.
func (c *Cluster) RestartCoreDNS(ctx context.Context, stamp string) error {
	deployments := c.Client.AppsV1().Deployments(System)
	// A patch, as kubectl makes it: the controller writes too.
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`, stamp)
	deployment, err := deployments.Patch(ctx, coreDNS, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		return err
	}
	generation, replicas := deployment.Generation, *deployment.Spec.Replicas
	err = Eventually(ctx, func(ctx context.Context) error {
		d, err := deployments.Get(ctx, coreDNS, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s := d.Status
		if s.ObservedGeneration < generation || s.UpdatedReplicas < replicas || s.Replicas > replicas || s.AvailableReplicas < replicas {
			return fmt.Errorf("rollout of CoreDNS: %d of %d updated, %d in all, %d available", s.UpdatedReplicas, replicas, s.Replicas, s.AvailableReplicas)
		}
		pods, err := c.Client.CoreV1().Pods(System).List(ctx, metav1.ListOptions{LabelSelector: "k8s-app=kube-dns"})
		if err == nil && len(pods.Items) != int(replicas) {
			err = fmt.Errorf("rollout of CoreDNS: %d Pods are left, want %d", len(pods.Items), replicas)
		}
		return err
	})
	if err != nil {
		return err
	}
	return c.AwaitEndpoints(ctx, System, DNSService, int(replicas))
}

// AwaitEndpoints waits until a Service has exactly n ready endpoints of IPv4 in its slices.
func (c *Cluster) AwaitEndpoints(ctx context.Context, namespace, service string, n int) error {
	return Eventually(ctx, func(ctx context.Context) error {
		list, err := c.Client.DiscoveryV1().EndpointSlices(namespace).List(ctx, metav1.ListOptions{
			LabelSelector: discoveryv1.LabelServiceName + "=" + service,
		})
		if err != nil {
			return err
		}
		ready := 0
		for _, slice := range list.Items {
			for _, endpoint := range slice.Endpoints {
				if slice.AddressType == discoveryv1.AddressTypeIPv4 && endpoint.Conditions.Ready != nil && *endpoint.Conditions.Ready {
					ready++
				}
			}
		}
		if ready != n {
			return fmt.Errorf("%s/%s has %d ready endpoints, want %d", namespace, service, ready, n)
		}
		return nil
	})
}
