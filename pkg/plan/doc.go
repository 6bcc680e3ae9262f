// Package plan computes the desired state of a host: from its settings, the state of the host, and the state of the cluster
// it makes one value, [Desired]. It is pure: the same input gives the same plan on every operating system, and nothing is
// read, written or waited for. Package host applies the value, attach --dry-run prints it, and status compares with it.
//
// Each topology has its own file.
package plan
