// Package daemon is the composition root: it joins discovery, datapath, forwarder and resolver, and owns the order in
// which they start, change and stop. What it changes on the host it records first, so that anybody can undo it.
package daemon
