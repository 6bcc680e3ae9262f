package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Node is one machine of the lab: a network, mount, pid and host name namespace of its own.
type Node struct {
	name     string
	addr4    netip.Addr
	addr6    netip.Addr
	holder   *exec.Cmd
	lifeline io.Closer
	ns       map[string]*os.File // net, mnt, pid, uts

	spawn chan func() // served by the one thread that starts this node's processes

	mu      sync.Mutex
	started []*Cmd
}

// namespaces in the order in which a thread may enter them: after mnt, paths mean the node's paths.
var namespaces = []struct {
	name string
	flag int
}{{"net", unix.CLONE_NEWNET}, {"uts", unix.CLONE_NEWUTS}, {"pid", unix.CLONE_NEWPID}, {"mnt", unix.CLONE_NEWNS}}

func newNode(name, resolv string, addr4, addr6 netip.Addr) (*Node, error) {
	holder, lifeline, err := startHolder(name, resolv)
	if err != nil {
		return nil, err
	}
	n := &Node{
		name: name, addr4: addr4, addr6: addr6, holder: holder, lifeline: lifeline,
		ns: make(map[string]*os.File), spawn: make(chan func()),
	}
	for _, ns := range namespaces {
		path := fmt.Sprintf("/proc/%d/ns/%s", holder.Process.Pid, ns.name)
		f, err := os.Open(path)
		if err != nil {
			return nil, errors.Join(err, n.close())
		}
		n.ns[ns.name] = f
	}
	entered := make(chan error)
	go n.serveSpawn(n.spawn, entered)
	if err := <-entered; err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// Name of the node, which is also its host name.
func (n *Node) Name() string { return n.name }

// Addr4 is the node's main IPv4 address.
func (n *Node) Addr4() netip.Addr { return n.addr4 }

// Addr6 is the node's main IPv6 address.
func (n *Node) Addr6() netip.Addr { return n.addr6 }

// PID of the process that holds the node's namespaces, for `nsenter -t PID -n -m -p -u`.
func (n *Node) PID() int { return n.holder.Process.Pid }

// enter moves the calling, locked thread into the node's namespaces. With pid, its children will be in the node's
// process namespace too.
func (n *Node) enter(pid bool) error {
	// A thread may change its mount namespace only if it shares its root and working directory with no other.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("enter %s: %w", n.name, err)
	}
	for _, ns := range namespaces {
		if ns.name == "pid" && !pid {
			continue
		}
		if err := unix.Setns(int(n.ns[ns.name].Fd()), ns.flag); err != nil {
			return fmt.Errorf("enter the %s namespace of %s: %w", ns.name, n.name, err)
		}
	}
	return nil
}

// serveSpawn owns the one thread from which the node's processes are started: a child takes over the namespaces of the
// thread that forks it. The thread lives as long as the node.
func (n *Node) serveSpawn(jobs <-chan func(), entered chan<- error) {
	runtime.LockOSThread() // never unlocked: the thread can't go back, so it ends with this goroutine
	err := n.enter(true)
	entered <- err
	if err != nil {
		return
	}
	for f := range jobs {
		f()
	}
}

// Do runs f on a thread that is in the node's network and mount namespaces: sockets that f opens are the node's, and
// absolute paths are the node's paths. Relative paths begin at /. It must not leave work to other goroutines, which
// run elsewhere, and can't use /proc/self (this thread is no process of the node).
func (n *Node) Do(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, see serveSpawn
		// A test's t.FailNow ends this goroutine without a result; the caller must not wait for ever.
		done := false
		defer func() {
			if !done {
				result <- fmt.Errorf("work in %s ended without returning", n.name)
			}
		}()
		err := n.enter(false)
		if err == nil {
			err = f()
		}
		done = true
		result <- err
	}()
	return <-result
}

// Cmd is an exec.Cmd that runs in a node. Its process is a child of the caller, so Wait, Process.Signal and the pipes
// work as for any other; only the methods below are the lab's own. A Cmd without Dir starts in the caller's directory.
type Cmd struct {
	*exec.Cmd
	node   *Node
	waited sync.Once
	err    error
}

// Command prepares a command of the node. A daemon that it leaves behind with its output still open makes Wait fail
// with exec.ErrWaitDelay instead of blocking for ever.
func (n *Node) Command(ctx context.Context, name string, args ...string) *Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = 5 * time.Second
	return &Cmd{Cmd: cmd, node: n}
}

// Start starts the command in the node's namespaces.
func (c *Cmd) Start() error {
	if c.Dir == "" {
		dir, err := os.Getwd()
		if err != nil {
			return err
		}
		c.Dir = dir
	}
	result := make(chan error)
	start := func() { result <- c.Cmd.Start() }
	n := c.node
	n.mu.Lock()
	if n.spawn == nil {
		n.mu.Unlock()
		return fmt.Errorf("start %s: the node %s is closed", c.Path, n.name)
	}
	n.spawn <- start
	err := <-result
	if err == nil {
		n.started = append(n.started, c)
	}
	n.mu.Unlock()
	if err != nil {
		return fmt.Errorf("start %s in %s: %w", c.Path, n.name, err)
	}
	return nil
}

// Wait waits for the command to end. It may be called more than once.
func (c *Cmd) Wait() error {
	c.waited.Do(func() {
		c.err = c.Cmd.Wait()
		c.node.forget(c)
	})
	return c.err
}

// Run starts the command and waits for it.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the command and returns its standard output; the error carries what it wrote to standard error.
func (c *Cmd) Output() ([]byte, error) {
	var stdout, stderr bytes.Buffer
	c.Stdout = &stdout
	if c.Stderr == nil {
		c.Stderr = &stderr
	}
	err := c.Run()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.Bytes(), err
}

// CombinedOutput runs the command and returns standard output and standard error together.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}

// Run runs a command in the node; an error carries all that the command wrote.
func (n *Node) Run(ctx context.Context, name string, args ...string) error {
	out, err := n.Command(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %s %s: %w: %s", n.name, name, strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// Output runs a command in the node and returns its standard output.
func (n *Node) Output(ctx context.Context, name string, args ...string) (string, error) {
	out, err := n.Command(ctx, name, args...).Output()
	if err != nil {
		err = fmt.Errorf("%s: %w", n.name, err)
	}
	return string(out), err
}

// ReadFile reads a file as a process of the node would; symlinks are the node's.
func (n *Node) ReadFile(path string) ([]byte, error) {
	var content []byte
	err := n.Do(func() (err error) {
		content, err = os.ReadFile(path)
		return err
	})
	return content, err
}

// WriteFile writes a file in the node.
func (n *Node) WriteFile(path string, content []byte, mode fs.FileMode) error {
	return n.Do(func() error { return os.WriteFile(path, content, mode) })
}

// Sysctl reads a network setting of the node, such as "net.ipv4.conf.lo.route_localnet". Interface names with dots
// need the slash form.
func (n *Node) Sysctl(name string) (string, error) {
	value, err := n.ReadFile(sysctlPath(name))
	return strings.TrimSpace(string(value)), err
}

// SetSysctl writes a network setting of the node.
func (n *Node) SetSysctl(name, value string) error {
	if err := n.WriteFile(sysctlPath(name), []byte(value), 0o644); err != nil {
		return fmt.Errorf("set %s to %s in %s: %w", name, value, n.name, err)
	}
	return nil
}

func sysctlPath(name string) string {
	if !strings.Contains(name, "/") {
		name = strings.ReplaceAll(name, ".", "/")
	}
	return "/proc/sys/" + name
}

// Counters are the kernel's network counters of the node under the names that nstat uses, for example UdpInCsumErrors,
// Udp6InCsumErrors, UdpNoPorts, IpInAddrErrors, TcpExtListenDrops.
func (n *Node) Counters() (map[string]uint64, error) {
	counters := make(map[string]uint64)
	for _, file := range []string{"snmp", "netstat"} {
		content, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", n.PID(), file))
		if err != nil {
			return nil, err
		}
		// Lines come in pairs: "Udp: InDatagrams NoPorts ..." and "Udp: 12 0 ...".
		lines := strings.Split(strings.TrimSpace(string(content)), "\n")
		for i := 0; i+1 < len(lines); i += 2 {
			names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
			for j := 1; j < len(names) && j < len(values); j++ {
				if v, err := strconv.ParseUint(values[j], 10, 64); err == nil { // a few are negative constants
					counters[strings.TrimSuffix(names[0], ":")+names[j]] = v
				}
			}
		}
	}
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/snmp6", n.PID()))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(content)) {
		if f := strings.Fields(line); len(f) == 2 {
			if v, err := strconv.ParseUint(f[1], 10, 64); err == nil {
				counters[f[0]] = v
			}
		}
	}
	return counters, nil
}

func (n *Node) forget(c *Cmd) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, other := range n.started {
		if other == c {
			n.started = append(n.started[:i], n.started[i+1:]...)
			return
		}
	}
}

// close ends the holder and with it all that runs in the node.
func (n *Node) close() error {
	n.mu.Lock()
	if n.spawn != nil {
		close(n.spawn)
		n.spawn = nil
	}
	left := append([]*Cmd(nil), n.started...)
	n.mu.Unlock()

	err := n.lifeline.Close()
	// The kernel has ended them all by now or is about to; pid 1 can't go before each of them was waited for.
	for _, c := range left {
		_ = c.Wait()
	}
	err = errors.Join(err, n.holder.Wait())
	for _, f := range n.ns {
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("close %s: %w", n.name, err)
	}
	return nil
}
