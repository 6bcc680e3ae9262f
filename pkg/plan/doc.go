// Package plan says what shall be true of a host: from its settings, from what the host is, and from what the cluster says,
// it makes one value, [Desired]. It is pure: the same input makes the same plan, on every operating system, and nothing is
// read, written or waited for. Package host makes the value true; attach --dry-run prints it; status compares with it.
//
// Each topology has a file of its own.
package plan
