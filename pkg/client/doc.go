// Package client is what the commands call: each a few lines over the control socket, the journal and what this host is.
package client
