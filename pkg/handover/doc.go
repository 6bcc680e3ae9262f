// Package handover passes sockets from one process to another.
//
// A program that has read the resolver configuration keeps what it read: Go's resolver for up to five seconds, others
// for longer. So after a detach, when everything is restored, the daemon lingers: without the host's lock, with nothing but the
// forwarder's sockets and its last routes, it keeps answering. An attach during that time is like any other, except
// that it takes over duplicates of the open sockets instead of binding to their addresses.
//
// Only the holder of the host's lock creates and removes the socket of a daemon that lingers.
package handover
