// Package e2e tests the built program in the lab, on real packets, from the outside: by its command line, by what
// clients get, by what servers see, and by what is left on the host. It shares no code with the product, so that a
// change of a contract fails here.
package e2e
