//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// TestDescribe: what the kernel refuses for want of something of this process or host is one line that ends with what to do.
func TestDescribe(t *testing.T) {
	// As the library wraps them: loading a program, making a map, pinning, attaching.
	wrapped := map[string]func(error) error{
		"program": func(err error) error {
			return fmt.Errorf("assign values: field DnsFromHost: %w", fmt.Errorf("program dns_from_host: load program: %w", &ebpf.VerifierError{Cause: err}))
		},
		"map": func(err error) error {
			return fmt.Errorf("program dns_from_host: map dns_zones: %w", fmt.Errorf("map create: %w", err))
		},
		"pin": func(err error) error {
			return fmt.Errorf("create pin directory: %w", &os.PathError{Op: "mkdir", Path: "/sys/fs/bpf/x", Err: err})
		},
		"attach": func(err error) error { return fmt.Errorf("attach tcx link: %w", err) },
		"xdp": func(err error) error {
			return fmt.Errorf("failed to attach link: %w", fmt.Errorf("create link: %w", err))
		},
	}
	for errno, remedy := range map[error]string{
		unix.ENOSYS: "--no-bpf", unix.EPERM: "--no-bpf", unix.EACCES: "a security module", unix.ENOSPC: "make room", unix.ENOMEM: "make room",
		unix.EROFS: "--bpffs", unix.EMFILE: "LimitNOFILE", unix.ENFILE: "LimitNOFILE",
	} {
		for name, wrap := range wrapped {
			for _, describe := range []func(error) error{describe, describeLoadError} {
				want := remedy
				if name == "pin" && errors.Is(errno, unix.EACCES) {
					want = "CAP_DAC_OVERRIDE"
				}
				err := describe(wrap(errno))
				text := err.Error()
				_, last, _ := strings.Cut(text, errno.Error())
				if !errors.Is(err, errno) || !strings.Contains(last, want) || strings.Contains(text, "\n") || strings.Contains(text, "report this") {
					t.Errorf("%v, %s: %q", errno, name, text)
				}
			}
		}
	}
	// What is a program's own fault is one to report, with all that the verifier says.
	verifier := &ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"0: r0 = 1", "R1 type=ctx expected=fp"}}
	if text := describeLoadError(fmt.Errorf("load program: %w", verifier)).Error(); !strings.Contains(text, "report this") || !strings.Contains(text, "R1 type=ctx") {
		t.Errorf("refused by the verifier: %q", text)
	}
	other := errors.New("another")
	if err := describe(other); err != other { //nolint:errorlint // the very same
		t.Errorf("another error: %v", err)
	}
}
