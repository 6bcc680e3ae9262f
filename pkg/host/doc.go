// Package host applies the desired state to this host, records each change in the journal before it is made, and undoes
// it.
package host
