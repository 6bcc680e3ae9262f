//go:build linux

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/diagnose"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
)

// The KubeSwitch address may have a DNS server already: libvirt's dnsmasq, where the KubeSwitch is a libvirt network. It
// keeps its port, now and when it is started again: the kernel steers cluster names past it. An address that comes after
// the attach is left for a while to the server that may come with it: who binds the port first would keep the other from
// starting.

// errPortTaken is returned by an attach to a host whose own programs ask a server that has the port.
var errPortTaken = errors.New("the port is taken")

const (
	// portPatience is how long a socket may take to go whose process is one of ours on its way out, or already gone.
	portPatience = 500 * time.Millisecond
	portRetry    = 10 * time.Millisecond
)

// portHolder is who has the DNS port of the KubeSwitch address.
type portHolder struct {
	socket uint32 // inode of what takes queries by UDP, 0 if nothing does, or nobody has looked
	name   string // of the process; empty if the port is ours
	seen   bool   // there is one, or was
}

// holderUnseen is the name of no process.
const holderUnseen = "a process that can't be seen from here"

// claimAfter is how long a KubeSwitch address that has come since the attach is left to the server that may come with it, as
// libvirt's dnsmasq does with its network.
const claimAfter = 3 * time.Second

// freeAddresses are those at which an attach begins to listen. The port of the KubeSwitch address is left to a server that
// has it; one of a loopback address must be free. Sockets that are inherited are ours.
func (d *Daemon) freeAddresses(ctx context.Context, facts plan.Facts, inherited []netip.AddrPort) ([]netip.AddrPort, error) {
	c := d.now.config
	desired, err := plan.Make(plan.Input{Settings: c, Facts: facts})
	if err != nil {
		return nil, err
	}
	kubeSwitch := plan.KubeSwitchAddress(c)
	if facts.KubeSwitch.Interface.Index == 0 {
		d.now.holder.name = plan.HolderNobody // as long as nobody knows who comes with it
	}
	var free []netip.AddrPort
	for _, address := range desired.Listen {
		if slices.Contains(inherited, address) {
			free = append(free, address)
			continue
		}
		holder, taken := awaitPort(ctx, address)
		switch {
		case !taken:
			free = append(free, address)
		case address.Addr() != kubeSwitch:
			return nil, fmt.Errorf("listen on %s: %w by %s: %s", address, errPortTaken, holder, d.loopbackRemedy())
		default:
			d.log.Info("another server has the KubeSwitch address", zap.Stringer("address", address), zap.String("server", holder))
			d.now.holder = portHolder{name: holder, seen: true}
		}
	}
	return free, nil
}

func (d *Daemon) loopbackRemedy() string {
	// Whether the file is fit for more than to be read is not the question.
	_ = d.inspectResolver()
	if len(plan.LoopbackOf(d.now.inspection.File.Nameservers)) > 0 && d.now.config.BPF {
		return "attach with --resolver transparent, which leaves it in charge and steers cluster names past it, or stop it"
	}
	return "stop it, or keep it off loopback (dnsmasq: bind-dynamic and except-interface=lo)"
}

// awaitPort tells whether somebody has a port, and who. One of ours that is just ending is waited for.
func awaitPort(ctx context.Context, address netip.AddrPort) (holder string, taken bool) {
	ctx, cancel := context.WithTimeout(ctx, portPatience)
	defer cancel()
	for isTaken(ctx, address) {
		name, ours := findHolder(address)
		if name == plan.HolderNobody {
			name = holderUnseen
		} else if !ours {
			return name, true
		}
		select {
		case <-ctx.Done():
			return name, true
		case <-time.After(portRetry):
		}
	}
	return "", false
}

// isTaken reports whether another socket keeps us from listening. Other reasons are for the forwarder to tell.
func isTaken(ctx context.Context, address netip.AddrPort) bool {
	var lc net.ListenConfig
	packets, err := lc.ListenPacket(ctx, "udp", address.String())
	if err != nil {
		return errors.Is(err, unix.EADDRINUSE)
	}
	_ = packets.Close()
	listener, err := lc.Listen(ctx, "tcp", address.String())
	if err != nil {
		return errors.Is(err, unix.EADDRINUSE)
	}
	_ = listener.Close()
	return false
}

// findHolder looks for the process with a port among all there are.
func findHolder(address netip.AddrPort) (name string, ours bool) {
	host := diagnose.Host{Ours: rundir.IsOurs}
	name = plan.HolderNobody
	for _, socket := range host.DNSSockets() {
		// The exact address before one that stands for all.
		if socket.Owner.PID != 0 && socket.Takes(address) && (name == plan.HolderNobody || socket.Address == address) {
			name, ours = socket.Owner.String(), socket.Ours
		}
	}
	return name, ours
}

// followHolder notices a server at the KubeSwitch address that comes, goes, or is started again. A port that nobody takes
// who comes with the address becomes ours; one that a server had is left to it.
func (d *Daemon) followHolder(now time.Time) {
	shared, ifindex := d.now.desired.Shared, d.now.desired.KubeSwitch.Index
	if ifindex == 0 && d.now.holder.name != "" {
		// Who had it is gone as well. Who comes with the next one is to be seen then.
		d.now.holder = portHolder{name: plan.HolderNobody}
	}
	if shared == nil {
		d.unclaimed = time.Time{}
		d.note(plan.ProblemKubeSwitch, "")
		return
	}
	address := netip.AddrPortFrom(plan.KubeSwitchAddress(d.now.config), config.DNSPort)
	socket, err := netdev.UDPSocket(address, ifindex)
	if err != nil {
		d.log.Debug("the server at the KubeSwitch address can't be looked for", zap.Error(err))
		return
	}
	next := d.now.clone()
	if socket != next.holder.socket {
		next.holder = portHolder{socket: socket, seen: true}
		if next.holder.name, _ = findHolder(address); next.holder.name == plan.HolderNobody && socket != 0 {
			next.holder.name = holderUnseen
		}
	}
	if d.unclaimed.IsZero() || next.holder.seen {
		d.unclaimed = now
	}
	if now.Sub(d.unclaimed) >= claimAfter {
		next.holder = portHolder{}
	}
	if next.holder != d.now.holder {
		d.update(next)
	}
	text := ""
	if d.now.holder.seen && socket == 0 {
		text = fmt.Sprintf("nobody serves %s by UDP: names outside the cluster are not answered there: start the server that had it, or detach and attach again, and k2s-dnsbpf serves it",
			address)
	}
	d.note(plan.ProblemKubeSwitch, text)
}
