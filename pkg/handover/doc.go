// Package handover is all that concerns sockets that change owner.
//
// A program that has read the resolver configuration keeps what it read: Go's resolver for up to five seconds, others
// for longer. So after a detach, when all is put back, the daemon lingers: without the host's lock, with nothing but the
// forwarder's sockets and the routes that it had last, it answers on. An attach in that time is like any other, but
// that it takes duplicates of the open sockets over where it would bind to their addresses.
//
// The socket of the daemon that lingers is made, and removed, by the holder of the host's lock only.
package handover
