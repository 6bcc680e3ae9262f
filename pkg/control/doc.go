// Package control is the protocol between a command and the daemon: HTTP over a Unix socket, one request to a connection.
// Anyone who may connect can read; only root can give orders. The kernel tells who is asking (SO_PEERCRED, unix(7)).
//
// Daemon and command may have different versions. Unknown parts of a report are ignored; an order with something that the
// daemon does not know is refused with an error that names it.
package control
