package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// filterPriority is where our filters stand among those of a hook: first, as the TCX attachments do.
const filterPriority = 1

// filterHandle makes our filters recognisable after a crash: "dns" in ASCII.
const filterHandle = 0x646e73

// Filter is a BPF program that is attached with a clsact qdisc, in direct-action mode (tc-bpf(8)).
type Filter struct {
	Ifindex int    `json:"ifindex"`
	Egress  bool   `json:"egress"`
	Name    string `json:"name"`
	// Index tells filters on the same hook apart.
	Index uint16 `json:"index"`
}

func (f Filter) parent() uint32 {
	if f.Egress {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

func clsact(ifindex int) *netlink.GenericQdisc {
	return &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
		QdiscType:  "clsact",
	}
}

// HasClsact reports whether the interface has a clsact qdisc: so that only one that was added is removed again.
func HasClsact(ifindex int) (bool, error) {
	device, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return false, fmt.Errorf("look up interface %d: %w", ifindex, err)
	}
	qdiscs, err := retryInterrupted(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(device) })
	if err != nil {
		return false, fmt.Errorf("list qdiscs of interface %d: %w", ifindex, err)
	}
	for _, qdisc := range qdiscs {
		if qdisc.Type() == "clsact" {
			return true, nil
		}
	}
	return false, nil
}

// AddClsact adds the clsact qdisc to an interface if it has none.
func AddClsact(ifindex int) error {
	if err := netlink.QdiscAdd(clsact(ifindex)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact qdisc to interface %d: %w", ifindex, err)
	}
	return nil
}

// AttachFilter attaches a program, or replaces the one that the same filter has. It adds the clsact qdisc if missing.
func AttachFilter(f Filter, programFD int) error {
	if err := AddClsact(f.Ifindex); err != nil {
		return err
	}
	filter := f.netlink()
	filter.Fd = programFD
	if err := netlink.FilterReplace(filter); err != nil {
		return fmt.Errorf("add filter %s to interface %d: %w", f.Name, f.Ifindex, err)
	}
	return nil
}

func (f Filter) netlink() *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: f.Ifindex,
			Parent:    f.parent(),
			Handle:    filterHandle + uint32(f.Index),
			Protocol:  unix.ETH_P_ALL,
			Priority:  filterPriority + f.Index,
		},
		Name:         f.Name,
		DirectAction: true,
	}
}

// FilterProgram returns the kernel's ID of the program that a filter runs and the name of its interface: no ID if the
// filter is gone, no name if the interface is.
func FilterProgram(f Filter) (id uint32, ifname string, err error) {
	device, err := netlink.LinkByIndex(f.Ifindex)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return 0, "", nil
	}
	if err != nil {
		return 0, "", fmt.Errorf("look up interface %d: %w", f.Ifindex, err)
	}
	ifname = device.Attrs().Name
	filters, err := retryInterrupted(func() ([]netlink.Filter, error) { return netlink.FilterList(device, f.parent()) })
	if err != nil && !isGone(err) {
		return 0, ifname, fmt.Errorf("list filters of interface %s: %w", ifname, err)
	}
	wanted := f.netlink()
	for _, filter := range filters {
		found, ok := filter.(*netlink.BpfFilter)
		if ok && found.Handle == wanted.Handle && found.Priority == wanted.Priority && found.Name == wanted.Name {
			return uint32(found.Id), ifname, nil
		}
	}
	return 0, ifname, nil
}

// DetachFilter removes a filter. It is not an error if the filter or its interface does not exist.
func DetachFilter(f Filter) error {
	err := netlink.FilterDel(f.netlink())
	if err != nil && !isGone(err) {
		return fmt.Errorf("remove filter %s from interface %d: %w", f.Name, f.Ifindex, err)
	}
	return nil
}

// RemoveClsact removes the clsact qdisc, if no filter is left on it.
func RemoveClsact(ifindex int) error {
	device, err := netlink.LinkByIndex(ifindex)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up interface %d: %w", ifindex, err)
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, err := retryInterrupted(func() ([]netlink.Filter, error) { return netlink.FilterList(device, parent) })
		if err != nil && !isGone(err) {
			return fmt.Errorf("list filters of interface %d: %w", ifindex, err)
		}
		if len(filters) > 0 {
			return nil
		}
	}
	if err := netlink.QdiscDel(clsact(ifindex)); err != nil && !isGone(err) {
		return fmt.Errorf("remove clsact qdisc from interface %d: %w", ifindex, err)
	}
	return nil
}

// isGone tells the errors for a filter, qdisc or interface that does not exist (any more).
func isGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL)
}
