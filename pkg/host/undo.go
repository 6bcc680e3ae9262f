//go:build linux

package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// Kinds of changes in the journal, besides those of package resolvconf.
const (
	changePins   = "pins"   // name: the pin directory
	changeSysctl = "sysctl" // name: the sysctl's, data: sysctlChange
	changeFilter = "filter" // name: the attachment's, data: filterChange
	changeQdisc  = "qdisc"  // name: the interface's index, data: qdiscChange
)

// undoOrder is the order in which the kinds are undone: after the resolver, and filters before what they are on and use.
var undoOrder = []string{changeFilter, changeQdisc, changePins, changeSysctl}

type sysctlChange struct {
	Old string `json:"old"`
	New string `json:"new"`
}

// OpenJournal opens the journal. A damaged one is set aside: what can be undone without it, the resolver file first of
// all, is not to wait for somebody to repair it.
func OpenJournal(c config.Config, log *zap.Logger) (*state.Journal, error) {
	journal, err := state.Open(c.StateDir)
	if errors.Is(err, state.ErrCorrupt) {
		aside, asideErr := state.SetAside(c.StateDir)
		if asideErr != nil {
			return nil, errors.Join(err, asideErr)
		}
		log.Warn("journal damaged: undoing what can be found without it", zap.String("path", aside), zap.Error(err))
		journal, err = state.Open(c.StateDir)
	}
	if err != nil {
		return nil, err
	}
	if reason := journal.Recovered(); reason != nil {
		log.Warn("journal damaged: using the generation before", zap.Error(reason))
	}
	return journal, nil
}

// ErrOtherNetwork means that an attachment is that of another network namespace, which is still there.
var ErrOtherNetwork = errors.New("attached in another network namespace")

// SameNetwork reports whether this is the network namespace that the journal's changes were made in: after a reboot none is. It
// fails with ErrOtherNetwork if that is another one that still exists: what is undone from here would be undone in the wrong place.
func SameNetwork(journal *state.Journal) (bool, error) {
	then, now := journal.Header().Network, netdev.Namespace()
	if journal.Rebooted() {
		return false, nil
	}
	if then == "" || now == "" || then == now {
		return true, nil
	}
	place := netdev.FindNamespace(then)
	if place == "" || place == netdev.FindNamespace(now) { // its number has been given to this one since
		return false, nil
	}
	return false, fmt.Errorf("%w, %s: run this there: nsenter --net=%s k2s-dnsbpf detach", ErrOtherNetwork, then, place)
}

// inNetwork are the kinds of changes that end with their network namespace.
var inNetwork = []string{changeFilter, changeQdisc, changeSysctl}

// Undo puts everything back that the journal knows, in the order of a detach: the resolver first. It
// continues after an error; what failed stays in the journal. It returns a line for each thing that was done. In another network
// namespace than that of the changes it does nothing and fails with ErrOtherNetwork, unless theirs is gone.
func Undo(c config.Config, journal *state.Journal, log *zap.Logger) ([]string, error) {
	same, err := SameNetwork(journal)
	if err != nil {
		return nil, err
	}
	lost := journal.Empty()
	done, err := RestoreResolver(c, journal, log)
	if err != nil {
		// Programs that ask us must not be left without an answer: nothing else is taken away from them.
		return done, err
	}
	var errs []error
	for _, kind := range undoOrder {
		changes := slices.Clone(journal.Changes())
		slices.Reverse(changes)
		for _, change := range changes {
			if change.Kind != kind {
				continue
			}
			line, err := "", error(nil)
			if same || !journal.Rebooted() && !slices.Contains(inNetwork, kind) {
				line, err = undoChange(change)
			}
			if err != nil {
				errs = append(errs, err)
				continue
			}
			if line != "" {
				done = append(done, line)
			}
			if err := journal.Forget(change.Kind, change.Name); err != nil {
				errs = append(errs, err)
			}
		}
	}
	ghosts, unseen, err := removeGhosts(c)
	done, errs = slices.Concat(done, ghosts, unseen), append(errs, err)
	if lost && same && len(unseen) == 0 {
		lines, err := undoCopiedSysctls(c, len(ghosts) > 0)
		done, errs = append(done, lines...), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return done, err
	}
	if !journal.Empty() {
		return done, nil
	}
	return done, ClearJournal(c, journal, log)
}

// removeGhosts takes away what a lost journal knew of, or what is pinned where nobody sees it. It leaves alone what it can't see
// enough of, and says so; that is no failure of what was to be undone.
func removeGhosts(c config.Config) (done, unseen []string, err error) {
	var errs []error
	if pinned, err := datapath.PinnedPrograms(c.BPFFS); err == nil && len(pinned) > 0 {
		done = append(done, "programs detached, pins removed from "+c.BPFFS)
		errs = append(errs, datapath.Remove(c.BPFFS))
	}
	ghosts, unseen, err := detachGhosts(func(uint32) bool { return false })
	return append(done, ghosts...), unseen, errors.Join(append(errs, err)...)
}

// detachGhosts detaches the programs of ours that no living process holds, but those that own reports by their number.
func detachGhosts(own func(program uint32) bool) (done, unseen []string, err error) {
	var errs []error
	programs, err := datapath.Attached(netdev.XDPProgram)
	if err == nil {
		programs, err = withoutOwner(slices.DeleteFunc(programs, func(p datapath.AttachedProgram) bool { return own(p.KernelID) }))
	}
	if err != nil {
		unseen, programs = append(unseen, left(err)), nil
	}
	errs = append(errs, datapath.Detach(programs))
	for _, p := range programs {
		done = append(done, fmt.Sprintf("%s detached from %s, which no journal knew of", p.Name, p.Interface))
	}
	filters, err := strayFilters(own)
	if err != nil {
		unseen, filters = append(unseen, left(err)), nil
	}
	for _, f := range filters {
		// The qdisc stays: nobody knows any more whose it is, and an empty one does nothing.
		if err := netdev.DetachFilter(f); err != nil {
			errs = append(errs, err)
			continue
		}
		done = append(done, fmt.Sprintf("filter %s removed, which no journal knew of", f.Name))
	}
	return done, slices.Compact(unseen), errors.Join(errs...)
}

func left(err error) string {
	return fmt.Sprintf("programs that no journal knows of stay, if there are any: %s: run k2s-dnsbpf detach with all of root's capabilities", err)
}

// DescribeUndo says what Undo would do, a line for each thing.
func DescribeUndo(journal *state.Journal) (lines []string) {
	for _, path := range resolvconf.RecordedPaths(journal) {
		lines = append(lines, "restore "+path)
	}
	for _, change := range journal.Changes() {
		switch change.Kind {
		case changePins:
			lines = append(lines, "detach the programs and remove the pins below "+change.Name)
		case changeSysctl:
			lines = append(lines, "set sysctl "+change.Name+" back")
		case changeFilter:
			lines = append(lines, "remove the filter "+change.Name)
		}
	}
	return lines
}

// ClearJournal removes an empty journal, and its directory if nothing else is in it.
func ClearJournal(c config.Config, journal *state.Journal, log *zap.Logger) error {
	if err := journal.Clear(); err != nil {
		return err
	}
	// What is kept for pods keeps the directory; after an attach that failed there is nothing.
	if err := rundir.RemoveIfEmpty(c.StateDir); err != nil {
		log.Warn("empty state directory not removed", zap.Error(err))
	}
	return nil
}

func undoChange(change state.Change) (string, error) {
	switch change.Kind {
	case changePins:
		return "programs detached, pins removed from " + change.Name, datapath.Remove(change.Name)
	case changeSysctl:
		data, err := recorded[sysctlChange](change)
		if err != nil {
			return "", err
		}
		return undoSysctl(change.Name, data)
	case changeFilter:
		data, err := recorded[filterChange](change)
		if err != nil {
			return "", err
		}
		return "filter removed: " + change.Name, data.undo()
	case changeQdisc:
		data, err := recorded[qdiscChange](change)
		if err != nil {
			return "", err
		}
		return "", data.undo()
	}
	return "", fmt.Errorf("journal: unknown change %q, written by a newer version: use that version", change.Kind)
}

// recorded decodes what the journal keeps of a change.
func recorded[T any](change state.Change) (data T, err error) {
	if err := json.Unmarshal(change.Data, &data); err != nil {
		return data, fmt.Errorf("journal: %s %s: %w", change.Kind, change.Name, err)
	}
	return data, nil
}

// undoSysctl leaves a value alone that somebody else has set since.
func undoSysctl(name string, change sysctlChange) (string, error) {
	now, err := netdev.Sysctl(name)
	if err != nil {
		return "", err
	}
	if now != change.New {
		return "", nil
	}
	return fmt.Sprintf("sysctl %s is %s again", name, change.Old), netdev.SetSysctl(name, change.Old)
}

// RestoreResolver puts every file back that the journal knows.
func RestoreResolver(c config.Config, journal *state.Journal, log *zap.Logger) ([]string, error) {
	paths := resolvconf.RecordedPaths(journal)
	if !slices.Contains(paths, c.ResolvConf) {
		paths = append(paths, c.ResolvConf)
	}
	var done []string
	var errs []error
	for _, path := range paths {
		manager, err := resolvconf.New(resolvconf.Options{
			Path: path, StateDir: c.StateDir, Journal: journal, Logger: log.Named("resolver"),
		})
		if err != nil {
			errs = append(errs, err)
			continue
		}
		outcome, err := manager.Restore()
		done, errs = append(done, OutcomeLines(path, outcome)...), append(errs, err)
	}
	return done, errors.Join(errs...)
}

// OutcomeLines says what a restore has done; nothing if that was nothing.
func OutcomeLines(path string, outcome resolvconf.Outcome) []string {
	if outcome.Result == "" || outcome.Result == resolvconf.NothingToDo {
		return nil
	}
	line := fmt.Sprintf("%s: %s", path, outcome.Result)
	if outcome.Detail != "" {
		line += ": " + outcome.Detail
	}
	return []string{line}
}
