package netdev

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

func sysctlPath(name string) string {
	return filepath.Join("/proc/sys", strings.ReplaceAll(name, ".", "/"))
}

// Sysctl reads a setting of the current network namespace. The name has its elements separated by dots.
func Sysctl(name string) (string, error) {
	value, err := os.ReadFile(sysctlPath(name))
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return string(bytes.TrimSpace(value)), nil
}

// SetSysctl changes a setting of the current network namespace.
func SetSysctl(name, value string) error {
	return sysctlError(name, value, os.WriteFile(sysctlPath(name), []byte(value), 0o644))
}

// CheckSysctl reports whether SetSysctl would do: the setting has the value, or can be changed.
func CheckSysctl(name, value string) error {
	now, err := Sysctl(name)
	if err != nil || now == value {
		return err
	}
	return sysctlError(name, value, unix.Access(sysctlPath(name), unix.W_OK))
}

func sysctlError(name, value string, err error) error {
	if errors.Is(err, unix.EROFS) {
		return fmt.Errorf("set sysctl %s=%s: %w: /proc/sys is read-only here: run privileged, or set it beforehand", name, value, err)
	}
	if err != nil {
		return fmt.Errorf("set sysctl %s=%s: %w", name, value, err)
	}
	return nil
}

// FirstFreePort returns the lowest port that takes no privilege to listen on.
func FirstFreePort() (int, error) {
	const name = "net.ipv4.ip_unprivileged_port_start"
	value, err := Sysctl(name)
	if err != nil {
		return 0, err
	}
	first, err := strconv.Atoi(value)
	if err != nil {
		return 0, fmt.Errorf("parse sysctl %s: %w", name, err)
	}
	return first, nil
}

// PortRange is a range of ports, both ends included.
type PortRange struct {
	First, Last uint16
}

// smallest port that a NAT range may start at: those below are reserved for services (RFC 6335).
const firstUserPort = 1024

// PortsOutsideEphemeral returns the larger of the two port ranges that the kernel never gives to a socket by itself
// (net.ipv4.ip_local_port_range).
func PortsOutsideEphemeral() (PortRange, error) {
	const name = "net.ipv4.ip_local_port_range"
	value, err := Sysctl(name)
	if err != nil {
		return PortRange{}, err
	}
	var first, last int
	if _, err := fmt.Sscan(value, &first, &last); err != nil {
		return PortRange{}, fmt.Errorf("parse sysctl %s=%q: %w", name, value, err)
	}
	return outside(first, last)
}

func outside(first, last int) (PortRange, error) {
	const lastPort = 1<<16 - 1
	below, above := first-firstUserPort, lastPort-last
	if max(below, above) < 1024 {
		return PortRange{}, fmt.Errorf("ephemeral ports %d-%d leave fewer than 1024 others in one piece: narrow net.ipv4.ip_local_port_range",
			first, last)
	}
	if below >= above {
		return PortRange{First: firstUserPort, Last: uint16(first - 1)}, nil
	}
	return PortRange{First: uint16(last + 1), Last: lastPort}, nil
}
