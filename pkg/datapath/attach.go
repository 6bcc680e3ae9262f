//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Program names one of the object's programs.
type Program string

// The programs, one per kind of attach point.
const (
	FromHost    = Program(dnsbpfProgDnsFromHost)    // egress of lo
	FromClient  = Program(dnsbpfProgDnsFromClient)  // ingress of an interface that clients are behind
	FromBackend = Program(dnsbpfProgDnsFromBackend) // ingress of an interface that leads to an endpoint
	// IngressFilter is XDP of an interface that other hosts ask on.
	IngressFilter = Program(dnsbpfProgDnsFilter)
)

// Attachment is one program on one hook of one interface.
type Attachment struct {
	Program   Program
	Interface string
	Ifindex   int
	Egress    bool
}

// Hook returns "ingress", "egress" or "xdp".
func (a Attachment) Hook() string {
	switch {
	case a.Program == IngressFilter:
		return "xdp"
	case a.Egress:
		return "egress"
	}
	return "ingress"
}

// pinName is a.String() without what a BPF file system refuses: a dot, which names of VLAN interfaces have. The escape
// starts with a character that no interface name can have, so two names never become one.
func (a Attachment) pinName() string {
	return fmt.Sprintf("%s-%s-%s", a.Program, strings.ReplaceAll(a.Interface, ".", ":"), a.Hook())
}

// String names the attachment in logs and errors.
func (a Attachment) String() string {
	return fmt.Sprintf("%s on %s of %s", a.Program, a.Hook(), a.Interface)
}

// TrafficControl attaches programs with a clsact qdisc and BPF filters, for kernels without TCX links. AttachFilter and
// DetachFilter are idempotent.
type TrafficControl interface {
	AttachFilter(a Attachment, programFD int) error
	DetachFilter(a Attachment) error
	// HasFilter reports whether the filter is there and runs the program of an ID, or its interface is gone.
	HasFilter(a Attachment, program uint32) (bool, error)
}

func (d *Datapath) program(name Program) (*ebpf.Program, error) {
	switch name {
	case FromHost:
		return d.objects.DnsFromHost, nil
	case FromClient:
		return d.objects.DnsFromClient, nil
	case FromBackend:
		return d.objects.DnsFromBackend, nil
	case IngressFilter:
		return d.objects.DnsFilter, nil
	}
	return nil, fmt.Errorf("no program %q in the object", name)
}

// ReplaceAttachments makes the given attachments the only ones that are pinned. Those that exist get the loaded
// programs without a gap; new ones are attached before old ones go.
func (d *Datapath) ReplaceAttachments(attachments []Attachment) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	maps.DeleteFunc(d.missing, func(a Attachment, _ bool) bool { return !slices.Contains(attachments, a) })
	keep := make(map[string]bool, len(attachments))
	for _, attachment := range attachments {
		keep[attachment.pinName()] = true
		if err := d.attach(attachment); err != nil {
			return fmt.Errorf("attach %s: %w", attachment, err)
		}
	}
	var errs []error
	for filter := range d.filters {
		if !keep[filter.pinName()] {
			errs = append(errs, d.options.TrafficControl.DetachFilter(filter))
			delete(d.filters, filter)
		}
	}
	errs = append(errs, d.dropLinks(attachments), d.sweepPins(keep))
	return errors.Join(errs...)
}

// dropLinks detaches the links that are held and not wanted. One that is held by two names of its interface stays.
func (d *Datapath) dropLinks(wanted []Attachment) error {
	kept := make(map[link.ID]bool, len(wanted))
	for _, a := range wanted {
		if l := d.links[a]; l != nil {
			kept[linkID(l)] = true
		}
	}
	var errs []error
	for a, l := range d.links {
		if slices.Contains(wanted, a) {
			continue
		}
		if !kept[linkID(l)] {
			errs = append(errs, l.Detach())
		}
		errs = append(errs, l.Close())
		delete(d.links, a)
	}
	return errors.Join(errs...)
}

// linkID returns the kernel's number of a link, 0 if it can't be read.
func linkID(l link.Link) link.ID {
	info, err := l.Info()
	if err != nil {
		return 0
	}
	return info.ID
}

// sweepPins removes the pins of links that are not wanted, and detaches those that nobody holds: a dead daemon's. A pin whose
// link is held is one that goes by the former name of its interface.
func (d *Datapath) sweepPins(keep map[string]bool) error {
	entries, err := os.ReadDir(d.linkDir())
	if errors.Is(err, os.ErrNotExist) {
		return nil // see Verify
	}
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	held := make(map[link.ID]bool, len(d.links))
	for _, l := range d.links {
		held[linkID(l)] = true
	}
	var errs []error
	for _, entry := range entries {
		if keep[entry.Name()] {
			continue
		}
		pin := filepath.Join(d.linkDir(), entry.Name())
		if id, err := pinnedID(pin); err == nil && held[id] {
			errs = append(errs, os.Remove(pin))
		} else if err := unpinLink(pin); err != nil {
			errs = append(errs, fmt.Errorf("detach %s: %w", entry.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// pinnedID is linkID of a pinned one.
func pinnedID(pin string) (link.ID, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return 0, fmt.Errorf("open pinned link: %w", err)
	}
	defer l.Close()
	return linkID(l), nil
}

// attach remembers what is missing after an error: nothing else may be left of it.
func (d *Datapath) attach(a Attachment) error {
	err := describe(d.tryAttach(a))
	if err != nil {
		d.missing[a] = true
	} else {
		delete(d.missing, a)
	}
	return err
}

func (d *Datapath) tryAttach(a Attachment) error {
	program, err := d.program(a.Program)
	if err != nil {
		return err
	}
	if a.Program != IngressFilter && !d.tcx {
		return d.attachFilter(a, program)
	}
	if held := d.links[a]; held != nil && runs(held, a.Ifindex, d.ids[program]) {
		return nil
	}
	l, err := d.inherit(a, program)
	// Not before: a pin may be all that holds a dead daemon's link.
	err = errors.Join(err, d.forget(a))
	if err == nil && l == nil {
		l, err = newLink(a, program)
	}
	if err != nil {
		return err
	}
	d.links[a] = l
	return l.Pin(filepath.Join(d.linkDir(), a.pinName()))
}

// forget gives up what is held by the name of an attachment: the interface went, or somebody has detached the link.
func (d *Datapath) forget(a Attachment) error {
	for old, l := range d.links {
		if old.pinName() == a.pinName() {
			_ = l.Close()
			delete(d.links, old)
		}
	}
	if err := os.Remove(filepath.Join(d.linkDir(), a.pinName())); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove stale pin: %w", err)
	}
	return nil
}

// inherit puts the program into a link of ours that is on the hook already, and returns it; nil if there is none. What else
// of ours is there is detached: of two steering programs, the second would see nothing, and continue after the first is gone.
func (d *Datapath) inherit(a Attachment, program *ebpf.Program) (inherited link.Link, err error) {
	found, err := d.onHook(a)
	if errors.Is(err, os.ErrPermission) {
		return nil, nil // what can't be seen can't be inherited
	}
	if err != nil {
		return nil, err
	}
	for _, f := range found {
		l, err := link.NewFromID(f.link)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return inherited, fmt.Errorf("open link %d of %s: %w", f.link, a, err)
		}
		if inherited != nil {
			err = errors.Join(l.Detach(), l.Close())
		} else if err = l.Update(program); err == nil {
			inherited = l
		} else {
			_ = l.Close()
		}
		if err != nil && !errors.Is(err, unix.ENOLINK) { // its interface went just now
			return inherited, fmt.Errorf("replace program of %s: %w", a, err)
		}
	}
	return inherited, nil
}

// errNoTCX means that nobody has given a way to attach without TCX links.
var errNoTCX = fmt.Errorf("TCX links: %w: they take Linux 6.6", ebpf.ErrNotSupported)

// kernelHasTCX asks the kernel whether it has TCX links. It is done once, when descriptors are at hand: an attach that fails for want of
// one looks as if there were none.
func kernelHasTCX(program *ebpf.Program) (bool, error) {
	const nowhere = math.MaxInt32
	_, err := link.AttachTCX(link.TCXOptions{Interface: nowhere, Program: program, Attach: ebpf.AttachTCXIngress})
	switch {
	case errors.Is(err, unix.ENODEV):
		return true, nil
	case errors.Is(err, ebpf.ErrNotSupported):
		return false, nil
	}
	return false, fmt.Errorf("ask for TCX links: %w", err)
}

// lacksDescriptors tells the errors that say nothing of what was asked for.
func lacksDescriptors(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)
}

func newLink(a Attachment, program *ebpf.Program) (link.Link, error) {
	if a.Program == IngressFilter {
		return attachXDP(a, program)
	}
	attach := ebpf.AttachTCXIngress
	if a.Egress {
		attach = ebpf.AttachTCXEgress
	}
	// At the head: a program before ours that ends the walk, as a CNI's may, would hide packets from us, while ours
	// lets everything pass on that is not DNS for it.
	return link.AttachTCX(link.TCXOptions{Interface: a.Ifindex, Program: program, Attach: attach, Anchor: link.Head()})
}

// runs reports whether a link is on an interface and runs a program.
func runs(l link.Link, ifindex int, program ebpf.ProgramID) bool {
	info, err := l.Info()
	if err != nil || info.Program != program {
		return false
	}
	now, err := linkIfindex(l)
	return err == nil && now == ifindex
}

// interfaceGone reports true only if that is certain, not if it can't be determined, for example for lack of a descriptor.
func interfaceGone(ifindex int) bool {
	_, err := net.InterfaceByIndex(ifindex)
	var call *os.SyscallError
	return err != nil && !errors.As(err, &call)
}

func (d *Datapath) attachFilter(a Attachment, program *ebpf.Program) error {
	if d.options.TrafficControl == nil {
		return errNoTCX
	}
	if d.filters[a] {
		if has, err := d.options.TrafficControl.HasFilter(a, uint32(d.ids[program])); err != nil || has {
			return err
		}
	}
	if err := d.options.TrafficControl.AttachFilter(a, program.FD()); err != nil {
		return err
	}
	d.filters[a] = true
	return nil
}

// attachXDP prefers the driver's own hook. Interfaces whose driver has none, a bridge for one, get the generic hook, and
// so do those whose driver refuses as they are set up: with jumbo frames, with offloads, for lack of a queue. There the
// program is shown each frame in one piece, too.
func attachXDP(a Attachment, program *ebpf.Program) (link.Link, error) {
	options := link.XDPOptions{Interface: a.Ifindex, Program: program, Flags: link.XDPDriverMode}
	taken := func(err error) bool { return errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) }
	xdp, err := link.AttachXDP(options)
	if err != nil && !taken(err) && !lacksDescriptors(err) {
		options.Flags = link.XDPGenericMode
		xdp, err = link.AttachXDP(options)
	}
	if taken(err) {
		return nil, fmt.Errorf("another XDP program is on %s: %w", a.Interface, err)
	}
	return xdp, err
}

// TryIngressFilter attaches the ingress filter where it can be. It is no condition for anything else: an interface takes one XDP program,
// and one that has another keeps it. The attachment must then be part of the next ReplaceAttachments.
func (d *Datapath) TryIngressFilter(ifname string, ifindex int) (Attachment, error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	filter := Attachment{Program: IngressFilter, Interface: ifname, Ifindex: ifindex}
	if err := d.attach(filter); err != nil {
		return filter, fmt.Errorf("attach %s: %w", filter, err)
	}
	return filter, nil
}

// unpinLink detaches a pinned link and removes its pin. The pin alone is not enough: the kernel drops what a file on a
// BPF file system holds only after an RCU grace period, and until then the program would go on running. What somebody else has
// pinned there stays.
func unpinLink(pin string) error {
	program := programOf(pin)
	if program == "" {
		return nil
	}
	pinned, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if lacksDescriptors(err) || errors.Is(err, unix.EPERM) {
		return fmt.Errorf("open pinned link: %w", err)
	}
	if err != nil {
		return os.Remove(pin) // it is no link
	}
	if info, err := pinned.Info(); err == nil {
		// Without permission to inspect programs, the name of the pin has to suffice.
		if ours, err := isProgram(info.Program, program); err == nil && !ours {
			return pinned.Close()
		}
	}
	return errors.Join(pinned.Detach(), pinned.Close(), os.Remove(pin))
}

// programOf returns the program that the name of a pin begins with, of this version or an earlier one; "" for a pin that is none of
// ours.
func programOf(pin string) Program {
	name, _, _ := strings.Cut(filepath.Base(pin), "-")
	for _, hook := range hooks {
		if name == string(hook.Program) || name == former[hook.Program] {
			return Program(name)
		}
	}
	return ""
}

func linkIfindex(l link.Link) (int, error) {
	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("read link: %w", err)
	}
	if tcx := info.TCX(); tcx != nil {
		return int(tcx.Ifindex), nil
	}
	if xdp := info.XDP(); xdp != nil {
		return int(xdp.Ifindex), nil
	}
	return 0, fmt.Errorf("link %d is neither TCX nor XDP", info.ID)
}

// AttachedProgram describes one pinned attachment.
type AttachedProgram struct {
	Name      string `json:"name"`
	Attach    string `json:"attach"` // such as tcx/egress
	Ifindex   int    `json:"-"`      // 0 if the interface is gone
	Interface string `json:"interface"`
	KernelID  uint32 `json:"kernel_id"` // as bpftool prog show knows it

	// LinkID is what the kernel numbers its link; of Attached only.
	LinkID uint32 `json:"-"`

	pin string // of PinnedPrograms
}

// PinnedPrograms lists the attachments that are pinned below pinDir, for those who did not make them. The interface is
// named as it was when the program was attached.
func PinnedPrograms(pinDir string) ([]AttachedProgram, error) {
	dir := filepath.Join(pinDir, "links")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read pin directory: %w", err)
	}
	programs := make([]AttachedProgram, 0, len(entries))
	for _, entry := range entries {
		if programOf(entry.Name()) == "" {
			continue
		}
		program, err := pinnedProgram(filepath.Join(dir, entry.Name()))
		if err != nil {
			return nil, err
		}
		programs = append(programs, program)
	}
	return programs, nil
}

func pinnedProgram(pin string) (program AttachedProgram, err error) {
	pinned, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return program, fmt.Errorf("open pinned link: %w", err)
	}
	defer pinned.Close()
	info, err := pinned.Info()
	if err != nil {
		return program, fmt.Errorf("read pinned link: %w", err)
	}
	// dns_from_host-lo-egress; the interface may have dashes of its own.
	name, rest, _ := strings.Cut(filepath.Base(pin), "-")
	last := strings.LastIndexByte(rest, '-')
	if last < 0 {
		return program, fmt.Errorf("pinned link %s: not a name that k2s-dnsbpf gives", pin)
	}
	hook := rest[last+1:]
	if hook != "xdp" {
		hook = "tcx/" + hook
	}
	program = AttachedProgram{
		Name:      name,
		Attach:    hook,
		Interface: strings.ReplaceAll(rest[:last], ":", "."),
		KernelID:  uint32(info.Program),
		pin:       pin,
	}
	program.Ifindex, err = linkIfindex(pinned)
	return program, err
}

// DetachQueries detaches the programs that steer queries and leaves those that bring replies back: the first half of a
// detach that loses nothing.
func (d *Datapath) DetachQueries() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for a, l := range d.links {
		if a.Program == FromBackend {
			continue
		}
		errs = append(errs, l.Detach(), l.Close())
		if err := os.Remove(filepath.Join(d.linkDir(), a.pinName())); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
		delete(d.links, a)
	}
	return errors.Join(errs...)
}
