package discovery

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// maxDistinctErrors bounds what one outage may log.
const maxDistinctErrors = 16

// health is what is known of the talk with the apiserver. Informers report from
// their goroutines; changed is called, without the lock, when the answer to
// "does it answer?" may have become another one.
type health struct {
	log     *zap.Logger
	changed func()

	mu        sync.Mutex
	resources map[string]*resourceHealth
	logged    []*problem // of this outage
	last      error      // newest error ever, nil if none
	refusal   bool       // see refused

	// same ends when the cluster's past turns out to be another one than we know.
	same    context.Context
	another context.CancelFunc
}

type resourceHealth struct {
	optional bool      // what is wrong with it is a note
	err      *problem  // nil while all is well, or nothing is known yet
	changes  int       // of err since it was nil
	open     bool      // a watch is open
	ok       time.Time // when the apiserver last confirmed our view, zero if never
}

func newHealth(log *zap.Logger, changed func()) *health {
	h := &health{
		log:       log,
		changed:   changed,
		resources: make(map[string]*resourceHealth),
	}
	h.same, h.another = context.WithCancel(context.Background())
	return h
}

// past returns a context that ends when what is asked from now on is no continuation of what was answered before.
func (h *health) past() context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.same
}

// isBefore reports whether a version is older than one that was seen before: etcd was restored.
func isBefore(version, seen string) bool {
	order, err := resourceversion.CompareResourceVersion(version, seen)
	return err == nil && order < 0 // what can't be compared is of no apiserver
}

// restored ends a past, and with it all watches of it, and returns the new one.
func (h *health) restored(past context.Context) context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.same == past {
		h.log.Warn("the cluster's data went back, as after a restore of etcd: everything is read again")
		h.another()
		h.same, h.another = context.WithCancel(context.Background())
	}
	return h.same
}

// follow starts to follow a resource, or starts over.
func (h *health) follow(resource string, optional bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.resources[resource] = &resourceHealth{optional: optional}
}

// forgetOptional ends with all that is not needed.
func (h *health) forgetOptional() {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.resources, func(_ string, r *resourceHealth) bool { return r.optional })
}

// refused reports whether the apiserver does not accept us, or we do not accept it:
// other credentials may help. It says so once for each answer.
func (h *health) refused() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	refused := h.refusal
	h.refusal = false
	return refused
}

// confirmed notes that a full list has come. An error stays until a watch is
// open: only then are we told of changes again.
func (h *health) confirmed(resource string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.resources[resource].ok = time.Now()
}

// watching notes that a watch is open.
func (h *health) watching(resource string) {
	h.mu.Lock()
	r := h.resources[resource]
	recovered := r.err != nil
	r.err, r.changes, r.open, r.ok = nil, 0, true, time.Now()
	switch {
	case !recovered:
	case r.optional:
		h.log.Info("can be read again", zap.String("resource", resource))
	case h.problemLocked() == nil:
		h.logged = nil
		h.log.Info("apiserver answers again")
	}
	h.mu.Unlock()
	if recovered {
		h.changed()
	}
}

// ended notes that a watch has ended, which is normal; what follows may not be.
func (h *health) ended(resource string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.resources[resource]
	r.open, r.ok = false, time.Now()
}

// failed notes an error and logs it, each one once per outage. An optional
// resource's is no warning: the snapshot's notes say it as long as it is so. What is
// told stays the same as long as the error does, whatever numbers it has in it, and
// after many different ones.
func (h *health) failed(resource string, err error) {
	p := diagnose(err)
	h.mu.Lock()
	r := h.resources[resource]
	isNew := r.err == nil
	if !isNew && !r.err.same(p) && r.changes < maxDistinctErrors {
		r.changes++
		isNew = true
	}
	if isNew {
		r.err = p
	}
	r.open = false
	if !r.optional {
		h.last = p
	}
	refused := errors.Is(p.kind, ErrUnauthorized) || errors.Is(p.kind, ErrCertificate)
	h.refusal = h.refusal || refused
	seen := slices.ContainsFunc(h.logged, p.same)
	switch {
	case r.optional && isNew:
		h.log.Info(absence(resource, err))
	case r.optional:
		h.log.Debug("still can't be read", zap.String("resource", resource), zap.NamedError("cause", p.err))
	case !seen && len(h.logged) < maxDistinctErrors:
		h.logged = append(h.logged, p)
		h.log.Warn("can't follow the cluster", zap.String("resource", resource), zap.String("reason", p.why), zap.String("remedy", p.remedy))
	default:
		h.log.Debug("still can't follow the cluster", zap.String("resource", resource), zap.NamedError("cause", p.err))
	}
	h.mu.Unlock()
	if isNew || refused {
		h.changed()
	}
}

// problem returns what is wrong now, nil if nothing is known to be.
func (h *health) problem() *problem {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.problemLocked()
}

// problemLocked picks by name of the resource, so that the answer doesn't jump.
func (h *health) problemLocked() *problem {
	var pick string
	for name, r := range h.resources {
		if r.err != nil && !r.optional && (pick == "" || name < pick) {
			pick = name
		}
	}
	if pick == "" {
		return nil
	}
	return h.resources[pick].err
}

// notes says what is wrong with resources that are not needed.
func (h *health) notes() (notes []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, r := range h.resources {
		if r.optional && r.err != nil {
			notes = append(notes, absence(name, r.err))
		}
	}
	slices.Sort(notes)
	return notes
}

// note is what is wrong with one resource that is not needed, empty if nothing is.
func (h *health) note(resource string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r := h.resources[resource]; r != nil && r.err != nil {
		return absence(resource, r.err)
	}
	return ""
}

// lastError returns the newest error ever noted, also after recovery.
func (h *health) lastError() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// confirmedAt returns until when our view is known to be true: now while every
// watch is open, else when the first of them was last heard of.
func (h *health) confirmedAt() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := time.Now()
	for _, r := range h.resources {
		if !r.optional && !r.open && r.ok.Before(at) {
			at = r.ok
		}
	}
	return at
}
