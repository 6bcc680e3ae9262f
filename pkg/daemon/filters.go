//go:build linux

package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// filters attaches with clsact for the datapath, on kernels without TCX links. Filters are no pinned objects, so the
// journal is the only place that knows them.
type filters struct{ journal *state.Journal }

type filterChange struct {
	Filter netdev.Filter `json:"filter"`
	// AddedQdisc is set if there was no clsact qdisc before.
	AddedQdisc bool `json:"addedQdisc"`
}

func (c filterChange) undo() error {
	err := netdev.DetachFilter(c.Filter)
	if c.AddedQdisc {
		err = errors.Join(err, netdev.RemoveClsact(c.Filter.Ifindex))
	}
	return err
}

// filterOf maps an attachment to its filter. The index keeps the two programs apart that one ingress may have.
func filterOf(a datapath.Attachment) netdev.Filter {
	filter := netdev.Filter{Ifindex: a.Ifindex, Egress: a.Egress, Name: string(a.Program)}
	if a.Program == datapath.FromClient {
		filter.Index = 1
	}
	return filter
}

// AttachFilter implements datapath.TrafficControl.
func (f filters) AttachFilter(a datapath.Attachment, programFD int) error {
	had, err := netdev.HasClsact(a.Ifindex)
	if err != nil {
		return err
	}
	filter := filterOf(a)
	var old filterChange
	known, err := f.journal.Lookup(changeFilter, a.String(), &old)
	if err != nil {
		return err
	}
	if known && old.Filter.Ifindex != a.Ifindex {
		// The interface went, with all that was on it, and another has its name. The first record of a name stays, so
		// without this the new filter would be forgotten.
		if err := f.journal.Forget(changeFilter, a.String()); err != nil {
			return err
		}
	}
	if err := f.journal.Record(changeFilter, a.String(), filterChange{Filter: filter, AddedQdisc: !had}); err != nil {
		return err
	}
	return netdev.AttachFilter(filter, programFD)
}

// DetachFilter implements datapath.TrafficControl.
func (f filters) DetachFilter(a datapath.Attachment) error {
	var change filterChange
	known, err := f.journal.Lookup(changeFilter, a.String(), &change)
	if err != nil || !known {
		return err
	}
	if err := change.undo(); err != nil {
		return err
	}
	return f.journal.Forget(changeFilter, a.String())
}

// keepOnly detaches what a daemon that died left and this one does not want: the datapath knows only its own filters.
func (f filters) keepOnly(wanted []datapath.Attachment) error {
	var errs []error
	for _, change := range f.journal.Changes() {
		isWanted := func(a datapath.Attachment) bool { return a.String() == change.Name }
		if change.Kind != changeFilter || slices.ContainsFunc(wanted, isWanted) {
			continue
		}
		var data filterChange
		if err := json.Unmarshal(change.Data, &data); err != nil {
			errs = append(errs, fmt.Errorf("journal: filter %s: %w", change.Name, err))
			continue
		}
		err := data.undo()
		if err == nil {
			err = f.journal.Forget(change.Kind, change.Name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
