// Package host makes what shall be true of this host true, records each change in the journal before it is made, and undoes
// it.
package host
