package discovery

import "github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"

// What a [Source] publishes.
type (
	Snapshot = cluster.Snapshot
	Endpoint = cluster.Endpoint
	Zone     = cluster.Zone
)
