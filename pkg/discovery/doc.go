// Package discovery finds the CoreDNS endpoints of a cluster and follows them.
//
// It answers one question, "which addresses may be asked for cluster names?",
// as a [Snapshot]: a plain value that the daemon hands to the datapath and to
// the forwarder. A [Source] produces snapshots; there are two of them:
//
//   - [Watcher], made by [New], follows one Service (kube-system/kube-dns unless
//     told otherwise) and its EndpointSlices through informers;
//   - [Static], for --dns-endpoint, never changes and needs no cluster.
//
// # What holds
//
//   - Nothing is published before the Service and all its slices are known.
//   - A snapshot is published only when its meaning changed.
//   - A set that was good once is never replaced by an empty one: when the
//     apiserver is gone, the Service deleted or its last endpoint lost, the last
//     good endpoints stay, marked Stale with a Reason.
//   - A slow reader never holds the informers up; it sees the newest snapshot.
//   - Every list has a deadline, and so has every watch, both for its opening
//     and for its whole life.
//
// # Least privilege
//
// The package reads one Service by name and the EndpointSlices that carry its
// label, in one namespace. This is all the RBAC it needs:
//
//	apiVersion: rbac.authorization.k8s.io/v1
//	kind: Role
//	metadata:
//	  name: k2s-dnsbpf
//	  namespace: kube-system
//	rules:
//	- apiGroups: [""]
//	  resources: [services]
//	  resourceNames: [kube-dns]
//	  verbs: [get, list, watch]
//	- apiGroups: [discovery.k8s.io]
//	  resources: [endpointslices]
//	  verbs: [get, list, watch]
//
// (resourceNames works for list and watch because the requests carry the field
// selector metadata.name; endpointslices have generated names, so they can't be
// narrowed this way.)
//
// This is the only package of the program that knows client-go.
package discovery
