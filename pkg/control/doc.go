// Package control is the protocol between a command and the daemon: HTTP over a Unix socket, one request to a connection.
// Reading is for everybody who may connect, orders are root's, as the kernel says who asks (SO_PEERCRED, unix(7)).
//
// Daemon and command may be of different versions. What is read and not known is left out; an order with something that the
// daemon does not know is refused, and says what that is.
package control
