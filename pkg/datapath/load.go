//go:build linux

package datapath

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/privilege"
)

// ErrNoBPFFS is returned if the pin directory is not on a BPF file system.
var ErrNoBPFFS = errors.New("not on a BPF file system")

// DefaultFlowTimeout is how long a steered query waits for its reply: as long as glibc, musl, Go and dig do by default.
const DefaultFlowTimeout = 5 * time.Second

// Options says how the programs are loaded.
type Options struct {
	// PinDir is the directory on a BPF file system that maps and links are pinned below. Required.
	PinDir string
	// NATPorts is the range of source ports towards endpoints. It must not overlap the host's ephemeral ports. Required.
	NATPorts PortRange
	// FlowTimeout is how late a reply is still delivered. Zero means DefaultFlowTimeout.
	FlowTimeout time.Duration
	// TrafficControl attaches where the kernel has no TCX links (before 6.6). Without it such a kernel is refused.
	TrafficControl TrafficControl
	// XDPProgram returns the kernel's ID of the XDP program on an interface, 0 without one. Needed where an ingress filter is.
	XDPProgram func(ifindex int) (uint32, error)
	// Answers is how large the cache of answers is.
	Answers AnswersSize
	// ForceTrafficControl uses TrafficControl on kernels with TCX as well.
	ForceTrafficControl bool
}

// PortRange is a range of UDP ports, both ends included.
type PortRange struct {
	First, Last uint16
}

func (r PortRange) count() int { return int(r.Last) - int(r.First) + 1 }

// Datapath is the loaded object. Its methods may be called from several goroutines.
type Datapath struct {
	options Options
	objects dnsbpfObjects
	answers *Answers

	mu      sync.Mutex          // serialises writers of maps and links
	group   uint32              // the newest number that a group was given
	tcx     bool                // attaches with TCX links, else with TrafficControl
	filters map[Attachment]bool // attached with TrafficControl
	links   map[Attachment]link.Link
	missing map[Attachment]bool // could not be attached, and is tried again by Heal

	// What was put into the kernel, see Verify.
	config   *dnsbpfDnsConfig
	contents map[string]content // by map
	mapNames map[*ebpf.Map]string
	ids      map[*ebpf.Program]ebpf.ProgramID
	written  written

	flowsMu     sync.Mutex // guards what follows: buffers that dns_flows is read into, and what was found last
	flows       []byte
	quiet       bool // no query was in flight
	trafficThen traffic
	lookedAt    int64 // the coarse clock at the last Waiting
}

// CheckPinDir reports whether dir can hold pins, without changing anything: its nearest existing parent must be on a
// BPF file system.
func CheckPinDir(dir string) error {
	for parent := filepath.Clean(dir); ; parent = filepath.Dir(parent) {
		var stat unix.Statfs_t
		err := unix.Statfs(parent, &stat)
		switch {
		case err == nil && stat.Type == unix.BPF_FS_MAGIC:
			if err := unix.Access(parent, unix.W_OK|unix.X_OK); err != nil {
				return fmt.Errorf("pin directory %s: %w", dir, describe(&os.PathError{Op: "write to", Path: parent, Err: err}))
			}
			return nil
		case err == nil:
			return fmt.Errorf("pin directory %s: %w: mount one with \"mount -t bpf bpf /sys/fs/bpf\", name another with --bpffs, or do without by --no-bpf",
				dir, ErrNoBPFFS)
		case !errors.Is(err, unix.ENOENT):
			return fmt.Errorf("pin directory %s: %w", dir, err)
		case parent == filepath.Dir(parent):
			return fmt.Errorf("pin directory %s: %w", dir, err)
		}
	}
}

// Load loads the programs and creates the maps, or adopts those that are pinned already. Nothing is attached yet.
func Load(options Options) (_ *Datapath, err error) {
	if options.NATPorts.First == 0 || options.NATPorts.count() < 1 {
		return nil, fmt.Errorf("load BPF programs: NAT port range %d-%d is empty", options.NATPorts.First, options.NATPorts.Last)
	}
	if options.FlowTimeout == 0 {
		options.FlowTimeout = DefaultFlowTimeout
	}
	if err := CheckPinDir(options.PinDir); err != nil {
		return nil, err
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("load BPF programs: lift the memlock limit: %w", describeLoadError(err))
	}
	d := newDatapath(options)
	err = d.load()
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		// Pinned by another version of this program. Its programs keep steering, with those maps, until ours take over their links.
		if err := unpinAll(d.mapDir(), unpinMap); err != nil {
			return nil, fmt.Errorf("remove the pins of another version: %w", err)
		}
		err = d.load()
	}
	if err != nil {
		return nil, fmt.Errorf("load BPF programs: %w", describeLoadError(err))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := d.identify(); err != nil {
		return nil, err
	}
	if !options.ForceTrafficControl {
		if d.tcx, err = kernelHasTCX(d.objects.DnsFromHost); err != nil {
			return nil, err
		}
	}
	if err := d.configure(); err != nil {
		return nil, err
	}
	d.contents[dnsbpfMapDnsConfig] = configContent{d}
	if d.group, err = newestGroup(d.objects.DnsBackends); err != nil {
		return nil, err
	}
	return d, nil
}

// load creates the maps, or adopts the pinned ones, and loads the programs.
func (d *Datapath) load() error {
	if err := d.makeDirs(); err != nil {
		return err
	}
	if err := d.dropStrangePins(); err != nil {
		return err
	}
	spec, err := loadDnsbpf()
	if err != nil {
		return err
	}
	if err := d.options.Answers.size(spec); err != nil {
		return err
	}
	if d.objects, err = loadSpec(spec, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: d.mapDir()}}); err != nil {
		return err
	}
	d.answers, err = newAnswers(&d.objects)
	return err
}

// dropStrangePins removes what has the place of a map's pin and is no map: a dead daemon could not look after its pins.
func (d *Datapath) dropStrangePins() error {
	entries, err := os.ReadDir(d.mapDir())
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	for _, entry := range entries {
		path := filepath.Join(d.mapDir(), entry.Name())
		if !strings.HasPrefix(entry.Name(), mapPrefix) {
			continue
		}
		_, err := pinnedMapID(path)
		if err == nil {
			continue
		}
		if lacksDescriptors(err) || errors.Is(err, unix.EPERM) {
			return err
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove what is no map: %w", err)
		}
	}
	return nil
}

// CheckLoad reports whether the kernel takes the programs. Nothing is pinned or attached.
func CheckLoad() error {
	spec, err := loadDnsbpf()
	if err != nil {
		return fmt.Errorf("load BPF programs: %w", err)
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("load BPF programs: lift the memlock limit: %w", describeLoadError(err))
	}
	objects, err := loadSpec(spec, nil)
	if err != nil {
		return fmt.Errorf("load BPF programs: %w", describeLoadError(err))
	}
	return objects.Close()
}

// loadSpec loads the object for this machine.
func loadSpec(spec *ebpf.CollectionSpec, options *ebpf.CollectionOptions) (objects dnsbpfObjects, err error) {
	if err := spec.Variables[dnsbpfVarCfgWeaklyOrdered].Set(runtime.GOARCH != "amd64"); err != nil {
		return objects, fmt.Errorf("set a constant: %w", err)
	}
	return objects, spec.LoadAndAssign(&objects, options)
}

func newDatapath(options Options) *Datapath {
	return &Datapath{
		options: options, filters: make(map[Attachment]bool), links: make(map[Attachment]link.Link),
		missing:  make(map[Attachment]bool),
		contents: make(map[string]content), mapNames: make(map[*ebpf.Map]string), ids: make(map[*ebpf.Program]ebpf.ProgramID),
	}
}

func (d *Datapath) makeDirs() error {
	for _, dir := range []string{d.mapDir(), d.linkDir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("create pin directory: %w", err)
		}
	}
	return nil
}

// CheckPrivilege reports whether the kernel lets this process load programs at all, by a small one.
func CheckPrivilege() error {
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("load BPF programs: lift the memlock limit: %w", describeLoadError(err))
	}
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return fmt.Errorf("load BPF programs: %w", describeLoadError(err))
	}
	return program.Close()
}

// describeLoadError says what is missing. It keeps the verifier's whole log: its last lines alone seldom tell why a program
// was refused.
func describeLoadError(err error) error {
	if described := describe(err); described != err { //nolint:errorlint // the very same
		return described
	}
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		return fmt.Errorf("the kernel's verifier refused a program: use --no-bpf and report this: %w: %s",
			verifier.Cause, fmt.Sprintf("%+v", verifier))
	}
	return fmt.Errorf("%w: use --no-bpf and report this", err)
}

// describe says what to do about those errors of bpf(2) that tell of this process or host, not of what it was asked for. A process
// without a capability is refused for its programs too, in the verifier's words.
func describe(err error) error {
	lacks := func(errno ...error) bool {
		return slices.ContainsFunc(errno, func(e error) bool { return errors.Is(err, e) })
	}
	// A refusal without a verifier log comes from a security module such as SELinux.
	var verifier *ebpf.VerifierError
	looked := errors.As(err, &verifier) && len(verifier.Log) > 0
	var path *os.PathError
	closed := errors.As(err, &path) && lacks(unix.EACCES)
	forbidden := lacks(unix.EPERM) || lacks(unix.EACCES) && !looked
	missing := privilege.Missing(privilege.NetAdmin, privilege.BPF, privilege.Perfmon)
	switch {
	case len(missing) > 0 && forbidden && !closed:
		return fmt.Errorf("%w: this process has no %s: run it as root, or give it these (CapabilityBoundingSet of a unit), or do without by --no-bpf",
			unix.EPERM, missing)
	case lacks(unix.EMFILE, unix.ENFILE):
		return fmt.Errorf("%w: raise the limit of open files (LimitNOFILE of a unit, ulimit -n)", err)
	case lacks(unix.ENOSYS):
		return fmt.Errorf("%w: the kernel has no bpf(2), or a filter of system calls forbids it: do without by --no-bpf", err)
	case closed:
		return fmt.Errorf("%w: it takes its owner or CAP_DAC_OVERRIDE: change its owner, name another file system with --bpffs, or do without by --no-bpf", err)
	case forbidden:
		return fmt.Errorf("%w: something forbids BPF (a filter of system calls, a user namespace, a security module, or the kernel's lockdown): lift it, or do without by --no-bpf", err)
	case lacks(unix.ENOMEM, unix.ENOSPC):
		return fmt.Errorf("%w: make room (memory of the control group, or on the BPF file system)", err)
	case lacks(unix.EROFS):
		return fmt.Errorf("%w: mount the BPF file system for writing, name another with --bpffs, or do without by --no-bpf", err)
	}
	return err
}

func (d *Datapath) mapDir() string  { return filepath.Join(d.options.PinDir, "maps") }
func (d *Datapath) linkDir() string { return filepath.Join(d.options.PinDir, "links") }

// identify notes by what the kernel knows the programs and maps.
func (d *Datapath) identify() error {
	for _, program := range []*ebpf.Program{d.objects.DnsFromHost, d.objects.DnsFromClient, d.objects.DnsFromBackend, d.objects.DnsFilter} {
		info, err := program.Info()
		if err != nil {
			return fmt.Errorf("read program: %w", err)
		}
		d.ids[program], _ = info.ID()
	}
	o := &d.objects
	for _, m := range []*ebpf.Map{o.DnsBackends, o.DnsConfig, o.DnsFlows, o.DnsListeners, o.DnsReplyVia, o.DnsSources, o.DnsStats, o.DnsZones} {
		info, err := m.Info()
		if err != nil {
			return fmt.Errorf("read map: %w", err)
		}
		if m.IsPinned() {
			d.mapNames[m] = info.Name
		}
	}
	return nil
}

// configure sets what dns_config holds besides the zones. The seed stays: queries in flight were hashed with it. The key
// is another one with each load, since the programs' count of draws begins anew.
func (d *Datapath) configure() error {
	config, err := d.readConfig()
	if err != nil {
		return err
	}
	for config.QuestionSeed == 0 {
		if config.QuestionSeed, err = secret(); err != nil {
			return err
		}
	}
	for i := range config.DrawKey {
		if config.DrawKey[i], err = secret(); err != nil {
			return err
		}
	}
	// Until this daemon's answers are there: a program of one that died gives its own, which nobody vouches for.
	config.Answers = 0
	config.FlowTimeoutNs = uint64(d.options.FlowTimeout.Nanoseconds())
	config.NatPortMin = d.options.NATPorts.First
	config.NatPortCount = uint16(min(d.options.NATPorts.count(), natPortsMax))
	return d.writeConfig(config)
}

func secret() (uint64, error) {
	var random [8]byte
	if _, err := rand.Read(random[:]); err != nil {
		return 0, fmt.Errorf("draw a secret: %w", err)
	}
	return binary.NativeEndian.Uint64(random[:]), nil
}

// readConfig returns what was written last, or found at the start.
func (d *Datapath) readConfig() (config dnsbpfDnsConfig, err error) {
	if d.config != nil {
		return *d.config, nil
	}
	if err := d.objects.DnsConfig.Lookup(uint32(0), &config); err != nil {
		return config, fmt.Errorf("read map dns_config: %w", err)
	}
	return config, nil
}

func (d *Datapath) writeConfig(config dnsbpfDnsConfig) error {
	if err := d.objects.DnsConfig.Put(uint32(0), config); err != nil {
		return fmt.Errorf("write map dns_config: %w", err)
	}
	d.config = &config
	return nil
}

// Close releases the file descriptors. What is pinned keeps working.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	errs := []error{d.answers.close(), d.objects.Close()}
	for _, l := range d.links {
		errs = append(errs, l.Close())
	}
	clear(d.links)
	return errors.Join(errs...)
}

// Remove detaches every program that is pinned below pinDir and removes the pins. Programs that are attached by
// TrafficControl are not pinned links: their owner detaches them. Removing something that does not exist is not an error.
func Remove(pinDir string) error {
	if _, err := os.Lstat(pinDir); errors.Is(err, os.ErrNotExist) {
		return nil // a file system that can't be written to has another answer
	}
	// Links first: a program whose maps' pins are gone would keep running with nobody able to inspect it.
	return errors.Join(unpinAll(filepath.Join(pinDir, "links"), unpinLink), unpinAll(filepath.Join(pinDir, "maps"), unpinMap), removeEmpty(pinDir))
}

// unpinAll removes the pins in a directory, and then the directory if nothing else is in it.
func unpinAll(dir string, unpin func(pin string) error) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		if err := unpin(filepath.Join(dir, entry.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("unpin: %w", err))
		}
	}
	return errors.Join(append(errs, removeEmpty(dir))...)
}

// removeEmpty leaves a directory that others have pinned something in, or mounted.
func removeEmpty(dir string) error {
	err := os.Remove(dir)
	if err == nil || errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EBUSY) {
		return nil
	}
	return fmt.Errorf("remove pin directory: %w", err)
}

func unpinMap(pin string) error {
	if !strings.HasPrefix(filepath.Base(pin), mapPrefix) {
		return nil // somebody else's
	}
	return os.Remove(pin)
}

// mapPrefix is what the names of all our maps begin with.
const mapPrefix = "dns_"
