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
	// restartPause bounds how often a guardian that has ended is started again.
	restartPause = time.Second

	// stopLimit is how long a guardian may take to end when it is told to.
	stopLimit = 2 * time.Second
)

// environment keeps the process small: its heap is what the packages of this program make at their start.
var environment = []string{"GOMAXPROCS=1", "GOGC=10", "GOMEMLIMIT=16MiB"}

// Handle is the daemon's side of its guardian: it starts one, gives it signs of life, and starts another when it ends or
// no longer answers. A nil Handle is none at all. Its methods may be called from several goroutines.
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
	alive      bool // signs of life are being given
	unanswered int  // of them
	stopping   bool
	problem    error
}

// Start starts a guardian, and follows it until close.
func Start(c config.Config, log *zap.Logger) *Handle {
	g := &Handle{
		config: c, log: log,
		restored: make(chan struct{}, 1), ready: make(chan struct{}), done: make(chan struct{}), stop: make(chan struct{}),
	}
	go g.keep()
	return g
}

// Await returns when the first guardian watches.
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
		return fmt.Errorf("start the guardian: it does not come up: %w", ctx.Err())
	}
}

// keep has a guardian running until it is told to stop.
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
		// A session of its own: what ends the daemon's process group is what it is there for.
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
	// Its end of the lifeline is closed: it has ended, or does not work as it should.
	_ = child.Process.Kill()
	if err := child.Wait(); err != nil {
		return err
	}
	return errors.New("it ended by itself")
}

// begin starts the process that is to be the guardian.
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
		// Its count begins here.
		g.tell(sayAlive)
	}
	return nil
}

// listen takes what a guardian says until its lifeline is closed.
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
				default: // one that waits is as good as many
				}
			}
		}
	}
}

// tell says something to the guardian. The caller holds mu.
func (g *Handle) tell(what byte) {
	if g.process == nil {
		return
	}
	if err := tell(g.lifeline, what); err != nil {
		g.log.Debug("the guardian does not hear", zap.Error(err))
	}
}

// Beat gives a sign of life. It ends a guardian that has left too many of them without an answer: one that is stopped is
// none.
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

// Pause ends the signs of life: from here on only the daemon's death counts.
func (g *Handle) Pause() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.alive = false
	g.tell(sayPause)
}

// Dismiss ends the guardian, which has nothing to do any more, and waits for that.
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

// Awakened is poked when the guardian has put the resolver file back because this daemon seemed to hang.
func (g *Handle) Awakened() <-chan struct{} {
	if g == nil {
		return nil
	}
	return g.restored
}

// Report says for status how the guardian is; nil without one.
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
		problem = "the guardian has ended, another is about to be started"
		if g.problem != nil {
			problem += ": " + g.problem.Error()
		}
	}
	return entry, problem
}
