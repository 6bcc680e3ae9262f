// Package client implements the commands on top of the control socket, the journal and the state of this host.
package client
