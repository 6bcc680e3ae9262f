// Package answers decides which replies the kernel programs answer from, and for how long: admission, expiry, refresh, coherence with
// the cluster, and bounds.
//
// An answer is never staler than its source: it ends with its smallest TTL, and at once when a change of the cluster may have made it
// wrong. What the source said before it knew of that change is not taken in again, see hold.
package answers
