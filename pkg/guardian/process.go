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

// Command is the command by which this program is started as a guardian. It is the daemon's alone.
const Command = "guardian"

// What daemon and guardian tell each other, one octet each.
const (
	sayAlive    = 'L' // daemon: a sign of life of its main loop; to be answered
	sayPause    = 'P' // daemon: there will be no more signs of life, only its death counts
	sayGoodbye  = 'Q' // daemon: an orderly end, there is nothing to do
	sayReady    = 'G' // guardian: I am watching
	sayHeard    = 'A' // guardian: the answer to a sign of life
	sayRestored = 'R' // guardian: you seemed to hang, the original is in place
)

// Restorer puts the resolver file back.
type Restorer interface {
	// Needed looks without a lock whether there is anything to put back: who came before us may have done so and gone, and
	// nothing must come up again that is gone.
	Needed() bool
	// Restore puts the file back of a daemon that is dead. The caller has the host's lock.
	Restore() (done []string, err error)
	// Suspend puts it back beside a daemon that hangs.
	Suspend() (done []string, err error)
}

const (
	// retry is how often a file that could not be restored is tried again, lookAgain how often a lock that somebody has.
	retry     = time.Second
	lookAgain = 20 * time.Millisecond

	// maxRecord bounds a record that is read, in octets.
	maxRecord = 1 << 20

	// Heartbeat is how often a daemon gives a sign of life.
	Heartbeat = time.Second

	// hangLimit is how many heartbeats in a row may fail to come until the daemon is taken for hanging. It is more than
	// host.HeartbeatLimit: by then the kernel has the fallback already, and nobody waits for the file.
	hangLimit = 5

	// The descriptors that a guardian is started with (the first after standard error).
	lifelineFD = 3
	pidFD      = 4 // of the daemon, pidfd_open(2)

)

// Record is the file, in the run directory, by which a guardian tells who it is and what it has done.
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
	watching bool // signs of life are expected
	silent   int  // heartbeats that did not come
	hangs    bool // and the file has been put back for that
	failure  string
}

// Run is the guardian's main function: it returns when there is nothing left to guard. The log should go to memory,
// and flush write it out: a reader of standard error that has stopped reading must not hold up the restoration.
func Run(c config.Config, restorer Restorer, log *zap.Logger, flush func()) error {
	// They are meant for the daemon, which tells us what it made of them; and whoever reads our log may be gone.
	signal.Ignore(unix.SIGHUP, unix.SIGINT, unix.SIGTERM, unix.SIGPIPE)
	for _, fd := range []int{lifelineFD, pidFD} {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
			return fmt.Errorf("%s: it is started by the daemon alone: use k2s-dnsbpf attach", Command)
		}
		unix.CloseOnExec(fd)
	}
	g := &process{config: c, restorer: restorer, log: log, flush: flush, record: Record{PID: os.Getpid(), Daemon: os.Getppid()}}
	g.disguise()
	g.save()
	if err := tell(lifelineFD, sayReady); err != nil {
		g.log.Warn("the daemon can't be told that its guardian is here", zap.Error(err))
	}
	g.flush()
	died, err := g.watch()
	if died {
		g.outlive()
	}
	g.flush()
	return err
}

// disguise makes the process what it should be to others: known by name, and the last that the kernel's memory killer
// takes. Neither is worth an error: in a container the second may not be allowed.
func (g *process) disguise() {
	for path, value := range map[string]string{"/proc/self/comm": rundir.GuardianName, "/proc/self/oom_score_adj": "-1000"} {
		if err := os.WriteFile(path, []byte(value), 0o644); err != nil {
			g.log.Debug("guardian", zap.String("path", path), zap.Error(err))
		}
	}
}

// tell says one thing over a lifeline and never blocks: who doesn't read is not waited for.
func tell(fd int, what byte) error {
	for {
		err := unix.Send(fd, []byte{what}, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// watch waits for the daemon's end. died is false if it was an orderly one.
func (g *process) watch() (died bool, err error) {
	for {
		// A second at a time: after a time in which nobody ran, such as a frozen control group, the daemon gets the time
		// to say something.
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
		// What it said before it died comes first.
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

// listen takes what the daemon says.
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

// hear takes a sign of life.
func (g *process) hear() {
	g.watching, g.silent = true, 0
	if err := tell(lifelineFD, sayHeard); err != nil {
		g.log.Debug("no answer to a sign of life", zap.Error(err))
	}
	if !g.hangs {
		return
	}
	g.hangs, g.record.Restored, g.record.Hangs, g.record.Outcome = false, nil, false, nil
	g.log.Warn("the daemon runs again", zap.Int("pid", g.record.Daemon))
	g.save()
	g.flush()
}

// silence counts a heartbeat that did not come, and puts the file back if it is one too many. The daemon has the lock and
// the journal open, so the record stays for it: when it runs again it takes the file over again.
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

// outlive puts the file back after the daemon's death. It gives up only when there is nothing left to do, or when another
// guardian has the task.
func (g *process) outlive() {
	for g.restorer.Needed() {
		locks, err := rundir.Try(g.config)
		if errors.Is(err, state.ErrLocked) {
			// A restore or a detach is at work, or an attach that will have a guardian of its own.
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

// replaced reports whether another guardian has come since.
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

// fail logs a failure, once for many.
func (g *process) fail(why string, err error) {
	if text := err.Error(); text != g.failure {
		g.failure = text
		g.log.Error("guardian: "+why+": resolver not restored, trying on", zap.Error(err))
	}
}

// save writes the record. Without it, only status knows less.
func (g *process) save() {
	content, err := json.Marshal(g.record)
	if err == nil {
		err = state.WriteFile(rundir.Guardian(g.config), append(content, '\n'), 0o644)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		g.log.Warn("guardian: its record is not written", zap.Error(err))
	}
}

// Is tells a guardian that has the lock, whose process is pid, from a daemon.
func Is(c config.Config, pid int) bool {
	record, err := ReadRecord(c)
	return err == nil && record.PID == pid && record.Daemon != pid
}
