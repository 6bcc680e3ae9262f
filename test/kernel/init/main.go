// Command init is the first and only process of the virtual machine that `make test-kernel` boots: it loads the modules,
// runs each test binary in turn, says how they ended and powers off.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The results have a serial port of their own: messages of the kernel would cut lines of the tests in two.
const resultPort = "/dev/ttyS1"

var mounts = []struct{ fsType, target string }{
	{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}, {"bpf", "/sys/fs/bpf"}, {"tmpfs", "/run"}, {"tmpfs", "/tmp"},
}

func main() {
	err := run()
	if err != nil {
		fmt.Println("init:", err)
	}
	unix.Sync()
	// A first process that ends is a kernel panic, which also ends the machine, but looks like a fault of the kernel.
	fmt.Println("init: power off:", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
}

func run() error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fsType, m.target, m.fsType, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	results, err := os.OpenFile(resultPort, os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	if err := report(results); err != nil {
		fmt.Fprintln(results, "init failed:", err)
	}
	// What is still in the port's buffer would be lost.
	return errors.Join(unix.IoctlSetInt(int(results.Fd()), unix.TCSBRK, 1), results.Close())
}

func report(results io.Writer) error {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return err
	}
	fmt.Fprintf(results, "kernel: %s\n", unix.ByteSliceToString(name.Release[:]))
	if err := loadModules("/modules"); err != nil {
		return err
	}
	// Started by the kernel, a process has no more than what its command line gives.
	if err := errors.Join(os.Setenv("PATH", "/bin"), os.Setenv("HOME", "/"), os.Setenv("TMPDIR", "/tmp")); err != nil {
		return err
	}
	binaries, err := filepath.Glob("/tests/*/test")
	if err != nil {
		return err
	}
	for _, binary := range binaries {
		suite := filepath.Base(filepath.Dir(binary))
		begin := time.Now()
		fmt.Fprintf(results, "suite begin: %s\n", suite)
		cmd := exec.Command(binary, "-test.v", "-test.timeout=15m", "-test.skip=^TestLongRun")
		cmd.Dir, cmd.Stdout, cmd.Stderr = filepath.Dir(binary), results, results
		outcome := "ok"
		if err := cmd.Run(); err != nil {
			outcome = err.Error()
		}
		fmt.Fprintf(results, "suite end: %s: %s: %.1f s\n", suite, outcome, time.Since(begin).Seconds())
	}
	fmt.Fprintln(results, "all suites ran")
	return nil
}

// loadModules loads the files of a directory in the order of their names, which begin with a number: what a module needs
// comes before it.
func loadModules(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !strings.Contains(entry.Name(), ".ko") {
			continue
		}
		file, err := os.Open(filepath.Join(dir, entry.Name()))
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(file.Fd()), "", flagsFor(entry.Name()))
		_ = file.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load module %s: %w", entry.Name(), err)
		}
	}
	return nil
}

// moduleInitCompressedFile is MODULE_INIT_COMPRESSED_FILE of linux/module.h (5.17): the kernel unpacks the file itself.
const moduleInitCompressedFile = 4

func flagsFor(name string) int {
	if strings.HasSuffix(name, ".ko") {
		return 0
	}
	return moduleInitCompressedFile
}
