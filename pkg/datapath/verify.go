//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Verify looks whether what was put into the kernel is still there, and says what is not, each in a few words. It takes
// some ten system calls for each attachment and map, and two for each element of a map. Heal puts it back.
func (d *Datapath) Verify() (wrong []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	wrong = append(d.lostHooks(), d.lostPins()...)
	for _, name := range slices.Sorted(maps.Keys(d.contents)) {
		same, err := d.contents[name].same()
		switch {
		case err != nil:
			wrong = append(wrong, err.Error())
		case !same:
			wrong = append(wrong, "map "+name+" was changed")
		}
	}
	return wrong
}

// Intact reports whether every program is still where it was attached: the part of Verify that costs least and matters most.
func (d *Datapath) Intact() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.lostHooks()) == 0
}

// lostHooks leaves out what went with its interface: the next plan will.
func (d *Datapath) lostHooks() (lost []string) {
	for a, l := range d.links {
		program, err := d.program(a.Program)
		if err == nil && !runs(l, a.Ifindex, d.ids[program]) && !interfaceGone(a.Ifindex) {
			lost = append(lost, a.String()+" is not attached any more")
		}
	}
	for a := range d.filters {
		program, err := d.program(a.Program)
		has := false
		if err == nil {
			has, err = d.options.TrafficControl.HasFilter(a, uint32(d.ids[program]))
		}
		switch {
		case err != nil:
			lost = append(lost, err.Error())
		case !has:
			lost = append(lost, a.String()+" is not attached any more")
		}
	}
	for a := range d.missing {
		if !interfaceGone(a.Ifindex) {
			lost = append(lost, a.String()+" is not attached any more")
		}
	}
	slices.Sort(lost)
	return slices.Compact(lost)
}

func (d *Datapath) lostPins() (lost []string) {
	count := 0
	for path, object := range d.pins() {
		if !isPin(path, object) {
			count++
		}
	}
	if count > 0 {
		lost = append(lost, fmt.Sprintf("%d pins below %s are gone, or of something else", count, d.options.PinDir))
	}
	return lost
}

// pinned is what can be pinned.
type pinned interface {
	Pin(path string) error
	Unpin() error
}

// isPin reports whether a path is the pin of an object, or that can't be told just now.
func isPin(path string, object pinned) bool {
	var now, wanted uint32
	var err error
	if m, ok := object.(*ebpf.Map); ok {
		wanted, _ = mapID(m)
		now, err = pinnedMapID(path)
	} else if l, ok := object.(link.Link); ok {
		var id link.ID
		wanted = uint32(linkID(l))
		id, err = pinnedID(path)
		now = uint32(id)
	}
	return now == wanted || lacksDescriptors(err) || errors.Is(err, unix.ENOMEM)
}

func pinnedMapID(path string) (uint32, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return 0, fmt.Errorf("open pinned map: %w", err)
	}
	defer m.Close()
	return mapID(m)
}

func mapID(m *ebpf.Map) (uint32, error) {
	info, err := m.Info()
	if err != nil {
		return 0, fmt.Errorf("read map: %w", err)
	}
	id, _ := info.ID()
	return uint32(id), nil
}

// pins are all that there should be, by path.
func (d *Datapath) pins() map[string]pinned {
	pins := make(map[string]pinned)
	for m, name := range d.mapNames {
		pins[filepath.Join(d.mapDir(), name)] = m
	}
	for a, l := range d.links {
		pins[filepath.Join(d.linkDir(), a.pinName())] = l
	}
	return pins
}

// Heal puts back what Verify finds missing, and touches nothing else. Without a BPF file system pins can't be: that is an
// error, and all the rest is as it should be.
func (d *Datapath) Heal() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, content := range d.contents {
		errs = append(errs, content.restore())
	}
	pinErr := d.repin()
	for _, a := range slices.Concat(slices.Collect(maps.Keys(d.links)), slices.Collect(maps.Keys(d.filters)), slices.Collect(maps.Keys(d.missing))) {
		// An interface that is gone is for the next plan to leave out.
		if err := d.attach(a); err != nil && !interfaceGone(a.Ifindex) {
			errs = append(errs, fmt.Errorf("attach %s: %w", a, err))
		}
	}
	return errors.Join(append(errs, pinErr)...)
}

func (d *Datapath) repin() error {
	if len(d.lostPins()) == 0 {
		return nil
	}
	if err := CheckPinDir(d.options.PinDir); err != nil {
		return err
	}
	if err := d.makeDirs(); err != nil {
		return err
	}
	var errs []error
	for path, object := range d.pins() {
		if isPin(path, object) {
			continue
		}
		// It believes to be pinned; what has its place goes.
		errs = append(errs, object.Unpin(), object.Pin(path))
	}
	return errors.Join(errs...)
}

// content is what a map was left with.
type content interface {
	same() (bool, error)
	restore() error
}

// remember notes what is in a map now: what it should hold until it is written again. It is done after a write that failed, too:
// what that has left is not the work of others. The caller holds mu.
func remember[K, V comparable](d *Datapath, m *ebpf.Map) error {
	delete(d.contents, d.mapNames[m])
	elements, err := dump[K, V](m)
	if err != nil {
		return err
	}
	d.contents[d.mapNames[m]] = &elementsOf[K, V]{m, elements}
	return nil
}

type elementsOf[K, V comparable] struct {
	of       *ebpf.Map
	elements map[K]V
}

func (e *elementsOf[K, V]) same() (bool, error) {
	now, err := dump[K, V](e.of)
	return maps.Equal(now, e.elements), err
}

func (e *elementsOf[K, V]) restore() error {
	now, err := dump[K, V](e.of)
	if err != nil {
		return err
	}
	for key, value := range e.elements {
		if old, ok := now[key]; ok && old == value {
			continue
		}
		if err := e.of.Put(key, value); err != nil {
			return fmt.Errorf("write map %s: %w", e.of, err)
		}
	}
	return deleteUnless(e.of, func(key K) bool { _, keep := e.elements[key]; return keep })
}

func dump[K, V comparable](m *ebpf.Map) (map[K]V, error) {
	var (
		key   K
		value V
	)
	elements := make(map[K]V)
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		elements[key] = value
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("walk map %s: %w", m, err)
	}
	return elements, nil
}

// configContent is dns_config, which changes with each heartbeat.
type configContent struct{ d *Datapath }

func (c configContent) same() (bool, error) {
	var now dnsbpfDnsConfig
	if err := c.d.objects.DnsConfig.Lookup(uint32(0), &now); err != nil {
		return false, fmt.Errorf("read map dns_config: %w", err)
	}
	return now == *c.d.config, nil
}

func (c configContent) restore() error { return c.d.writeConfig(*c.d.config) }

var _ pinned = link.Link(nil)
