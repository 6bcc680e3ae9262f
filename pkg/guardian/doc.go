// Package guardian is the second process of an attachment, and the daemon's handle on it.
//
// The guardian waits for the daemon's death. It restores the resolver file
// when the daemon has died, for whatever reason, and when it hangs. It leaves programs, pins and sysctls as they are: the
// kernel keeps steering, and the next attach takes over.
//
// Daemon and guardian hold the two ends of a stream socket. It is the lifeline: the kernel closes it with either of them.
package guardian
