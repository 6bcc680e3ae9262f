// Package daemon is the composition root: it connects discovery, datapath, forwarder and resolver, and controls the order in
// which they start, change and stop. Every change to the host is recorded first, so that it can be undone without the daemon.
package daemon
