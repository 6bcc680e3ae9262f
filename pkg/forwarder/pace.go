package forwarder

import "time"

// Defaults of resolv.conf(5), for Routes without times.
const (
	DefaultTimeout  = 5 * time.Second
	DefaultAttempts = 2
)

// pace is how long servers are waited for. All follows from what a client's own
// stub resolver would wait: it finds through us what it finds without us.
type pace struct {
	timeout time.Duration // a stub waits so long for one answer, then asks again
	whole   time.Duration // it gives up after this

	// Waits before the next server is asked as well.
	patience  time.Duration
	headStart time.Duration // if the server has been silent lately

	// How long an answer that is there waits for one that counts more.
	first    time.Duration // a later server's answer for that of an earlier one
	negative time.Duration // a later server's no, or a failure, for an answer
	trial    time.Duration // the same, where the other server was put aside
	tcp      time.Duration // a truncated answer for the whole one by TCP

	resend   time.Duration // silence after which a query is sent again; from then on after twice as much
	hopeless time.Duration // for a cluster zone whose servers are all put aside
}

// newPace derives the times from those of resolv.conf(5). A share has to fit
// into what musl's stub waits in all, which is one timeout: a negative answer
// comes just before it ends. 0 means the default.
func newPace(timeout time.Duration, attempts int) pace {
	setDefault(&timeout, DefaultTimeout)
	setDefault(&attempts, DefaultAttempts)
	return pace{
		timeout:   timeout,
		whole:     timeout * time.Duration(attempts),
		patience:  timeout / 25,
		headStart: timeout / 50,
		first:     timeout * 3 / 10,
		negative:  timeout * 19 / 20,
		trial:     timeout / 10,
		tcp:       timeout / 4,
		resend:    timeout / 5,
		hopeless:  timeout / 5,
	}
}
