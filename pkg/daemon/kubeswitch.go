//go:build linux

package daemon

import (
	"cmp"
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
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// The KubeSwitch address may have a DNS server already: libvirt's dnsmasq, where the KubeSwitch is a libvirt network. It
// keeps its port, now and when it is started again: the kernel steers cluster names past it. So it is with an address
// that comes after the attach, since such a server comes with it: who binds the port first would keep the other from
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
	name   string // of the process
}

// Names of no process.
const (
	holderUnseen = "a process that can't be seen from here"
	holderNobody = "nobody"
)

// sharesKubeSwitch reports whether queries at the KubeSwitch address are steered past another server, and not served.
func (d *Daemon) sharesKubeSwitch() bool {
	return d.kubeSwitch.IsValid() && !slices.Contains(d.ownAddresses(), d.kubeSwitch)
}

// avoidTaken leaves the port of the KubeSwitch address to a server that has it, and fails if one has that of a loopback
// address. Sockets that are inherited are ours.
func (d *Daemon) avoidTaken(ctx context.Context, inherited []netip.AddrPort) error {
	for _, address := range slices.Clone(d.listen) {
		if slices.Contains(inherited, address) {
			continue
		}
		holder, taken := awaitPort(ctx, address)
		if !taken {
			continue
		}
		if address.Addr() != d.kubeSwitch {
			return fmt.Errorf("listen on %s: %w by %s: %s", address, errPortTaken, holder, d.loopbackRemedy())
		}
		d.log.Info("another server has the KubeSwitch address", zap.Stringer("address", address), zap.String("server", holder))
		d.holder.name = holder
		d.listen = slices.DeleteFunc(d.listen, func(a netip.AddrPort) bool { return a == address })
	}
	return nil
}

func (d *Daemon) loopbackRemedy() string {
	// Whether the file is fit for more than to be read is not the question.
	_ = d.inspectResolver()
	if len(loopbackResolvers(d.inspection.File)) > 0 && d.config.BPF {
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
		if name == holderNobody {
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
	host := diagnose.Host{Ours: isOurs}
	name = holderNobody
	for _, socket := range host.DNSSockets() {
		// The exact address before one that stands for all.
		if socket.Owner.PID != 0 && socket.Takes(address) && (name == holderNobody || socket.Address == address) {
			name, ours = socket.Owner.String(), socket.Ours
		}
	}
	return name, ours
}

func isOurs(pid int) bool { return isDaemon(pid) || isGuardian(pid) }

// followHolder notices a server at the KubeSwitch address that comes, goes, or is started again.
func (d *Daemon) followHolder() {
	d.mu.Lock()
	ifindex, known := d.network.clients.Index, d.holder.socket
	d.mu.Unlock()
	if !d.sharesKubeSwitch() || ifindex == 0 {
		return
	}
	address := netip.AddrPortFrom(d.kubeSwitch, config.DNSPort)
	socket, err := netdev.UDPSocket(address, ifindex)
	if err != nil {
		d.log.Debug("the server at the KubeSwitch address can't be looked for", zap.Error(err))
		return
	}
	name := ""
	if socket != known {
		if name, _ = findHolder(address); name == holderNobody && socket != 0 {
			name = holderUnseen
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if name != "" {
		d.holder = portHolder{socket: socket, name: name}
	}
	delete(d.problems, "kubeswitch")
	if socket == 0 {
		d.problems["kubeswitch"] = fmt.Sprintf("nobody serves %s by UDP: names outside the cluster are not answered there: start the server that had it, or detach and attach again, and k2s-dnsbpf serves it",
			address)
	}
}

// shared is what is to be said of a KubeSwitch address that another server has. The caller holds d.mu or is alone.
func (d *Daemon) shared(n network) *status.Shared {
	if !d.sharesKubeSwitch() || n.clients.Index == 0 {
		return nil
	}
	return &status.Shared{
		Address: netip.AddrPortFrom(d.kubeSwitch, config.DNSPort).String(), Interface: n.clients.Name,
		Server: cmp.Or(d.holder.name, holderNobody), Steered: d.config.BPF,
	}
}
