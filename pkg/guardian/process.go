//go:build linux

package guardian

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// Command is the command that starts this program as a guardian. Only the daemon uses it.
const Command = "guardian"

// The messages between daemon and guardian, one octet each.
const (
	sayAlive    = 'L' // daemon: a heartbeat of its main loop, to be answered
	sayPause    = 'P' // daemon: there will be no more heartbeats, only its death counts
	sayGoodbye  = 'Q' // daemon: an orderly end, there is nothing to do
	sayReady    = 'G' // guardian: I am watching
	sayHeard    = 'A' // guardian: the answer to a heartbeat
	sayRestored = 'R' // guardian: you seemed to hang, the original is in place
)

// Restorer restores the resolver file.
type Restorer interface {
	// Needed reports, without a lock, whether there is anything to restore: another process may have done it and cleaned up, and
	// its directories must not be created again.
	Needed() bool
	// Restore restores the file of a dead daemon. The caller has the host's locks.
	Restore() (done []string, err error)
	// Suspend restores it beside a daemon that hangs.
	Suspend() (done []string, err error)
}

const (
	// retry is the interval for a file that could not be restored, lookAgain that for a lock that another process has.
	retry     = time.Second
	lookAgain = 20 * time.Millisecond

	// maxRecord limits the size of a record, in octets.
	maxRecord = 1 << 20

	// Heartbeat is the interval of a daemon's heartbeats.
	Heartbeat = time.Second

	// hangLimit is how many heartbeats in a row may be missing before the daemon is considered to hang. It is more than
	// host.HeartbeatLimit: by then the kernel uses the fallback, so that nobody is waiting for the file.
	hangLimit = 5

	// The file descriptors that a guardian is started with (after standard error).
	lifelineFD = 3
	pidFD      = 4 // of the daemon, pidfd_open(2)

)

// Record is the file in the run directory in which a guardian says who it is and what it has done.
type Record struct {
	PID      int        `json:"pid"`
	Daemon   int        `json:"daemon"`
	Restored *time.Time `json:"restored,omitempty"`
	Hangs    bool       `json:"hangs,omitempty"` // the daemon was not dead then
	Outcome  []string   `json:"outcome,omitempty"`
}

func ReadRecord(c config.Config) (Record, error) {
	var record Record
	content, err := safefile.ReadFile(context.Background(), rundir.Guardian(c), maxRecord)
	if err != nil {
		return record, err
	}
	return record, json.Unmarshal(content, &record)
}

// process is the state of that process.
type process struct {
	config   config.Config
	restorer Restorer
	log      *zap.Logger
	flush    func() // writes the log out

	record   Record
	watching bool // heartbeats are expected
	silent   int  // missing heartbeats
	hangs    bool // and the file has been restored because of that
	failure  string
}

// Run is the guardian's main function. It returns when there is nothing left to guard. The log should go to memory,
// and flush write it out: a reader of standard error that has stopped reading must not delay the restoration.
func Run(c config.Config, restorer Restorer, log *zap.Logger, flush func()) error {
	// Signals are meant for the daemon, which tells us about them, and the reader of our log may be gone.
	signal.Ignore(unix.SIGHUP, unix.SIGINT, unix.SIGTERM, unix.SIGPIPE)
	for _, fd := range []int{lifelineFD, pidFD} {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
			return fmt.Errorf("%s: only the daemon starts it: use k2s-dnsbpf attach", Command)
		}
		unix.CloseOnExec(fd)
	}
	g := &process{config: c, restorer: restorer, log: log, flush: flush, record: Record{PID: os.Getpid(), Daemon: os.Getppid()}}
	g.disguise()
	g.save()
	if err := tell(lifelineFD, sayReady); err != nil {
		g.log.Warn("the daemon could not be told that its guardian is ready", zap.Error(err))
	}
	g.flush()
	died, err := g.watch()
	if died {
		g.outlive()
	}
	g.flush()
	return err
}

// disguise sets the process's name, and makes it the last one that the kernel's OOM killer
// chooses. Failures are ignored: in a container the latter may not be allowed.
func (g *process) disguise() {
	for path, value := range map[string]string{"/proc/self/comm": rundir.GuardianName, "/proc/self/oom_score_adj": "-1000"} {
		if err := os.WriteFile(path, []byte(value), 0o644); err != nil {
			g.log.Debug("guardian", zap.String("path", path), zap.Error(err))
		}
	}
}

// tell sends a message over a lifeline and never blocks.
func tell(fd int, what byte) error {
	for {
		err := unix.Send(fd, []byte{what}, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// watch waits for the daemon's end. died is false if it ended in an orderly way.
func (g *process) watch() (died bool, err error) {
	for {
		// A second at a time: after a period in which nothing ran, such as in a frozen control group, the daemon gets time
		// to send something.
		timeout := -1
		if g.watching {
			timeout = int(Heartbeat.Milliseconds())
		}
		fds := []unix.PollFd{{Fd: lifelineFD, Events: unix.POLLIN}, {Fd: pidFD, Events: unix.POLLIN}}
		n, err := unix.Poll(fds, timeout)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return false, fmt.Errorf("wait for the daemon: %w", err)
		case n == 0:
			g.silence()
			continue
		}
		// Messages from before its death come first.
		goodbye, closed := false, false
		if fds[0].Revents != 0 {
			goodbye, closed = g.listen()
		}
		if goodbye {
			return false, nil
		}
		if closed || fds[1].Revents != 0 {
			return true, nil
		}
	}
}

// listen reads the daemon's messages.
func (g *process) listen() (goodbye, closed bool) {
	buffer := make([]byte, 64)
	for {
		n, _, err := unix.Recvfrom(lifelineFD, buffer, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return false, false
		case err != nil || n == 0:
			return false, true
		}
		for _, what := range buffer[:n] {
			switch what {
			case sayAlive:
				g.hear()
			case sayPause:
				g.watching = false
			case sayGoodbye:
				return true, false
			}
		}
	}
}

// hear handles a heartbeat.
func (g *process) hear() {
	g.watching, g.silent = true, 0
	if err := tell(lifelineFD, sayHeard); err != nil {
		g.log.Debug("heartbeat not answered", zap.Error(err))
	}
	if !g.hangs {
		return
	}
	g.hangs, g.record.Restored, g.record.Hangs, g.record.Outcome = false, nil, false, nil
	g.log.Warn("the daemon runs again", zap.Int("pid", g.record.Daemon))
	g.save()
	g.flush()
}

// silence counts a missing heartbeat, and restores the file if it is one too many. The daemon has the lock and
// the journal open, so the record is left to it: when it runs again it takes over the file again.
func (g *process) silence() {
	if g.silent++; g.silent < hangLimit || g.hangs {
		return
	}
	defer g.flush()
	done, err := g.restorer.Suspend()
	if err != nil {
		g.fail("the daemon hangs", err)
		return
	}
	g.hangs = true
	g.restored("the daemon hangs", done)
	if err := tell(lifelineFD, sayRestored); err != nil {
		g.log.Debug("the daemon can't be told", zap.Error(err))
	}
}

// outlive restores the file after the daemon's death. It gives up only when there is nothing left to do, or when another
// guardian has taken over.
func (g *process) outlive() {
	for g.restorer.Needed() {
		locks, err := rundir.Try(g.config)
		if errors.Is(err, state.ErrLocked) {
			// A restore or a detach is in progress, or an attach that will have its own guardian.
			if g.replaced() {
				return
			}
			time.Sleep(lookAgain)
			continue
		}
		if err != nil {
			g.log.Warn("not all locks: restoring without them", zap.Error(err))
		}
		done, err := g.restorer.Restore()
		if err == nil {
			g.hangs = false
			g.restored("the daemon is dead", done)
			_ = locks.Unlock()
			return
		}
		_ = locks.Unlock()
		g.fail("the daemon is dead", err)
		g.flush()
		time.Sleep(retry)
	}
}

// replaced reports whether there is another guardian by now.
func (g *process) replaced() bool {
	record, err := ReadRecord(g.config)
	return err == nil && record.PID != g.record.PID
}

func (g *process) restored(why string, done []string) {
	now := time.Now().UTC().Truncate(time.Millisecond)
	g.record.Restored, g.record.Hangs, g.record.Outcome = &now, g.hangs, done
	g.log.Warn("guardian: "+why, zap.Int("pid", g.record.Daemon), zap.Strings("done", done))
	g.save()
}

// fail logs a failure, but not again while it stays the same.
func (g *process) fail(why string, err error) {
	if text := err.Error(); text != g.failure {
		g.failure = text
		g.log.Error("guardian: "+why+": resolver not restored, retrying", zap.Error(err))
	}
}

// save writes the record. Only status needs it.
func (g *process) save() {
	content, err := json.Marshal(g.record)
	if err == nil {
		err = state.WriteFile(rundir.Guardian(g.config), append(content, '\n'), 0o644)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		g.log.Warn("guardian: its record could not be written", zap.Error(err))
	}
}

// Is reports whether pid, which has the lock, is a guardian rather than a daemon.
func Is(c config.Config, pid int) bool {
	record, err := ReadRecord(c)
	return err == nil && record.PID == pid && record.Daemon != pid
}
