//go:build linux

package host

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// filters attaches with clsact for the datapath, on kernels without TCX links. Filters can't be pinned, so the
// journal is the only place that knows them.
type filters struct{ journal *state.Journal }

type filterChange struct {
	Filter netdev.Filter `json:"filter"`
}

func (c filterChange) undo() error { return netdev.DetachFilter(c.Filter) }

// qdiscChange is a clsact qdisc that did not exist before. It is removed after all filters, whichever needed it first.
type qdiscChange struct {
	Ifindex int `json:"ifindex"`
}

func (c qdiscChange) undo() error { return netdev.RemoveClsact(c.Ifindex) }

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
		// The interface has disappeared, with everything on it, and another one has its name. The first record of a name stays, so
		// without this the new filter would be forgotten.
		if err := f.journal.Forget(changeFilter, a.String()); err != nil {
			return err
		}
	}
	if !had {
		if err := f.journal.Record(changeQdisc, strconv.Itoa(a.Ifindex), qdiscChange{Ifindex: a.Ifindex}); err != nil {
			return err
		}
	}
	if err := f.journal.Record(changeFilter, a.String(), filterChange{Filter: filter}); err != nil {
		return err
	}
	return netdev.AttachFilter(filter, programFD)
}

// HasFilter implements datapath.TrafficControl.
func (f filters) HasFilter(a datapath.Attachment, program uint32) (bool, error) {
	id, name, err := netdev.FilterProgram(filterOf(a))
	return name == "" || id == program, err
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

// keepOnly detaches what a dead daemon left and this one does not want: the datapath knows only its own filters.
func (f filters) keepOnly(wanted []datapath.Attachment) error {
	return f.detachUnless(func(name string, _ netdev.Filter) bool {
		return slices.ContainsFunc(wanted, func(a datapath.Attachment) bool { return a.String() == name })
	})
}

// detachQueries detaches the filters that steer queries and leaves those that bring replies back.
func (f filters) detachQueries() error {
	return f.detachUnless(func(_ string, filter netdev.Filter) bool { return filter.Name == string(datapath.FromBackend) })
}

func (f filters) detachUnless(keep func(name string, filter netdev.Filter) bool) error {
	var errs []error
	for _, change := range f.journal.Changes() {
		if change.Kind != changeFilter {
			continue
		}
		data, err := recorded[filterChange](change)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if keep(change.Name, data.Filter) {
			continue
		}
		err = data.undo()
		if err == nil {
			err = f.journal.Forget(change.Kind, change.Name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// strayFilters are filters of ours on any interface whose programs no other process holds, nor this one by its own word.
func strayFilters(own func(program uint32) bool) (stray []netdev.Filter, err error) {
	programs := make(map[netdev.Filter]uint32)
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, i := range interfaces {
		for _, a := range []datapath.Attachment{{Program: datapath.FromHost, Egress: true}, {Program: datapath.FromClient}, {Program: datapath.FromBackend}} {
			a.Ifindex = i.Index
			filter := filterOf(a)
			id, _, err := netdev.FilterProgram(filter)
			if err != nil {
				return nil, err
			}
			if id != 0 && !own(id) {
				programs[filter] = id
				stray = append(stray, filter)
			}
		}
	}
	if len(stray) == 0 {
		return nil, nil
	}
	owned, err := heldByOthers(heldPrograms)
	return slices.DeleteFunc(stray, func(f netdev.Filter) bool { return owned[programs[f]] }), err
}
