package discovery

import "context"

// Source tells who may be asked for cluster names. All methods may be called
// from any goroutine.
type Source interface {
	// Run works until ctx ends and then returns nil. It may be called once.
	Run(ctx context.Context) error

	// WaitForSync waits for the first snapshot that has an endpoint to ask. If
	// ctx ends sooner, the error is one line that says what is missing, why and
	// what to do; the snapshot is then whatever is known so far. It needs a
	// running Run, except for a static source.
	WaitForSync(ctx context.Context) (Snapshot, error)

	// Snapshots delivers changes to one reader. It holds the newest snapshot
	// only: a slow reader misses those in between. It is never closed, so a
	// reader must watch its own context too.
	Snapshots() <-chan Snapshot

	// Outdated reports whether another source of the same settings would know more:
	// its credentials are others now, or it holds on to what is no longer said.
	Outdated() bool

	// Current returns the newest snapshot, and false if there is none yet.
	Current() (Snapshot, bool)
}

var (
	_ Source = (*Watcher)(nil)
	_ Source = (*static)(nil)
)

// mailbox is a channel that holds the newest value only. put is for one
// goroutine at a time; the channel is for any number of readers.
type mailbox chan Snapshot

func newMailbox() mailbox { return make(mailbox, 1) }

// put replaces the value that waits, if any, and never blocks.
func (m mailbox) put(s Snapshot) {
	select {
	case <-m:
	default:
	}
	m <- s // free: only put fills the one place, and it has just been emptied
}
