package control

import "time"

// The requests.
const (
	pathStatus = "/status"
	pathReload = "/reload" // the order is a configuration
	pathDetach = "/detach"
	// pathAnswers lists the cache of answers, pathFlush ends some or all.
	pathAnswers = "/cache"
	pathFlush   = "/cache/flush"
	// pathReplace makes way for a daemon of another version: this one ends and undoes nothing. It lingers on its
	// sockets until the other one has them.
	pathReplace = "/replace"
)

// FlushOrder names what is to be forgotten: a name and all below it, or all for "".
type FlushOrder struct {
	Suffix string `json:"suffix"`
}

// FlushResult says how many answers that were.
type FlushResult struct {
	Dropped int `json:"dropped"`
}

// ReplaceResult says who starts the successor.
type ReplaceResult struct {
	// Own is set if the daemon itself does, from the program file that it was started from.
	Own bool `json:"own,omitempty"`
}

// DetachLimit is how long restoring the resolver file may take.
const DetachLimit = 3 * time.Second

// DetachOrder says how long the daemon should linger at least.
type DetachOrder struct {
	Linger time.Duration `json:"linger"`
}

// DetachResult is what was done to the resolver file, a line each. With an error the daemon stays attached.
type DetachResult struct {
	Done  []string `json:"done,omitempty"`
	Error string   `json:"error,omitempty"`
}

// ReloadResult is the result of new settings. With an error the old ones stay in effect.
type ReloadResult struct {
	Changed bool   `json:"changed"`
	Error   string `json:"error,omitempty"`
}
