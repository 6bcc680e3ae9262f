// Package peer identifies the other side of a Unix socket and limits the number of connections.
package peer
