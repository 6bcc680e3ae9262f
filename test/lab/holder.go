package lab

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A holder is the first process of a node's namespaces. It is pid 1 of a pid namespace, so that when it ends the kernel
// ends every process of the node, daemons that left their session included, and with the last process the namespaces,
// their interfaces, mounts and eBPF attachments. It ends when its standard input does, that is when whoever raised the
// lab closes it, returns, or is killed: nothing is left for a clean-up that might not run.
//
// The holder is this same binary started again under another name: a lab then needs no helper on disk, and works in
// any test binary that imports the package, without a line in its TestMain.
const holderName = "k2s-lab-holder"

// resolvEnv hands the holder its resolv.conf; as an argument it would clutter every list of processes.
const resolvEnv = "K2S_LAB_RESOLV_CONF"

func init() {
	if len(os.Args) == 0 || os.Args[0] != holderName {
		return
	}
	if err := hold(os.Args[1], os.Getenv(resolvEnv)); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// holderCommand describes the process that makes and holds a node's namespaces.
func holderCommand(node, resolv string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the running binary, to start it again as a namespace holder: %w", err)
	}
	return &exec.Cmd{
		Path: self,
		Args: []string{holderName, node},
		// A binary with the race detector would sleep for a second before it ends.
		Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "GOMAXPROCS=1", "GORACE=atexit_sleep_ms=0", resolvEnv + "=" + resolv},
		Dir: "/",
		SysProcAttr: &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS,
			// A session of its own: Ctrl-C is for the one who raised the lab, who then closes it in order.
			Setsid: true,
		},
	}, nil
}

func hold(node, resolv string) error {
	signal.Ignore(unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	if err := unix.Sethostname([]byte(node)); err != nil {
		return fmt.Errorf("set the hostname of %s: %w", node, err)
	}
	if err := privateMounts(node, resolv); err != nil {
		return err
	}
	// Pid 1 inherits every orphan: without this, a daemon that ended would stay as a zombie and look like a leak.
	children := make(chan os.Signal, 16)
	signal.Notify(children, unix.SIGCHLD)
	go func() {
		for range children {
			for {
				if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 && !errors.Is(err, unix.EINTR) {
					break
				}
			}
		}
	}()
	fmt.Println("ready")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// etcShared are directories of /etc that no test changes, and that have most of its files: a node has this machine's.
var etcShared = []string{"alternatives", "ssl"}

// shareReadOnly shows a directory, if it is there, at another place too.
func shareReadOnly(dir, target string) error {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := os.Mkdir(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(dir, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("share %s: %w", dir, err)
	}
	if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("share %s read-only: %w", dir, err)
	}
	return nil
}

// privateMounts gives the node a /proc, /sys, /run, /var/lib and /etc of its own. /etc is a copy on a tmpfs, not an
// overlay: rename, hard links, the immutable flag and bind mounts then behave as on a disk.
func privateMounts(node, resolv string) error {
	const noFlags = 0
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts of %s private: %w", node, err)
	}
	mount := func(kind, target, options string) error {
		if err := unix.Mount(kind, target, kind, noFlags, options); err != nil {
			return fmt.Errorf("mount a %s on %s of %s: %w", kind, target, node, err)
		}
		return nil
	}
	if err := errors.Join(
		mount("proc", "/proc", ""),
		mount("sysfs", "/sys", ""),
		mount("bpf", "/sys/fs/bpf", "mode=700"),
		mount("tmpfs", "/run", "mode=755"),
		mount("tmpfs", "/var/lib", "mode=755"),
	); err != nil {
		return err
	}
	for _, dir := range []string{"/run/lock", "/run/lab", "/run/lab/etc", "/var/lib/misc"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := mount("tmpfs", "/run/lab/etc", "mode=755"); err != nil {
		return err
	}
	if err := copyTree("/etc", "/run/lab/etc", etcShared); err != nil {
		return err
	}
	for _, dir := range etcShared {
		if err := shareReadOnly(filepath.Join("/etc", dir), filepath.Join("/run/lab/etc", dir)); err != nil {
			return err
		}
	}
	if err := personalise("/run/lab/etc", node, resolv); err != nil {
		return err
	}
	if err := unix.Mount("/run/lab/etc", "/etc", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the private copy of %s to /etc: %w", node, err)
	}
	return os.Remove("/run/lab/etc")
}

// personalise replaces what this machine's own set-up would otherwise leak into the node.
func personalise(etc, node, resolv string) error {
	nsswitch, err := os.ReadFile(filepath.Join(etc, "nsswitch.conf"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var lines []string
	for line := range strings.Lines(string(nsswitch)) {
		if !strings.HasPrefix(line, "hosts:") {
			lines = append(lines, line)
		}
	}
	lines = append(lines, "hosts: files dns\n")
	files := map[string]string{
		"resolv.conf":   resolv,
		"hostname":      node + "\n",
		"hosts":         "127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 " + node + "\n",
		"nsswitch.conf": strings.Join(lines, ""),
	}
	for name, content := range files {
		path := filepath.Join(etc, name)
		// Remove first: on this machine any of them may be a symlink into a place that we must not write to.
		if err := os.RemoveAll(path); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return os.RemoveAll(filepath.Join(etc, "k2s-dnsbpf"))
}

// copyTree copies files, directories and symlinks with owner, mode and modification time, all but some of the top.
func copyTree(from, to string, without []string) error {
	type stamp struct {
		path string
		when time.Time
	}
	var dirs []stamp
	err := filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if slices.Contains(without, rel) {
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		target := filepath.Join(to, rel)
		switch mode := info.Mode(); {
		case mode.IsDir():
			if rel != "." {
				if err := os.Mkdir(target, 0o700); err != nil {
					return err
				}
			}
			dirs = append(dirs, stamp{target, info.ModTime()})
		case mode&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(link, target)
		case mode.IsRegular():
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if err := os.WriteFile(target, content, 0o600); err != nil {
				return err
			}
		default: // sockets and pipes of this machine's services are none of the node's business
			return nil
		}
		owner := info.Sys().(*syscall.Stat_t)
		return errors.Join(
			os.Lchown(target, int(owner.Uid), int(owner.Gid)),
			// After chown, which clears set-id bits.
			os.Chmod(target, info.Mode()),
			os.Chtimes(target, info.ModTime(), info.ModTime()),
		)
	})
	for _, dir := range dirs {
		err = errors.Join(err, os.Chtimes(dir.path, dir.when, dir.when))
	}
	if err != nil {
		return fmt.Errorf("copy %s to %s: %w", from, to, err)
	}
	return nil
}

// startHolder starts a holder and waits until its mounts are in place. Closing the returned pipe ends it.
func startHolder(node, resolv string) (*exec.Cmd, io.Closer, error) {
	cmd, err := holderCommand(node, resolv)
	if err != nil {
		return nil, nil, err
	}
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	report, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("make the namespaces of %s: %w (root and kernel namespaces are needed)", node, err)
	}
	const ready = "ready\n"
	answer := make([]byte, len(ready))
	if _, err := io.ReadFull(report, answer); err != nil || string(answer) != ready {
		rest, _ := io.ReadAll(report)
		_ = lifeline.Close()
		_ = cmd.Wait()
		return nil, nil, fmt.Errorf("set up the namespaces of %s: %s%s%s", node, answer, rest, stderr.String())
	}
	return cmd, lifeline, nil
}
