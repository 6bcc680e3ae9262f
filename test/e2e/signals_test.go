package e2e

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// foreground starts a daemon that stays in the foreground, in a session of its own, and returns when it is attached.
func (h *host) foreground(prepare func(*lab.Cmd), args ...string) *lab.Cmd {
	h.t.Helper()
	return h.started(prepare, append([]string{h.binary}, attachArgs(append([]string{"--foreground"}, args...)...)...)...)
}

// started is foreground of a command that starts the daemon.
func (h *host) started(prepare func(*lab.Cmd), argv ...string) *lab.Cmd {
	h.t.Helper()
	cmd := h.Host().Command(h.t.Context(), argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = "/", environment
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	prepare(cmd)
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	eventually(h.t, "it is attached", func() error {
		if r := h.status(); !r.Attached || !r.Healthy {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	return cmd
}

// write puts a file on host0.
func (h *host) write(path, content string) {
	h.t.Helper()
	if err := h.Host().Do(func() error { return os.WriteFile(path, []byte(content), 0o600) }); err != nil {
		h.t.Fatal(err)
	}
}

// has waits until a file of host0 has a text in it.
func (h *host) has(path, text string) {
	h.t.Helper()
	eventually(h.t, path+" has "+text, func() error {
		var content []byte
		err := h.Host().Do(func() (err error) {
			content, err = os.ReadFile(path)
			return err
		})
		if err == nil && !strings.Contains(string(content), text) {
			err = fmt.Errorf("it has %s", content)
		}
		return err
	})
}

func (h *host) zones() (names []string) {
	h.t.Helper()
	for _, zone := range h.healthy().Zones {
		names = append(names, zone.Name)
	}
	return names
}

const daemonLog = "/run/k2s-dnsbpf/daemon.log"

// TestHangup: the daemon in the background takes it as logrotate means it, and as an administrator does. It goes over to a new log, and to
// what the file says now; a file with a fault is told of, and changes nothing; nor does a file that is as it was undo what an attach has
// brought since.
func TestHangup(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	const file = "/run/lab-config.yaml"
	h.write(file, "zones: [cluster.local]\n")
	h.attach(endpoints, ranges, []string{"--config", file})
	pid := h.healthy().PID

	must(t, h.Host(), "mv", daemonLog, daemonLog+".1")
	h.signal("HUP", pid)
	h.has(daemonLog, "settings unchanged")

	h.write(file, "zones: [cluster.local, other.test]\n")
	h.signal("HUP", pid)
	h.has(daemonLog, "new settings")
	if zones := h.zones(); !slices.Contains(zones, "other.test") {
		t.Errorf("after the hangup the zones are %q", zones)
	}

	h.write(file, "zonez: [x\n")
	h.signal("HUP", pid)
	h.has(daemonLog, "settings not read again")
	if zones := h.zones(); !slices.Contains(zones, "other.test") {
		t.Errorf("of a broken file came the zones %q", zones)
	}

	h.write(file, "zones: [cluster.local, other.test]\n")
	h.attach(endpoints, ranges, []string{"--config", file, "--zone", "cluster.local", "--zone", "third.test"})
	must(t, h.Host(), "mv", daemonLog, daemonLog+".2")
	h.signal("HUP", pid)
	h.has(daemonLog, "settings unchanged")
	if zones := h.zones(); !slices.Contains(zones, "third.test") {
		t.Errorf("the second attach's zones are %q", zones)
	}

	if now := h.healthy().PID; now != pid {
		t.Errorf("another daemon: %d, before %d", now, pid)
	}
	h.works()
	h.kill()
	h.has(daemonLog, "guardian: the daemon is dead")
	must(t, h.Host(), "rm", file, daemonLog+".1", daemonLog+".2")
	h.detach()
	h.unchanged(before)
}

// TestTerminalCloses: a daemon in the foreground of a terminal ends with it, and leaves nothing.
func TestTerminalCloses(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	terminal, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd := h.foreground(func(cmd *lab.Cmd) {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, terminal, terminal
		cmd.SysProcAttr.Setctty = true
	})
	_ = terminal.Close()
	if err := master.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	h.gone()
	h.unchanged(before)
}

// TestNobodyReadsTheLog: a daemon whose log goes to a pipe that is closed, to one that nobody reads, to a full disk or nowhere at all works
// on, takes signals, and detaches.
func TestNobodyReadsTheLog(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, cmd *lab.Cmd) (attached func()){
		"closed pipe": func(t *testing.T, cmd *lab.Cmd) func() {
			reader, writer := pipe(t)
			cmd.Stdout, cmd.Stderr = writer, writer
			return func() { _, _ = reader.Close(), writer.Close() }
		},
		"full pipe": func(t *testing.T, cmd *lab.Cmd) func() {
			writer := fullPipe(t)
			cmd.Stdout, cmd.Stderr = writer, writer
			return func() {}
		},
		"full disk": func(t *testing.T, cmd *lab.Cmd) func() {
			full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = full.Close() })
			cmd.Stdout, cmd.Stderr = full, full
			return func() {}
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			before := h.snapshot()
			attached := func() {}
			cmd := h.foreground(func(cmd *lab.Cmd) { attached = prepare(t, cmd) }, "--log-level", "debug")
			attached()
			h.worksWithout(cmd)
			h.unchanged(before)
		})
	}
}

// TestCrashNobodyReads: the daemon's last words don't keep it from dying, and its guardian from what it is for.
func TestCrashNobodyReads(t *testing.T) {
	h := raise(t, lab.Options{})
	before, id := h.snapshot(), h.resolvConf()
	cmd := h.foreground(func(cmd *lab.Cmd) {
		writer := fullPipe(t)
		cmd.Stdout, cmd.Stderr = writer, writer
	})
	r := h.healthy()
	h.signal("QUIT", r.PID)
	if err := cmd.Wait(); err == nil {
		t.Error("it ended in order")
	}
	h.ended(r.Guardian.PID)
	h.isStill(id)
	h.detach()
	h.unchanged(before)
}

// fullPipe returns the end of a pipe that takes nothing more.
func fullPipe(t *testing.T) (writer *os.File) {
	t.Helper()
	_, writer = pipe(t)
	fill := make([]byte, 4096)
	if _, err := unix.FcntlInt(writer.Fd(), unix.F_SETPIPE_SZ, len(fill)); err != nil {
		t.Fatal(err)
	}
	if _, err := writer.Write(fill); err != nil {
		t.Fatal(err)
	}
	return writer
}

// TestClosedDescriptors: where standard input, output and error are closed, what is opened first must not be taken for one of them.
func TestClosedDescriptors(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	command := "exec " + strings.Join(append([]string{h.binary}, attachArgs("--foreground", "--log-level", "debug")...), " ") + " <&- >&- 2>&-"
	cmd := h.started(func(*lab.Cmd) {}, "sh", "-c", command)
	h.worksWithout(cmd)
	h.unchanged(before)
}

func pipe(t *testing.T) (reader, writer *os.File) {
	t.Helper()
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = reader.Close(), writer.Close() })
	return reader, writer
}

// worksWithout has a daemon log a few lines, resolve, and end in order, whatever has become of its log.
func (h *host) worksWithout(cmd *lab.Cmd) {
	h.t.Helper()
	pid := h.healthy().PID
	for range 3 {
		h.signal("HUP", pid)
		h.works()
	}
	h.attach(endpoints, ranges, []string{"--log-level", "debug", "--zone", "cluster.local", "--zone", "other.test"})
	if zones := h.zones(); !slices.Contains(zones, "other.test") {
		h.t.Errorf("new settings brought the zones %q", zones)
	}
	h.signal("TERM", pid)
	if err := cmd.Wait(); err != nil {
		h.t.Errorf("it ended with %v", err)
	}
	h.gone()
}

// TestNobodyReadsTheCommand: who no longer reads what a command says does not keep it from doing what it is for.
func TestNobodyReadsTheCommand(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	unread := func(args ...string) {
		t.Helper()
		reader, writer := pipe(t)
		_ = reader.Close()
		cmd := h.Host().Command(t.Context(), h.binary, args...)
		cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = "/", environment, writer, writer
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("%q: %v", args, err)
		}
	}
	unread(attachArgs()...)
	h.healthy()
	h.killBoth()
	unread("restore", "--log-level", "debug")
	unread("detach", "--linger", "0", "--log-level", "debug")
	h.unchanged(before)
}

// TestUserSignals: signals that mean nothing to the daemon do nothing to it.
func TestUserSignals(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	pid := h.healthy().PID
	for _, signal := range []string{"USR1", "USR2", "PIPE", "ALRM", "VTALRM", "WINCH", "IO", "PWR", "XFSZ", "TTOU", "CONT", "URG", "RTMIN+1"} {
		h.signal(signal, pid)
	}
	h.works()
	if now := h.healthy().PID; now != pid {
		t.Errorf("another daemon: %d, before %d", now, pid)
	}
	h.detach()
}
