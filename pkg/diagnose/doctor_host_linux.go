package diagnose

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// lookTimeout bounds each look: a file system or a daemon that hangs must not hang doctor.
const lookTimeout = 5 * time.Second

// maxFile bounds what is read of other programs' files, in octets. A table of /proc/net with all sockets of a host fits.
const maxFile = 16 << 20

// Look is one thing to look at. Do returns what it found as a change of the facts, so that a look that comes too late
// changes nothing; its context ends with its time.
type Look struct {
	Name string
	Do   func(ctx context.Context) func(*Facts)
}

// Gather takes all looks at the same time. What has no answer after lookTimeout is named in Facts.Unseen.
func Gather(ctx context.Context, looks []Look) Facts {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	found := make([]chan func(*Facts), len(looks))
	for i, look := range looks {
		found[i] = make(chan func(*Facts), 1)
		go func() { found[i] <- look.Do(ctx) }()
	}
	f := Facts{Privileged: os.Geteuid() == 0, Attachment: Attachment{Unseen: true}}
	for i, look := range looks {
		// With the time over, what has been found counts still.
		select {
		case change := <-found[i]:
			change(&f)
			continue
		default:
		}
		select {
		case change := <-found[i]:
			change(&f)
		case <-ctx.Done():
			f.Unseen = append(f.Unseen, fmt.Sprintf("%s: no answer within %s", look.Name, lookTimeout))
		}
	}
	return f
}

// Host is where to look.
type Host struct {
	// Root is put before every path; "" is the host itself.
	Root string
	// ResolvConf and PodFile are the host's resolver file and the one for kubelets.
	ResolvConf, PodFile string
	// Servers reads the nameservers of a resolver file.
	Servers func(content []byte) []netip.Addr
	// Ours reports whether a process is this program.
	Ours func(pid int) bool
}

// Looks are all that a Host can be looked at for.
func (h Host) Looks() []Look {
	plain := func(do func() func(*Facts)) func(context.Context) func(*Facts) {
		return func(context.Context) func(*Facts) { return do() }
	}
	return []Look{
		{"nsswitch.conf", plain(h.nsswitch)},
		{"other managers", plain(h.managers)},
		{"sockets", plain(h.sockets)},
		{"kubelets", plain(h.kubelets)},
		{"the file for pods", plain(h.podFile)},
		{"containers", plain(h.containers)},
		{"system", plain(h.system)},
	}
}

// read reads a file that is another program's; one that can't be read is empty.
func (h Host) read(path string) []byte {
	content, _, _ := h.readIn("", path)
	return content
}

// readIn reads a file as a process sees it whose root directory that is: no link leads out of there.
func (h Host) readIn(root, path string) (content []byte, info fs.FileInfo, err error) {
	dir := cmp.Or(h.Root+root, "/")
	content, err = safefile.Read(context.Background(), dir+path, maxFile, func() (*os.File, error) {
		file, err := safefile.OpenIn(dir, path)
		if err == nil {
			info, err = file.Stat()
		}
		return file, err
	})
	return content, info, err
}

func (h Host) exists(path string) bool {
	_, err := os.Lstat(h.Root + path)
	return err == nil
}

func (h Host) nsswitch() func(*Facts) {
	hosts := ""
	for line := range bytes.Lines(h.read("/etc/nsswitch.conf")) {
		text, _, _ := strings.Cut(string(line), "#")
		if order, ok := strings.CutPrefix(strings.TrimSpace(text), "hosts:"); ok {
			hosts = strings.Join(strings.Fields(order), " ")
		}
	}
	return func(f *Facts) { f.NSSwitch = hosts }
}

// backups are where other programs save the resolver file.
var backups = []Backup{
	{"/etc/resolv.pre-tailscale-backup.conf", "tailscale"},
	{"/etc/resolv.conf.original.netbird", "netbird"},
	{"/etc/resolv.conf.mullvadbackup", "mullvad"},
}

func (h Host) managers() func(*Facts) {
	var m Managers
	for _, p := range h.processes() {
		switch p.name() {
		case "systemd-resolved", "systemd-resolve": // as comm has it, cut off
			m.Resolved = true
		case "NetworkManager":
			m.NetworkManager = true
		}
	}
	m.ResolvedServers = h.Servers(h.read(resolvedFile))
	m.NMDNS, m.NMRcManager = h.networkManager()
	for _, path := range []string{"/sbin/resolvconf", "/usr/sbin/resolvconf", "/usr/bin/resolvconf"} {
		if m.Openresolv == "" {
			m.Openresolv = openresolvVersion(h.read(path))
		}
	}
	for _, b := range backups {
		if h.exists(b.Path) {
			m.Backups = append(m.Backups, b)
		}
	}
	return func(f *Facts) { f.Managers = m }
}

// openresolvVersion reads it out of the script itself, "" if it is another program's.
func openresolvVersion(script []byte) string {
	_, after, ok := bytes.Cut(script, []byte(`OPENRESOLV_VERSION="`))
	version, _, whole := bytes.Cut(after, []byte(`"`))
	if !ok || !whole {
		return ""
	}
	return string(version)
}

// networkManager reads two settings in the order of NetworkManager.conf(5): a later file counts more.
func (h Host) networkManager() (dns, rcManager string) {
	byName := make(map[string]string)
	// A file in a later directory hides one of the same name; all are read in the order of their names.
	for _, dir := range []string{"/usr/lib/NetworkManager/conf.d", "/run/NetworkManager/conf.d", "/etc/NetworkManager/conf.d"} {
		entries, _ := os.ReadDir(h.Root + dir)
		for _, e := range entries {
			if strings.HasSuffix(e.Name(), ".conf") {
				byName[e.Name()] = filepath.Join(dir, e.Name())
			}
		}
	}
	files := []string{"/etc/NetworkManager/NetworkManager.conf"}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		files = append(files, byName[name])
	}
	for _, file := range files {
		section := ""
		for line := range bytes.Lines(h.read(file)) {
			text := strings.TrimSpace(string(line))
			if strings.HasPrefix(text, "[") {
				section = text
			}
			key, value, ok := strings.Cut(text, "=")
			if !ok || section != "[main]" {
				continue
			}
			switch strings.TrimSpace(key) {
			case "dns":
				dns = strings.TrimSpace(value)
			case "rc-manager":
				rcManager = strings.TrimSpace(value)
			}
		}
	}
	return dns, rcManager
}

// process is one of /proc, proc_pid_cmdline(5).
type process struct {
	pid  int
	args []string
	comm string
}

// name is that of the program.
func (p process) name() string {
	if p.comm != "" {
		return p.comm
	}
	return filepath.Base(p.args[0])
}

// flag returns the value of a flag, given as --name=value or --name value, with one or two dashes.
func (p process) flag(name string) (string, bool) {
	for i, arg := range p.args {
		bare := strings.TrimPrefix(strings.TrimPrefix(arg, "-"), "-")
		if bare == arg {
			continue
		}
		if value, ok := strings.CutPrefix(bare, name+"="); ok {
			return value, true
		}
		if bare == name && i+1 < len(p.args) {
			return p.args[i+1], true
		}
	}
	return "", false
}

// processes are those that can be seen; kernel threads have no arguments and are left out.
func (h Host) processes() []process {
	entries, err := os.ReadDir(h.Root + "/proc")
	if err != nil {
		return nil
	}
	var out []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		args := strings.Split(strings.TrimSuffix(string(h.read(fmt.Sprintf("/proc/%d/cmdline", pid))), "\x00"), "\x00")
		if args[0] == "" {
			continue
		}
		out = append(out, process{pid, args, strings.TrimSpace(string(h.read(fmt.Sprintf("/proc/%d/comm", pid))))})
	}
	return out
}

// believed are the processes whose word counts: root's own, and those that a container runtime has started. Anybody can
// start one by the name of kubelet or coredns, and name files to it that root alone may read, or that never end.
func (h Host) believed() []process {
	return slices.DeleteFunc(h.processes(), func(p process) bool { return !h.isRoots(p.pid) && !h.isContained(p.pid) })
}

// isRoots looks at all four user numbers: a program of root's that a user has started is not root's (proc_pid_status(5)).
func (h Host) isRoots(pid int) bool {
	info, err := os.Stat(fmt.Sprintf("%s/proc/%d", h.Root, pid))
	if err != nil {
		return false
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); !ok || owner.Uid != 0 {
		return false
	}
	// A process that hides its memory is shown as root's, too.
	for line := range strings.Lines(string(h.read(fmt.Sprintf("/proc/%d/status", pid)))) {
		if users, ok := strings.CutPrefix(line, "Uid:"); ok {
			return !slices.ContainsFunc(strings.Fields(users), func(uid string) bool { return uid != "0" })
		}
	}
	return true
}

// isContained reports whether a process is in a control group that a container runtime has made. Users make theirs below
// user.slice only (cgroups(7), delegation).
func (h Host) isContained(pid int) bool {
	for line := range strings.Lines(string(h.read(fmt.Sprintf("/proc/%d/cgroup", pid)))) {
		_, path, _ := strings.Cut(strings.TrimSpace(line), ":/")
		elements := strings.Split(path, "/")
		switch elements[0] {
		case "kubepods", "kubepods.slice", "docker", "k8s.io":
			return true
		case "system.slice", "machine.slice":
			if len(elements) > 1 && slices.ContainsFunc([]string{"docker-", "cri-containerd-", "crio-", "libpod-"}, func(runtime string) bool {
				return strings.HasPrefix(elements[1], runtime)
			}) {
				return true
			}
		}
	}
	return false
}

// sockets finds who listens on port 53 in this network namespace, proc_pid_net(5): the socket's inode is found among
// the descriptors of a process.
func (h Host) sockets() func(*Facts) {
	sockets := h.DNSSockets()
	return func(f *Facts) { f.Sockets = sockets }
}

// DNSSockets lists the sockets on port 53, those bound by UDP and those that listen by TCP, with their processes as far as
// they can be seen.
func (h Host) DNSSockets() []Socket {
	byInode := make(map[string]Socket)
	for _, table := range []struct{ file, protocol, state string }{
		{"udp", "udp", "07"}, {"udp6", "udp", "07"}, {"tcp", "tcp", "0A"}, {"tcp6", "tcp", "0A"},
	} {
		scanner := bufio.NewScanner(bytes.NewReader(h.read("/proc/self/net/" + table.file)))
		for scanner.Scan() {
			f := strings.Fields(scanner.Text())
			if len(f) < 10 || f[3] != table.state {
				continue
			}
			if address, err := parseSocketAddress(f[1]); err == nil && address.Port() == 53 {
				byInode[f[9]] = Socket{Protocol: table.protocol, Address: address}
			}
		}
	}
	if len(byInode) > 0 {
		for _, p := range h.processes() {
			h.ownSockets(p, byInode)
		}
	}
	var out []Socket
	for _, s := range byInode {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b Socket) int {
		return strings.Compare(a.Protocol+a.Address.String(), b.Protocol+b.Address.String())
	})
	return out
}

func (h Host) ownSockets(p process, byInode map[string]Socket) {
	dir := fmt.Sprintf("%s/proc/%d/fd", h.Root, p.pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // gone, or another user's
	}
	for _, e := range entries {
		link, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue
		}
		inode := strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")
		if s, ok := byInode[inode]; ok {
			s.Owner, s.Ours = Process{p.pid, p.name()}, h.Ours(p.pid)
			byInode[inode] = s
		}
	}
}

// parseSocketAddress reads ADDRESS:PORT of /proc/net: hexadecimal words in the machine's order of octets.
func parseSocketAddress(text string) (netip.AddrPort, error) {
	address, port, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(address)
	if err != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("socket address %q", text)
	}
	for i := 0; i+4 <= len(raw); i += 4 {
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	ip, ok := netip.AddrFromSlice(raw)
	number, err := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil {
		return netip.AddrPort{}, fmt.Errorf("socket address %q", text)
	}
	return netip.AddrPortFrom(ip.Unmap(), uint16(number)), nil
}

// kubeletConfig is where a kubelet's configuration is by convention.
const kubeletConfig = "/var/lib/kubelet/config.yaml"

func (h Host) kubelets() func(*Facts) {
	var out []Kubelet
	docker, dockerOK := false, false
	for _, p := range h.believed() {
		switch p.name() {
		case "kubelet":
			out = append(out, h.kubelet(p))
		case "k3s", "k3s-server", "k3s-agent", "rke2":
			out = append(out, h.k3s(p))
		case "dockerd":
			docker = true
			_, dockerOK = p.flag("dns")
			dockerOK = dockerOK || h.dockerNamesServers()
		}
	}
	if len(out) == 0 && h.exists(kubeletConfig) {
		out = append(out, h.kubelet(process{comm: "kubelet"}))
	}
	for i := range out {
		if out[i].ResolvConf == "" {
			continue
		}
		content, _, err := h.readIn("", out[i].ResolvConf)
		out[i].Missing = errors.Is(err, fs.ErrNotExist)
		out[i].Servers = h.Servers(content)
	}
	return func(f *Facts) { f.Kubelets, f.System.Docker, f.System.DockerOK = out, docker, dockerOK }
}

// kubelet finds the file that a kubelet hands to pods: its flag counts more than its configuration.
func (h Host) kubelet(p process) Kubelet {
	k := Kubelet{Process: Process{p.pid, "kubelet"}, ResolvConf: "/etc/resolv.conf"}
	config, given := p.flag("config")
	if !given {
		config = kubeletConfig
	}
	k.Source = config
	var settings struct {
		ResolvConf *string `yaml:"resolvConf"`
	}
	if err := yaml.Unmarshal(h.read(config), &settings); err == nil && settings.ResolvConf != nil {
		k.ResolvConf = *settings.ResolvConf
	}
	if path, ok := p.flag("resolv-conf"); ok {
		k.ResolvConf, k.Source = path, "its flag --resolv-conf"
	}
	return k
}

// k3s finds the file that K3s or RKE2 hands out: the one that it is told, else the first in which every server is a
// global address, else one of its own with public servers.
func (h Host) k3s(p process) Kubelet {
	name := strings.TrimSuffix(strings.TrimSuffix(p.name(), "-server"), "-agent")
	k := Kubelet{Process: Process{p.pid, name}, Source: "its flag --resolv-conf"}
	if path, ok := p.flag("resolv-conf"); ok {
		k.ResolvConf = path
		return k
	}
	var settings struct {
		ResolvConf string `yaml:"resolv-conf"`
	}
	config := "/etc/rancher/" + name + "/config.yaml"
	if err := yaml.Unmarshal(h.read(config), &settings); err == nil && settings.ResolvConf != "" {
		k.ResolvConf, k.Source = settings.ResolvConf, config
		return k
	}
	k.ResolvConf = "/etc/resolv.conf"
	return k
}

func (h Host) dockerNamesServers() bool {
	var settings struct {
		DNS []string `json:"dns"`
	}
	return json.Unmarshal(h.read("/etc/docker/daemon.json"), &settings) == nil && len(settings.DNS) > 0
}

func (h Host) podFile() func(*Facts) {
	p := PodFile{Path: h.PodFile, Exists: h.exists(h.PodFile), Servers: h.Servers(h.read(h.PodFile))}
	return func(f *Facts) { f.PodFile = p }
}

// containers looks into the processes with mounts of their own: their resolver files, and what CoreDNS is told.
func (h Host) containers() func(*Facts) {
	namespace := func(pid, kind string) string {
		link, _ := os.Readlink(h.Root + "/proc/" + pid + "/ns/" + kind)
		return link
	}
	ownMounts, ownNetwork := namespace("self", "mnt"), namespace("self", "net")
	_, host, hostErr := h.readIn("", h.ResolvConf)
	seen := map[string]bool{ownMounts: true, "": true}
	var coredns []CoreDNS
	var pods []Process
	guardian := 0
	for _, p := range h.believed() {
		pid := strconv.Itoa(p.pid)
		if len(p.args) > 1 && p.args[1] == "guardian" && h.Ours(p.pid) {
			guardian = p.pid
		}
		mounts, network := namespace(pid, "mnt"), namespace(pid, "net")
		root := "/proc/" + pid + "/root"
		if p.name() == "coredns" && mounts != "" {
			c := h.coreDNS(p, root)
			c.HostNetwork = network == ownNetwork
			coredns = append(coredns, c)
		}
		if seen[mounts] || network == ownNetwork {
			continue
		}
		seen[mounts] = true
		content, theirs, err := h.readIn(root, "/etc/resolv.conf")
		if err != nil || hostErr == nil && os.SameFile(host, theirs) {
			continue
		}
		if slices.ContainsFunc(h.Servers(content), netip.Addr.IsLoopback) {
			pods = append(pods, Process{p.pid, p.name()})
		}
	}
	return func(f *Facts) {
		f.CoreDNS = append(f.CoreDNS, coredns...)
		f.Guardian = guardian
		f.Pods = pods
	}
}

// coreDNS reads where a CoreDNS forwards to, below the root of its container.
func (h Host) coreDNS(p process, root string) CoreDNS {
	c := CoreDNS{Process: Process{p.pid, p.name()}}
	path, given := p.flag("conf")
	base := root
	if !given {
		path = "Corefile"
	}
	if !filepath.IsAbs(path) {
		base = fmt.Sprintf("/proc/%d/cwd", p.pid)
	}
	corefile, _, _ := h.readIn(base, "/"+strings.TrimPrefix(path, "/"))
	for _, target := range forwardTargets(string(corefile)) {
		if filepath.IsAbs(target) {
			content, _, _ := h.readIn(root, target)
			c.Forwards = append(c.Forwards, h.Servers(content)...)
			c.Source = "by " + path + " and its " + target
			continue
		}
		if address, ok := serverAddress(target); ok {
			c.Forwards = append(c.Forwards, address)
			c.Source = "by " + path
		}
	}
	return c
}

// forwardTargets are the servers and files that a Corefile's forward directives name.
func forwardTargets(corefile string) (out []string) {
	for line := range strings.Lines(corefile) {
		line, _, _ = strings.Cut(line, "#")
		f := strings.Fields(line)
		if len(f) < 3 || f[0] != "forward" {
			continue
		}
		for _, target := range f[2:] {
			if target == "{" {
				break
			}
			out = append(out, target)
		}
	}
	return out
}

// serverAddress reads [SCHEME://]IP[:PORT].
func serverAddress(target string) (netip.Addr, bool) {
	if _, after, ok := strings.Cut(target, "://"); ok {
		target = after
	}
	if server, err := netip.ParseAddrPort(target); err == nil {
		return server.Addr().Unmap(), true
	}
	address, err := netip.ParseAddr(strings.Trim(target, "[]"))
	return address.Unmap(), err == nil
}

func (h Host) system() func(*Facts) {
	kernel := strings.TrimSpace(string(h.read("/proc/sys/kernel/osrelease")))
	btf, systemd := h.exists("/sys/kernel/btf/vmlinux"), h.exists("/run/systemd/system")
	unit := ""
	for _, dir := range []string{"/etc/systemd/system/", "/usr/local/lib/systemd/system/", "/usr/lib/systemd/system/", "/lib/systemd/system/"} {
		if unit == "" && h.exists(dir+bootUnit) {
			unit = dir + bootUnit
		}
	}
	wanted, _ := filepath.Glob(h.Root + "/etc/systemd/system/*.wants/" + bootUnit)
	return func(f *Facts) {
		f.System.Kernel, f.System.BTF = kernel, btf
		f.System.Systemd, f.System.BootUnit, f.System.Enabled = systemd, unit, len(wanted) > 0
	}
}
