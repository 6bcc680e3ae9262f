package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Resolvers that a host may have had before: what its resolv.conf names on loopback. A test starts the one that it is
// about and points resolv.conf at it.

// Stub is where systemd-resolved answers, as systemd-resolved(8) says.
const Stub = "127.0.0.53"

// Dnsmasq starts a dnsmasq on a port of addresses of host0's loopback. It asks the external servers and logs what it is
// asked, whatever the options of the lab.
func (l *Lab) Dnsmasq(ctx context.Context, port uint16, addresses ...string) (*Server, error) {
	argv := []string{
		"--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--bind-interfaces", "--cache-size=0", fmt.Sprintf("--port=%d", port),
		"--server=" + External0, "--server=" + External1,
	}
	for _, address := range addresses {
		argv = append(argv, "--listen-address="+address)
	}
	return l.startDnsmasq(ctx, argv)
}

// VM is the name of a virtual machine that libvirt's dnsmasq knows, and VM4 its address.
const (
	VM  = "k2s-win-worker"
	VM4 = Worker4
)

// LibvirtDnsmasq starts a dnsmasq on host0 as libvirt starts one for a network: on a bridge's address, with DHCP, the names
// of its virtual machines, and for all others the servers of the host's resolv.conf.
func (l *Lab) LibvirtDnsmasq(ctx context.Context, bridge string) (*Server, error) {
	const dir = "/run/lab/libvirt"
	err := l.Host().Do(func() error {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		for name, text := range map[string]string{
			"conf": "strict-order\nexcept-interface=lo\nbind-dynamic\ninterface=" + bridge + "\n" +
				"dhcp-range=172.19.1.100,172.19.1.199,255.255.255.0\ndhcp-no-override\ndhcp-authoritative\n" +
				"dhcp-hostsfile=" + dir + "/hostsfile\naddn-hosts=" + dir + "/addnhosts\ndhcp-leasefile=" + dir + "/leases\n",
			"hostsfile": "52:54:00:00:00:65," + VM4 + "," + VM + "\n",
			"addnhosts": VM4 + " " + VM + "\n",
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("prepare libvirt's dnsmasq: %w", err)
	}
	return l.startDnsmasq(ctx, []string{"--conf-file=" + dir + "/conf"})
}

// SiteDnsmasq starts a dnsmasq on host0 on all addresses, as the stock configuration has it.
func (l *Lab) SiteDnsmasq(ctx context.Context) (*Server, error) {
	return l.startDnsmasq(ctx, []string{"--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--server=" + External0, "--server=" + External1})
}

// startDnsmasq starts a dnsmasq on host0 that logs what it is asked.
func (l *Lab) startDnsmasq(ctx context.Context, args []string) (*Server, error) {
	binary, err := exec.LookPath("dnsmasq")
	if err != nil {
		return nil, fmt.Errorf("find dnsmasq: %w: run scripts/bootstrap test", err)
	}
	s := &Server{
		name: "dnsmasq", node: l.Host(),
		argv:  append([]string{binary, "--keep-in-foreground", "--pid-file=", "--user=root", "--log-facility=-", "--log-queries"}, args...),
		ready: "started, version",
		isQuery: func(line string) (Query, bool) {
			_, rest, ok := strings.Cut(line, ": query[") // "A] name from client"
			kind, rest, typed := strings.Cut(rest, "] ")
			f := strings.Fields(rest)
			if !ok || !typed || len(f) != 3 {
				return Query{}, false
			}
			client, err := netip.ParseAddr(f[2])
			return Query{Name: f[0] + ".", Type: kind, Client: client}, err == nil
		},
	}
	s.count = s.countLogged
	return s, s.Start(ctx)
}

// Resolved starts a D-Bus system bus and a systemd-resolved on host0. Its files are where they are on any host: below
// /run/systemd/resolve. Servers are what its configuration file names; without any it knows those of links only, and
// reads /etc/resolv.conf where that is not its own.
func (l *Lab) Resolved(ctx context.Context, servers ...string) (*Server, error) {
	return l.startResolved(ctx, "debug", "Creating stub listener", servers)
}

// ResolvedAtSpeed starts one that does not log its queries.
func (l *Lab) ResolvedAtSpeed(ctx context.Context, servers ...string) (*Server, error) {
	return l.startResolved(ctx, "info", "Using system hostname", servers)
}

func (l *Lab) startResolved(ctx context.Context, level, ready string, servers []string) (*Server, error) {
	dir, err := resolvedDir()
	if err != nil {
		return nil, err
	}
	host := l.Host()
	if err := host.Do(func() error { return prepareResolved(servers) }); err != nil {
		return nil, fmt.Errorf("prepare systemd-resolved: %w", err)
	}
	binary, err := exec.LookPath("dbus-daemon")
	if err != nil {
		return nil, fmt.Errorf("find dbus-daemon: %w: run scripts/bootstrap test", err)
	}
	bus := &Server{
		name: "dbus-daemon", node: host, ready: "unix:path=", // it prints its address once it listens
		argv:    []string{binary, "--config-file=" + busConfig, "--nofork", "--nopidfile", "--print-address"},
		isQuery: func(string) (Query, bool) { return Query{}, false },
	}
	if err := bus.Start(ctx); err != nil {
		return nil, err
	}
	s := &Server{
		name: "systemd-resolved", node: host, addr4: mustAddr(Stub),
		argv: []string{
			"env", "LD_LIBRARY_PATH=" + filepath.Join(dir, "lib"), "SYSTEMD_LOG_LEVEL=" + level, "SYSTEMD_LOG_TARGET=console",
			filepath.Join(dir, "systemd-resolved"),
		},
		ready: ready,
		isQuery: func(line string) (Query, bool) {
			_, rest, ok := strings.Cut(line, "Looking up RR for ") // "name IN A."
			f := strings.Fields(strings.TrimSuffix(rest, "."))
			if !ok || len(f) != 3 {
				return Query{}, false
			}
			return Query{Name: f[0] + ".", Type: f[2]}, true
		},
	}
	s.count = s.countLogged
	return s, s.Start(ctx)
}

// Resolvectl runs resolvectl on host0.
func (l *Lab) Resolvectl(ctx context.Context, args ...string) (string, error) {
	dir, err := resolvedDir()
	if err != nil {
		return "", err
	}
	argv := append([]string{"LD_LIBRARY_PATH=" + filepath.Join(dir, "lib"), filepath.Join(dir, "resolvectl"), "--no-pager"}, args...)
	return l.Host().Output(ctx, "env", argv...)
}

func resolvedDir() (string, error) {
	binary, err := built("make test/bin/resolved", "test", "bin", "resolved", "systemd-resolved")
	return filepath.Dir(binary), err
}

const (
	busConfig = "/run/lab/dbus.conf"

	busConfigText = `<busconfig>
	<type>system</type>
	<listen>unix:path=/run/dbus/system_bus_socket</listen>
	<auth>EXTERNAL</auth>
	<policy context="default">
		<allow user="*"/>
		<allow own="*"/>
		<allow send_destination="*" eavesdrop="true"/>
		<allow receive_sender="*" eavesdrop="true"/>
	</policy>
</busconfig>
`
	resolvedConfigText = "[Resolve]\nFallbackDNS=\nDNSSEC=no\nDNSOverTLS=no\nLLMNR=no\nMulticastDNS=no\n"
)

// prepareResolved gives a node what systemd and the package would have made.
func prepareResolved(servers []string) error {
	for _, dir := range []string{"/run/dbus", "/run/systemd", "/etc/systemd"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	config := resolvedConfigText
	if len(servers) > 0 { // even an empty DNS= keeps it from reading resolv.conf
		config += "DNS=" + strings.Join(servers, " ") + "\n"
	}
	for file, text := range map[string]string{busConfig: busConfigText, "/etc/systemd/resolved.conf": config} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			return err
		}
	}
	// It gives up root for a user of this name.
	const user = "systemd-resolve"
	return errors.Join(
		addLine("/etc/passwd", user+":", user+":x:990:990::/:/usr/sbin/nologin"),
		addLine("/etc/group", user+":", user+":x:990:"),
	)
}

// addLine adds a line to a file that has none with this beginning.
func addLine(path, beginning, line string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for have := range strings.Lines(string(content)) {
		if strings.HasPrefix(have, beginning) {
			return nil
		}
	}
	return os.WriteFile(path, append(content, line+"\n"...), 0o644)
}

// countLogged is for servers that tell what they are asked in their log only.
func (s *Server) countLogged(context.Context) (uint64, error) { return uint64(len(s.QueryLog())), nil }
