// Package peer knows who is on the other side of a Unix socket, and how many of them are let in.
package peer
