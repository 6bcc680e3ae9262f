//go:build linux

package guardian

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

const (
	// restartPause limits how often a guardian that has ended is restarted.
	restartPause = time.Second

	// stopLimit is how long a guardian may take to end when told to.
	stopLimit = 2 * time.Second
)

// environment keeps the process small: its heap holds only what packages allocate during initialisation.
var environment = []string{"GOMAXPROCS=1", "GOGC=10", "GOMEMLIMIT=16MiB"}

// Handle is the daemon's side of its guardian: it starts one, sends heartbeats, and starts another one when it ends or
// no longer answers. A nil Handle stands for no guardian. Its methods may be called from several goroutines.
type Handle struct {
	config   config.Config
	log      *zap.Logger
	restored chan struct{} // see Awakened
	ready    chan struct{} // closed when the first guardian watches
	first    sync.Once     // closes it
	stop     chan struct{} // closed to end it
	done     chan struct{} // closed when it has ended

	mu         sync.Mutex
	process    *os.Process // nil while there is none
	lifeline   int
	restarts   int
	alive      bool // heartbeats are being sent
	unanswered int  // heartbeats
	stopping   bool
	problem    error
}

// Start starts a guardian and keeps one running until Dismiss.
func Start(c config.Config, log *zap.Logger) *Handle {
	g := &Handle{
		config: c, log: log,
		restored: make(chan struct{}, 1), ready: make(chan struct{}), done: make(chan struct{}), stop: make(chan struct{}),
	}
	go g.keep()
	return g
}

// Await returns when the first guardian is watching.
func (g *Handle) Await(ctx context.Context) error {
	select {
	case <-g.ready:
		return nil
	case <-ctx.Done():
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.problem != nil {
			return fmt.Errorf("start the guardian: %w", g.problem)
		}
		return fmt.Errorf("start the guardian: it does not start watching: %w", ctx.Err())
	}
}

// keep keeps a guardian running until it is told to stop.
func (g *Handle) keep() {
	defer close(g.done)
	for {
		began := time.Now()
		err := g.runOne()
		g.mu.Lock()
		if g.stopping {
			g.mu.Unlock()
			return
		}
		g.restarts++
		g.problem = err
		g.mu.Unlock()
		g.log.Warn("the guardian has ended: starting another", zap.Error(err))
		select {
		case <-g.stop:
			return
		case <-time.After(restartPause - time.Since(began)):
		}
	}
}

// runOne starts a guardian and returns when it has ended, and why.
func (g *Handle) runOne() error {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make its lifeline: %w", err)
	}
	lifeline, theirs := ends[0], os.NewFile(uintptr(ends[1]), "lifeline")
	defer unix.Close(lifeline)
	defer theirs.Close()
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return fmt.Errorf("pidfd_open: %w", err)
	}
	pidfd := os.NewFile(uintptr(self), "pidfd")
	defer pidfd.Close()

	// This very program, even if another version has been installed since.
	child := &exec.Cmd{
		Path: "/proc/self/exe", Args: append([]string{"k2s-dnsbpf", Command}, g.config.CommonArgs()...), Env: environment,
		Dir: "/", Stderr: os.Stderr, ExtraFiles: []*os.File{theirs, pidfd},
		// A new session, so that it survives whatever ends the daemon's process group.
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := g.begin(child, lifeline); err != nil {
		return err
	}
	_ = theirs.Close()
	g.listen(lifeline)
	g.mu.Lock()
	g.process = nil
	g.mu.Unlock()
	// Its end of the lifeline is closed: it has ended or is broken.
	_ = child.Process.Kill()
	if err := child.Wait(); err != nil {
		return err
	}
	return errors.New("it ended by itself")
}

// begin starts the guardian's process.
func (g *Handle) begin(child *exec.Cmd, lifeline int) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopping {
		return errors.New("not started")
	}
	if err := child.Start(); err != nil {
		return err
	}
	g.process, g.lifeline, g.unanswered, g.problem = child.Process, lifeline, 0, nil
	if g.alive {
		// Its count starts here.
		g.tell(sayAlive)
	}
	return nil
}

// listen reads a guardian's messages until its lifeline is closed.
func (g *Handle) listen(lifeline int) {
	buffer := make([]byte, 64)
	for {
		n, err := unix.Read(lifeline, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		for _, what := range buffer[:n] {
			switch what {
			case sayReady:
				g.first.Do(func() { close(g.ready) })
			case sayHeard:
				g.mu.Lock()
				g.unanswered = 0
				g.mu.Unlock()
			case sayRestored:
				select {
				case g.restored <- struct{}{}:
				default: // one pending value is enough
				}
			}
		}
	}
}

// tell sends a message to the guardian. The caller holds mu.
func (g *Handle) tell(what byte) {
	if g.process == nil {
		return
	}
	if err := tell(g.lifeline, what); err != nil {
		g.log.Debug("message to the guardian not sent", zap.Error(err))
	}
}

// Beat sends a heartbeat. It ends a guardian that has left too many of them unanswered, because a stopped guardian is
// useless.
func (g *Handle) Beat() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.alive = true
	if g.process == nil {
		return
	}
	if g.unanswered++; g.unanswered > hangLimit {
		g.log.Warn("the guardian does not answer: ending it", zap.Int("pid", g.process.Pid))
		_ = g.process.Kill()
		return
	}
	g.tell(sayAlive)
}

// Pause stops the heartbeats: from here on only the daemon's death counts.
func (g *Handle) Pause() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.alive = false
	g.tell(sayPause)
}

// Dismiss ends the guardian, which is no longer needed, and waits for that.
func (g *Handle) Dismiss() {
	g.mu.Lock()
	g.stopping = true
	close(g.stop)
	g.tell(sayGoodbye)
	process := g.process
	g.mu.Unlock()
	select {
	case <-g.done:
		return
	case <-time.After(stopLimit):
	}
	if process != nil {
		_ = process.Kill()
	}
	<-g.done
}

// Awakened receives a value when the guardian has restored the resolver file because this daemon seemed to hang.
func (g *Handle) Awakened() <-chan struct{} {
	if g == nil {
		return nil
	}
	return g.restored
}

// Report returns the guardian's state for status; nil without one.
func (g *Handle) Report() (entry *status.Guardian, problem string) {
	if g == nil {
		return nil, ""
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	entry = &status.Guardian{Restarts: g.restarts}
	if g.process != nil {
		entry.PID = g.process.Pid
	} else {
		problem = "the guardian has ended and is about to be restarted"
		if g.problem != nil {
			problem += ": " + g.problem.Error()
		}
	}
	return entry, problem
}
