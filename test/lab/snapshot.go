package lab

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// listings are the commands whose output a snapshot holds. All of them list only what belongs to the node's network
// namespace; that is enough for eBPF as well, for a program or map that is neither attached there, nor pinned below
// the node's /sys/fs/bpf, nor held by a process of the node does not exist. A machine-wide `bpftool prog` would show the
// objects of other labs and tests that happen to run.
var listings = [][]string{
	{"ip", "-d", "address"},
	{"ip", "rule"},
	{"ip", "-6", "rule"},
	{"ip", "-d", "route", "show", "table", "all"},
	{"ip", "-d", "-6", "route", "show", "table", "all"},
	{"bpftool", "net"},
	{"nft", "--stateless", "list", "ruleset"},
	{"ss", "-Hlntu"},
}

// volatile matches what changes in a listing by itself: the timers of bridges and their ports, and that an
// address is new.
var volatile = regexp.MustCompile(` *\b\w+_timer +[0-9.]+| +valid_lft \S+ preferred_lft \S+| tentative\b`)

// filterHook matches a qdisc that tc filters can hang on, and the interface that has it.
var filterHook = regexp.MustCompile(`qdisc (?:clsact|ingress) \S+ dev (\S+)`)

// files of a node in a snapshot. The run directory of the lab itself, locks of iptables and what is shared read-only are
// left out.
var snapshotTrees = []string{"/etc", "/run", "/var/lib", "/sys/fs/bpf"}

var snapshotSkips = []string{"/run/lab", "/run/xtables.lock", "/etc/alternatives", "/etc/ssl"}

// Snapshot describes the state of all nodes: interfaces, addresses, routes, tc filters, eBPF attachments and pins,
// NAT rules, listening sockets, network settings, files and processes. Two snapshots with nothing done between them
// are equal; Diff shows what has changed otherwise.
func (l *Lab) Snapshot(ctx context.Context) (string, error) {
	nodes := l.Nodes()
	parts := make([]string, len(nodes))
	err := inParallel(len(nodes), func(i int) (err error) {
		parts[i], err = nodes[i].Snapshot(ctx)
		return err
	})
	return strings.Join(parts, ""), err
}

// Snapshot describes the state of one node, see Lab.Snapshot. Every line begins with the node and what was asked, so
// that a line of a Diff stands for itself.
func (n *Node) Snapshot(ctx context.Context) (string, error) {
	var b strings.Builder
	section := func(title, text string) {
		for line := range strings.Lines(text) {
			line = strings.TrimRight(line, " \n")
			if line != "" {
				fmt.Fprintf(&b, "%s | %s | %s\n", n.name, title, line)
			}
		}
	}
	list := func(argv ...string) (string, error) {
		out, err := n.Output(ctx, argv[0], argv[1:]...)
		if err != nil {
			return "", fmt.Errorf("take a snapshot: %w", err)
		}
		section(strings.Join(argv, " "), volatile.ReplaceAllString(out, ""))
		return out, nil
	}
	for _, argv := range listings {
		if _, err := list(argv...); err != nil {
			return "", err
		}
	}
	qdiscs, err := list("tc", "qdisc")
	if err != nil {
		return "", err
	}
	for _, match := range filterHook.FindAllStringSubmatch(qdiscs, -1) {
		for _, hook := range []string{"ingress", "egress"} {
			if _, err := list("tc", "filter", "show", "dev", match[1], hook); err != nil {
				return "", err
			}
		}
	}
	var settings, files, processes []string
	if err := n.Do(func() (err error) {
		if settings, err = listSettings(); err != nil {
			return err
		}
		if files, err = listFiles(); err != nil {
			return err
		}
		processes, err = listProcesses()
		return err
	}); err != nil {
		return "", fmt.Errorf("take a snapshot of %s: %w", n.name, err)
	}
	section("sysctl", strings.Join(settings, "\n"))
	section("file", strings.Join(files, "\n"))
	section("process", strings.Join(processes, "\n"))
	return b.String(), nil
}

func listSettings() ([]string, error) {
	var lines []string
	for _, top := range []string{"/proc/sys/net/ipv4", "/proc/sys/net/ipv6", "/proc/sys/net/core"} {
		err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			value, err := os.ReadFile(path)
			if err != nil {
				return nil // some are write-only, some unreadable until they are set
			}
			lines = append(lines, strings.TrimPrefix(path, "/proc/sys/")+" = "+strings.TrimSpace(string(value)))
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return lines, nil
}

func listFiles() ([]string, error) {
	var lines []string
	for _, top := range snapshotTrees {
		err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
			if slices.Contains(snapshotSkips, path) {
				if entry != nil && entry.IsDir() {
					return fs.SkipDir
				}
				return nil
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil // gone since its directory was read
			}
			if err != nil {
				return err
			}
			info, err := entry.Info()
			if err != nil {
				return err
			}
			line, err := describe(path, info)
			lines = append(lines, line)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return lines, nil
}

// describe says all about a file that a restoration has to put back. Directories are without their time of change,
// which no one can undo.
func describe(path string, info fs.FileInfo) (string, error) {
	owner := info.Sys().(*syscall.Stat_t)
	line := fmt.Sprintf("%s %s %d:%d", path, info.Mode(), owner.Uid, owner.Gid)
	switch mode := info.Mode(); {
	case mode&fs.ModeSymlink != 0:
		target, err := os.Readlink(path)
		return line + " -> " + target, err
	case mode.IsRegular() && !strings.HasPrefix(path, "/sys/fs/bpf"):
		content, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		line += " " + info.ModTime().UTC().Format("2006-01-02T15:04:05.000000000") + attributes(path)
		if len(content) <= 1024 && utf8.Valid(content) {
			return fmt.Sprintf("%s %q", line, content), nil
		}
		return fmt.Sprintf("%s sha256:%x", line, sha256.Sum256(content)), nil
	}
	return line, nil
}

// attributes names the ones that keep a file from being replaced.
func attributes(path string) string {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil || flags&(unix.STATX_ATTR_IMMUTABLE|unix.STATX_ATTR_APPEND) == 0 {
		return ""
	}
	return fmt.Sprintf(" attributes:%#x", flags&(unix.STATX_ATTR_IMMUTABLE|unix.STATX_ATTR_APPEND))
}

// listProcesses lists the node's processes without their numbers, which differ between two starts of the same.
func listProcesses() ([]string, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, dir := range dirs {
		command, err := os.ReadFile(dir + "/cmdline")
		if err != nil || len(command) == 0 {
			continue // gone, or about to be waited for
		}
		lines = append(lines, strings.TrimSpace(strings.ReplaceAll(string(command), "\x00", " ")))
	}
	slices.Sort(lines)
	return lines, nil
}

// Diff lists the lines that only one of two snapshots has, "-" before those of the first and "+" before those of the
// second. It is empty for equal snapshots.
func Diff(before, after string) string {
	count := make(map[string]int)
	for line := range strings.Lines(after) {
		count[line]++
	}
	var b strings.Builder
	for line := range strings.Lines(before) {
		if count[line] > 0 {
			count[line]--
			continue
		}
		b.WriteString("- " + line)
	}
	for line := range strings.Lines(after) {
		if count[line] > 0 {
			count[line]--
			b.WriteString("+ " + line)
		}
	}
	return b.String()
}
