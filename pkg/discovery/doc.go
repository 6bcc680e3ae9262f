// Package discovery finds the CoreDNS endpoints of a cluster and its zones, and
// follows them.
//
// It answers two questions, "which addresses may be asked for cluster names?" and
// "which names are the cluster's?", as a [Snapshot]: a plain value that the daemon
// hands to the datapath and to the forwarder. A [Source] produces snapshots; there
// are two of them:
//
//   - [Watcher], made by [New], follows one Service (kube-system/kube-dns unless
//     told otherwise) and its EndpointSlices through informers, and, as far as it
//     may read them, the Corefile, the ServiceCIDRs and the nodes' podCIDRs;
//   - [Static], for --dns-endpoint, never changes and needs no cluster.
//
// # What holds
//
//   - Nothing is published before the Service and all its slices are known. The
//     other sources are waited for a few seconds: they are not needed.
//   - A snapshot is published only when its meaning changed.
//   - A set that was good once is replaced by an empty one only if the apiserver
//     says that there is nobody, by a slice without a serving endpoint. When the
//     apiserver is gone, or the Service or all of its slices, the last good
//     endpoints stay, marked Stale with a Reason.
//   - A Corefile that can't be parsed, or costs too much, leaves the zones of the
//     last good one. A zone that it no longer names is told.
//   - A source that is absent or forbidden is a note in the snapshot, no error.
//   - Of the reverse zones only those of the cluster's own addresses are taken, not
//     all of in-addr.arpa, whatever the Corefile says.
//   - A slow reader never holds the informers up; it sees the newest snapshot.
//   - Every list has a deadline, and so has every watch, both for its opening
//     and for its whole life.
//
// # Least privilege
//
// The requests list and watch one Service by name and its EndpointSlices by their
// label, the namespace's Deployments (and DaemonSets, if CoreDNS is none of them),
// the ConfigMaps that CoreDNS mounts by name, ServiceCIDRs and nodes.
// scripts/rbac.yaml allows just that. Only if the Service does not exist or can't be
// asked, and the user has named none, all Services of the namespace with the label
// k8s-app=kube-dns are asked for too, and only if no ConfigMap with a usual name has
// a Corefile, those with that label.
// Nodes are many: they come in pages, and what is kept of each is its name, its
// podCIDRs and its topology zone.
//
// Only with [Options.Changes] all Services, EndpointSlices and namespaces are followed too, as scripts/rbac-coherence.yaml allows.
//
// [Lookup], behind "k2s-dnsbpf check", is for a person with a kubeconfig of their
// own. It needs more: get and list on services and list on endpointslices, in the
// namespace of the Service that is looked up by name, in all of them for one
// looked up by address.
//
// This is the only package of the program that knows client-go.
package discovery
