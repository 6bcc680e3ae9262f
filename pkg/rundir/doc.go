// Package rundir knows the run directory of an attachment: what is in it, and who owns it. An owner is known by what it
// holds, a lock, and not by its name.
package rundir
