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

// The KubeSwitch address may already have a DNS server, such as libvirt's dnsmasq if the KubeSwitch is a libvirt network. It
// keeps its port, now and when it is restarted: the kernel steers cluster names past it. An address that appears after
// the attach is left for a while to the server that may come with it: whoever binds the port first would prevent the other from
// starting.

// errPortTaken is returned by an attach if a server has a port that the host's own programs use.
var errPortTaken = errors.New("the port is taken")

const (
	// portPatience is how long a socket may take to close if its process is one of ours that is exiting, or is already gone.
	portPatience = 500 * time.Millisecond
	portRetry    = 10 * time.Millisecond
)

// portHolder is the process that has the DNS port of the KubeSwitch address.
type portHolder struct {
	socket uint32 // inode of the UDP socket, 0 if there is none or it has not been looked for
	name   string // of the process; empty if the port is ours
	seen   bool   // there is one, or was
}

// holderUnseen stands for a process that can't be identified.
const holderUnseen = "a process that can't be seen from here"

// claimAfter is how long a KubeSwitch address that appears after the attach is left to the server that may come with it, as
// libvirt's dnsmasq does with its network.
const claimAfter = 3 * time.Second

// freeAddresses are those at which an attach listens. The port of the KubeSwitch address is left to a server that
// has it; the port of a loopback address must be free. Inherited sockets are ours.
func (d *Daemon) freeAddresses(ctx context.Context, facts plan.Facts, inherited []netip.AddrPort) ([]netip.AddrPort, error) {
	c := d.now.config
	desired, err := plan.Make(plan.Input{Settings: c, Facts: facts})
	if err != nil {
		return nil, err
	}
	kubeSwitch := plan.KubeSwitchAddress(c)
	if facts.KubeSwitch.Interface.Index == 0 {
		d.now.holder.name = plan.HolderNobody // until it is known which server comes with it
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
	// Here the file only needs to be readable.
	_ = d.inspectResolver()
	if len(plan.LoopbackOf(d.now.inspection.File.Nameservers)) > 0 && d.now.config.BPF {
		return "attach with --resolver transparent, which leaves it in charge and steers cluster names past it, or stop it"
	}
	return "stop it, or keep it off loopback (dnsmasq: bind-dynamic and except-interface=lo)"
}

// awaitPort reports which process has a port, if any. One of ours that is exiting is waited for.
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

// isTaken reports whether another socket prevents us from listening. The forwarder reports other reasons.
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

// findHolder searches all processes for the one that has a port.
func findHolder(address netip.AddrPort) (name string, ours bool) {
	host := diagnose.Host{Ours: rundir.IsOurs}
	name = plan.HolderNobody
	for _, socket := range host.DNSSockets() {
		// The exact address takes precedence over the unspecified one.
		if socket.Owner.PID != 0 && socket.Takes(address) && (name == plan.HolderNobody || socket.Address == address) {
			name, ours = socket.Owner.String(), socket.Ours
		}
	}
	return name, ours
}

// followHolder notices when a server at the KubeSwitch address starts, stops or restarts. A port that no server takes
// when the address appears becomes ours; a port that a server had is left to it.
func (d *Daemon) followHolder(now time.Time) {
	shared, ifindex := d.now.desired.Shared, d.now.desired.KubeSwitch.Index
	if ifindex == 0 && d.now.holder.name != "" {
		// Its server is gone as well. The next address may come with another one.
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
		d.log.Debug("the server at the KubeSwitch address could not be determined", zap.Error(err))
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
		text = fmt.Sprintf("no server listens on %s over UDP, so names outside the cluster are not answered there: start the server that had it, or detach and attach again to let k2s-dnsbpf serve it",
			address)
	}
	d.note(plan.ProblemKubeSwitch, text)
}
