//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
	Guard       = Program(dnsbpfProgDnsGuard)       // XDP of an interface that other hosts ask on
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
	case a.Program == Guard:
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

// TrafficControl attaches programs with a clsact qdisc and BPF filters, for kernels without TCX links. Both methods
// are idempotent.
type TrafficControl interface {
	AttachFilter(a Attachment, programFD int) error
	DetachFilter(a Attachment) error
}

func (d *Datapath) program(name Program) (*ebpf.Program, error) {
	switch name {
	case FromHost:
		return d.objects.DnsFromHost, nil
	case FromClient:
		return d.objects.DnsFromClient, nil
	case FromBackend:
		return d.objects.DnsFromBackend, nil
	case Guard:
		return d.objects.DnsGuard, nil
	}
	return nil, fmt.Errorf("no program %q in the object", name)
}

// ReplaceAttachments makes the given attachments the only ones that are pinned. Those that exist get the loaded
// programs without a gap; new ones are attached before old ones go.
func (d *Datapath) ReplaceAttachments(attachments []Attachment) error {
	d.mu.Lock()
	defer d.mu.Unlock()

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
	entries, err := os.ReadDir(d.linkDir())
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("read pin directory: %w", err))...)
	}
	for _, entry := range entries {
		if !keep[entry.Name()] {
			if err := unpinLink(filepath.Join(d.linkDir(), entry.Name())); err != nil {
				errs = append(errs, fmt.Errorf("detach %s: %w", entry.Name(), err))
			}
		}
	}
	return errors.Join(errs...)
}

func (d *Datapath) attach(a Attachment) error {
	program, err := d.program(a.Program)
	if err != nil {
		return err
	}
	if a.Program != Guard && d.options.ForceTrafficControl && d.options.TrafficControl != nil {
		return d.attachFilter(a, program)
	}
	pin := filepath.Join(d.linkDir(), a.pinName())
	if updated, err := updateLink(pin, a, program); updated || err != nil {
		return err
	}
	if a.Program == Guard {
		return attachXDP(pin, a, program)
	}
	attach := ebpf.AttachTCXIngress
	if a.Egress {
		attach = ebpf.AttachTCXEgress
	}
	// At the head: a program before ours that ends the walk, as a CNI's may, would hide packets from us, while ours
	// lets everything pass on that is not DNS for it.
	tcx, err := link.AttachTCX(link.TCXOptions{Interface: a.Ifindex, Program: program, Attach: attach, Anchor: link.Head()})
	if errors.Is(err, ebpf.ErrNotSupported) && d.options.TrafficControl != nil {
		return d.attachFilter(a, program)
	}
	if errors.Is(err, unix.EEXIST) {
		// The interface was renamed, and our attachment is pinned under its old name.
		if err := d.repin(a, pin); err != nil {
			return err
		}
		if updated, err := updateLink(pin, a, program); updated || err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	// The pin holds the attachment from here on, not this process.
	return errors.Join(tcx.Pin(pin), tcx.Close())
}

// repin gives the attachment's link the name that it has now.
func (d *Datapath) repin(a Attachment, pin string) error {
	programs, err := PinnedPrograms(d.options.PinDir)
	if err != nil {
		return err
	}
	for _, program := range programs {
		if Program(program.Name) == a.Program && program.Ifindex == a.Ifindex && strings.HasSuffix(program.pin, "-"+a.Hook()) {
			if err := os.Rename(program.pin, pin); err != nil {
				return fmt.Errorf("rename pin: %w", err)
			}
		}
	}
	return nil
}

func (d *Datapath) attachFilter(a Attachment, program *ebpf.Program) error {
	if err := d.options.TrafficControl.AttachFilter(a, program.FD()); err != nil {
		return err
	}
	d.filters[a] = true
	return nil
}

// attachXDP prefers the driver's own hook. Interfaces whose driver has none, a bridge for one, get the generic hook, and
// so do those whose driver refuses as they are set up: with jumbo frames, with offloads, for want of a queue. There the
// program is shown each frame in one piece, too.
func attachXDP(pin string, a Attachment, program *ebpf.Program) error {
	options := link.XDPOptions{Interface: a.Ifindex, Program: program, Flags: link.XDPDriverMode}
	taken := func(err error) bool { return errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) }
	xdp, err := link.AttachXDP(options)
	if err != nil && !taken(err) {
		options.Flags = link.XDPGenericMode
		xdp, err = link.AttachXDP(options)
	}
	if taken(err) {
		return fmt.Errorf("another XDP program is on %s: %w", a.Interface, err)
	}
	if err != nil {
		return err
	}
	return errors.Join(xdp.Pin(pin), xdp.Close())
}

// TryGuard attaches the guard where it can be. It is no condition for anything else: an interface takes one XDP program,
// and one that has another keeps it. The attachment must then be part of the next ReplaceAttachments.
func (d *Datapath) TryGuard(ifname string, ifindex int) (Attachment, error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	guard := Attachment{Program: Guard, Interface: ifname, Ifindex: ifindex}
	if err := d.attach(guard); err != nil {
		return guard, fmt.Errorf("attach %s: %w", guard, err)
	}
	return guard, nil
}

// updateLink puts the program into a pinned link, if there is one and its interface is still the one that is meant.
func updateLink(pin string, a Attachment, program *ebpf.Program) (updated bool, err error) {
	pinned, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open pinned link: %w", err)
	}
	defer pinned.Close()
	if ifindex, err := linkIfindex(pinned); err == nil && ifindex == a.Ifindex {
		err := pinned.Update(program)
		if err == nil {
			return true, nil
		}
		// The interface went and took the attachment with it.
		if !errors.Is(err, unix.ENOLINK) {
			return false, fmt.Errorf("replace program: %w", err)
		}
	}
	if err := pinned.Unpin(); err != nil {
		return false, fmt.Errorf("unpin stale link: %w", err)
	}
	return false, nil
}

// unpinLink detaches a pinned link and removes its pin. The pin alone is not enough: the kernel drops what a file on a
// BPF file system holds only after an RCU grace period, and until then the program would go on running.
func unpinLink(pin string) error {
	pinned, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errors.Join(fmt.Errorf("open pinned link: %w", err), os.Remove(pin))
	}
	return errors.Join(pinned.Detach(), pinned.Close(), os.Remove(pin))
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

	pin string
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
	if Program(name) != Guard {
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
func DetachQueries(pinDir string) error {
	programs, err := PinnedPrograms(pinDir)
	if err != nil {
		return err
	}
	var errs []error
	for _, program := range programs {
		if Program(program.Name) != FromBackend {
			errs = append(errs, unpinLink(program.pin))
		}
	}
	return errors.Join(errs...)
}
