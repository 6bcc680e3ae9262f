// Package coherence knows which names a change in the cluster can have made wrong, and what the API says about the name of a
// Service. Its rules are those of CoreDNS's plugin kubernetes, which are the Kubernetes DNS specification 1.1.0 and more.
package coherence
