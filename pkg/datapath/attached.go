//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// What is attached is found by the kernel's own lists. Pins tell less: the BPF file system that they are on may be covered by
// another one, or gone.

// linked is a link of ours on a hook of this network namespace.
type linked struct {
	link    link.ID
	program ebpf.ProgramID
}

// onHook returns our links on a hook.
func (d *Datapath) onHook(a Attachment) ([]linked, error) {
	if a.Program == IngressFilter {
		return xdpLinks(a.Ifindex, d.options.XDPProgram)
	}
	return tcxLinks(a)
}

func tcxLinks(a Attachment) (found []linked, err error) {
	attach := ebpf.AttachTCXIngress
	if a.Egress {
		attach = ebpf.AttachTCXEgress
	}
	result, err := link.QueryPrograms(link.QueryOptions{Target: a.Ifindex, Attach: attach})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) {
		return nil, nil // a kernel without TCX, or the interface is gone
	}
	if err != nil {
		return nil, fmt.Errorf("list programs of %s: %w", a, err)
	}
	for _, p := range result.Programs {
		id, ok := p.LinkID()
		if !ok {
			continue
		}
		ours, err := isProgram(p.ID, a.Program)
		if err != nil {
			return nil, err
		}
		if ours {
			found = append(found, linked{id, p.ID})
		}
	}
	return found, nil
}

// xdpLinks finds our link on an interface. The kernel lists links of all network namespaces, with indexes of interfaces that
// are those of each: it is the program by which this one's is known.
func xdpLinks(ifindex int, programOf func(ifindex int) (uint32, error)) (found []linked, err error) {
	if programOf == nil {
		return nil, nil
	}
	running, err := programOf(ifindex)
	if err != nil || running == 0 {
		return nil, err
	}
	if ours, err := isProgram(ebpf.ProgramID(running), IngressFilter); err != nil || !ours {
		return nil, err
	}
	// A link that is being made just now, anywhere, can't be opened yet, and ends the walk.
	const attempts = 10
	for range attempts {
		if found, err = linksOf(ebpf.ProgramID(running), ifindex); !errors.Is(err, unix.EAGAIN) {
			break
		}
	}
	return found, err
}

// linksOf returns the XDP links that run a program on an interface.
func linksOf(program ebpf.ProgramID, ifindex int) (found []linked, err error) {
	links := new(link.Iterator)
	defer links.Close()
	for links.Next() {
		info, err := links.Link.Info()
		if err != nil || info.Program != program {
			continue
		}
		if xdp := info.XDP(); xdp != nil && int(xdp.Ifindex) == ifindex {
			found = append(found, linked{info.ID, info.Program})
		}
	}
	if err := links.Err(); err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return found, nil
}

// kernelNameMax is how much of a name the kernel keeps (BPF_OBJ_NAME_LEN, less the final NUL). The whole of it may be known
// from the program's types.
const kernelNameMax = 15

// former are the names that programs had in earlier versions.
var former = map[Program]string{IngressFilter: "dns_guard"}

// isProgram reports whether a program is one of ours, of any version: by its name, and that it counts where ours do. Only
// CAP_SYS_ADMIN may look at programs by their number; without it the error is os.ErrPermission.
func isProgram(id ebpf.ProgramID, name Program) (bool, error) {
	program, err := ebpf.NewProgramFromID(id)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return false, nil // it has gone just now
	case errors.Is(err, os.ErrPermission):
		return false, fmt.Errorf("look at program %d: %w: it takes CAP_SYS_ADMIN", id, err)
	case err != nil:
		return false, fmt.Errorf("look at program %d: %w", id, err)
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return false, fmt.Errorf("look at program %d: %w", id, err)
	}
	if info.Name != string(name[:min(len(name), kernelNameMax)]) && info.Name != string(name) && info.Name != former[name] {
		return false, nil
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		// The program that is held holds its maps.
		if name, err := nameOf(id); err != nil || name == dnsbpfMapDnsStats {
			return err == nil, err
		}
	}
	return false, nil
}

func nameOf(id ebpf.MapID) (string, error) {
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return "", fmt.Errorf("look at map %d: %w", id, err)
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return "", fmt.Errorf("look at map %d: %w", id, err)
	}
	return info.Name, nil
}

// hooks are where each program can be.
var hooks = []Attachment{{Program: FromHost, Egress: true}, {Program: FromClient}, {Program: FromBackend}, {Program: IngressFilter}}

// Attached lists what of ours is attached with links in this network namespace, by the kernel's own lists. XDPProgram is as in
// Options. It needs CAP_SYS_ADMIN, or fails with os.ErrPermission.
func Attached(xdpProgram func(ifindex int) (uint32, error)) (programs []AttachedProgram, err error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	d := &Datapath{options: Options{XDPProgram: xdpProgram}}
	for _, i := range interfaces {
		for _, hook := range hooks {
			a := hook
			a.Interface, a.Ifindex = i.Name, i.Index
			found, err := d.onHook(a)
			if err != nil {
				return nil, err
			}
			for _, f := range found {
				programs = append(programs, AttachedProgram{
					Name: string(a.Program), Attach: a.attach(), Ifindex: i.Index, Interface: i.Name, KernelID: uint32(f.program), LinkID: uint32(f.link),
				})
			}
		}
	}
	return programs, nil
}

func (a Attachment) attach() string {
	if a.Program == IngressFilter {
		return a.Hook()
	}
	return "tcx/" + a.Hook()
}

// Loaded reports whether the kernel's number of a program is that of one of this Datapath's.
func (d *Datapath) Loaded(program uint32) bool {
	for _, id := range d.ids {
		if uint32(id) == program {
			return true
		}
	}
	return false
}

// Detach detaches what Attached has listed.
func Detach(programs []AttachedProgram) error {
	var errs []error
	for _, p := range programs {
		l, err := link.NewFromID(link.ID(p.LinkID))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("open link %d of %s on %s: %w", p.LinkID, p.Name, p.Interface, err))
			continue
		}
		if err := errors.Join(l.Detach(), l.Close()); err != nil {
			errs = append(errs, fmt.Errorf("detach %s from %s: %w", p.Name, p.Interface, err))
		}
	}
	return errors.Join(errs...)
}
