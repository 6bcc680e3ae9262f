package diagnose

import (
	"fmt"
	"net/netip"
)

// Facts are all that doctor judges by. The zero value of each says that there is nothing.
type Facts struct {
	// Unseen says what could not be looked at, and why.
	Unseen []string
	// Privileged: root looked. Nobody else sees other users' processes, the journal or the kernel's programs.
	Privileged bool

	Attachment Attachment
	// Guardian is the process that watches over the daemon, 0 if there is none.
	Guardian int
	Resolver ResolverFile
	Journal  JournalFacts
	Managers Managers
	// NSSwitch is the "hosts" line of nsswitch.conf(5) behind its keyword, "" if there is none.
	NSSwitch string
	Sockets  []Socket
	Kubelets []Kubelet
	PodFile  PodFile
	CoreDNS  []CoreDNS
	// Pods are containers whose resolver file names an address of ours on loopback, which to them is their own.
	Pods   []Process
	System System
}

// Attachment is what is attached, or would be.
type Attachment struct {
	Unseen   bool // nothing of this could be looked at
	Attached bool // also by a daemon that is dead
	Alive    bool // the daemon answered
	PID      int
	Problems []string // of the daemon's own report
	Takeover bool     // the resolver file is taken over while attached
	BPF      bool
	// Served are the addresses of the forwarder, as it is or as it would be.
	Served []netip.AddrPort
	// KubeSwitch is where cluster names are steered past a server that has the port, or are where one has it; the zero
	// value without.
	KubeSwitch netip.AddrPort
	// Loop is the last query that came back to the forwarder, "" if none did.
	Loop string
}

// ResolverFile is the host's resolver configuration.
type ResolverFile struct {
	Path     string
	Type     string
	State    string // original, ours, foreign, missing
	Note     string // why a state that is not ours is as it should be
	Owner    string
	Reasons  []string
	Refusals []string // why an attach would refuse it
	// Servers are the nameservers of before us.
	Servers []netip.Addr
	Parked  string // path of an original that is parked beside the file, "" if there is none
}

// JournalFacts is the state of the journal.
type JournalFacts struct {
	Path    string
	Err     string // why it can't be read
	Denied  bool   // by want of privilege
	Repair  string // that an earlier generation had to be used, and why
	Changes int
	Knows   bool // of the resolver file
}

// Managers are the other programs that look after DNS.
type Managers struct {
	// Resolved: systemd-resolved runs. ResolvedServers are those that it publishes for others.
	Resolved        bool
	ResolvedServers []netip.Addr
	// NetworkManager runs, with these settings of its main section, "" for its own choice.
	NetworkManager bool
	NMDNS          string
	NMRcManager    string
	// Openresolv is its version, "" if it is not installed.
	Openresolv string
	// Backups are the saved files of other programs that take the resolver file over.
	Backups []Backup
}

// Backup is the original that another program saved, or forgot.
type Backup struct{ Path, Program string }

// Process is one process of this host.
type Process struct {
	PID  int
	Name string
}

// String names a process as a person would.
func (p Process) String() string { return fmt.Sprintf("%s, process %d", p.Name, p.PID) }

// Socket is one that listens on the DNS port.
type Socket struct {
	Protocol string // udp or tcp
	Address  netip.AddrPort
	Owner    Process // PID 0: could not be seen
	Ours     bool
}

// Takes reports whether the socket gets what comes to an address of this host. One on :: gets IPv4 too.
func (s Socket) Takes(address netip.AddrPort) bool {
	a := s.Address.Addr()
	return address.Port() == s.Address.Port() && (a == address.Addr() || a.IsUnspecified() && (a.Is6() || address.Addr().Is4()))
}

// Kubelet is one kubelet, or what has it inside, and the file that it hands to pods.
type Kubelet struct {
	Process        // PID 0: it does not run, only its configuration is there
	Source  string // where the path is set: a flag or a file
	// ResolvConf is the path, "" if the kubelet was told to use none.
	ResolvConf string
	Missing    bool // there is no such file
	Servers    []netip.Addr
}

// PodFile is the file that we publish for kubelets.
type PodFile struct {
	Path    string
	Exists  bool
	Servers []netip.Addr
}

// CoreDNS is one that runs on this host, or an endpoint that was asked.
type CoreDNS struct {
	Process
	Endpoint string // set instead of the process for one that was asked
	// HostNetwork: it is in this host's network namespace, so that loopback is ours.
	HostNetwork bool
	// Forwards are the servers that it sends other names to, and Source is where they are named.
	Forwards []netip.Addr
	Source   string
	// AsksUs: a marked query came back to us through it.
	AsksUs bool
}

// System is the machine beneath.
type System struct {
	Kernel   string // release
	BTF      bool
	Lacks    []string // what root lacks here for an attach, each with its remedy; empty to others
	Docker   bool     // dockerd runs
	DockerOK bool     // and names servers for its containers
	Sysctls  map[string]string
	// Systemd runs. BootUnit is the path of the unit that restores at boot, and Enabled that it is.
	Systemd  bool
	BootUnit string
	Enabled  bool
}

// serves reports whether an address is one that we serve, as seen from the host.
func (f Facts) serves(a netip.Addr) bool {
	for _, served := range f.Attachment.Served {
		if served.Addr() == a.Unmap().WithZone("") {
			return true
		}
	}
	return a.IsUnspecified()
}
