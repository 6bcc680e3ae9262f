package control

import "time"

// What can be asked for.
const (
	pathStatus = "/status"
	pathReload = "/reload" // the order is a configuration
	pathDetach = "/detach"
	// pathReplace is for a daemon of another version that is about to come: this one ends and undoes nothing. It lingers on its
	// sockets until the other has them.
	pathReplace = "/replace"
)

// ReplaceResult says who the successor is.
type ReplaceResult struct {
	// Own: the daemon starts it itself, from the program file that it was started from.
	Own bool `json:"own,omitempty"`
}

// DetachLimit is how long the resolver file may take to be put back.
const DetachLimit = 3 * time.Second

// DetachOrder is how long the daemon is to linger at least.
type DetachOrder struct {
	Linger time.Duration `json:"linger"`
}

// DetachResult is what was done to the resolver file, a line each. With an error the daemon stays attached.
type DetachResult struct {
	Done  []string `json:"done,omitempty"`
	Error string   `json:"error,omitempty"`
}

// ReloadResult is what came of new settings. With an error the old ones stay.
type ReloadResult struct {
	Changed bool   `json:"changed"`
	Error   string `json:"error,omitempty"`
}
