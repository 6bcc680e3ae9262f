package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Server is a DNS server of the lab that can be stopped, paused and counted.
type Server struct {
	name    string
	node    *Node
	addr4   netip.Addr
	addr6   netip.Addr
	argv    []string
	ready   string // the line that it writes once it listens
	isQuery func(line string) (Query, bool)
	count   func(ctx context.Context) (uint64, error)

	mu      sync.Mutex
	process *Cmd          // nil while stopped
	ended   chan struct{} // closed when process has ended

	logMu   sync.Mutex
	queries []Query
	output  []string // everything else that it wrote
}

// Query is one that a server has logged.
type Query struct {
	Name   string // with the final dot, as it was asked
	Type   string
	Client netip.Addr
}

// Addr4 is where the server listens, with port 53.
func (s *Server) Addr4() netip.AddrPort { return netip.AddrPortFrom(s.addr4, 53) }

// Addr6 is where the server listens on IPv6.
func (s *Server) Addr6() netip.AddrPort { return netip.AddrPortFrom(s.addr6, 53) }

// Node is where the server runs.
func (s *Server) Node() *Node { return s.node }

// Start starts the server and returns once it listens. Starting a running server does nothing.
func (s *Server) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process != nil {
		select {
		case <-s.ended: // by itself
		default:
			return nil
		}
	}
	// The server outlives ctx, which is only about the wait for it.
	cmd := s.node.Command(context.WithoutCancel(ctx), s.argv[0], s.argv[1:]...)
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr, cmd.Dir = write, write, "/"
	err = cmd.Start()
	_ = write.Close() // the server has its own; ours would hide its end from the reader
	if err != nil {
		_ = read.Close()
		return err
	}
	listening, ended := make(chan struct{}), make(chan struct{})
	go s.follow(read, listening, ended, cmd)
	select {
	case <-listening:
		s.process, s.ended = cmd, ended
		return nil
	case <-ended:
		err = errors.New("it ended at once")
	case <-ctx.Done():
		err = ctx.Err()
		_ = cmd.Process.Kill()
		<-ended
	}
	return fmt.Errorf("start %s in %s: %w:\n%s", s.name, s.node.name, err, s.Log())
}

// follow reads what the server writes until it ends.
func (s *Server) follow(out io.ReadCloser, listening, ended chan struct{}, cmd *Cmd) {
	scanner := bufio.NewScanner(out)
	starting := true
	for scanner.Scan() {
		line := scanner.Text()
		query, ok := s.isQuery(line)
		s.logMu.Lock()
		if ok {
			s.queries = append(s.queries, query)
		} else {
			s.output = append(s.output, line)
		}
		s.logMu.Unlock()
		if starting && strings.Contains(line, s.ready) {
			starting = false
			close(listening)
		}
	}
	_ = out.Close()
	_ = cmd.Wait()
	close(ended)
}

// Stop asks the server to end and waits until it has.
func (s *Server) Stop(ctx context.Context) error { return s.end(ctx, unix.SIGTERM) }

// Kill ends the server at once.
func (s *Server) Kill(ctx context.Context) error { return s.end(ctx, unix.SIGKILL) }

func (s *Server) end(ctx context.Context, signal syscall.Signal) error {
	s.mu.Lock()
	process, ended := s.process, s.ended
	s.process = nil
	s.mu.Unlock()
	if process == nil {
		return nil
	}
	if err := process.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", s.name, err)
	}
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for %s to end: %w", s.name, ctx.Err())
	}
}

// Pause stops the server in its tracks: it holds its sockets and answers nothing, like a hung process. It returns
// once all its threads stand still.
func (s *Server) Pause() error {
	if err := s.signal(unix.SIGSTOP); err != nil {
		return err
	}
	for {
		err := unix.Waitid(unix.P_PID, s.PID(), nil, unix.WSTOPPED, nil)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Resume lets a paused server go on; it then answers what has waited in its sockets.
func (s *Server) Resume() error { return s.signal(unix.SIGCONT) }

func (s *Server) signal(signal syscall.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return fmt.Errorf("%s is not running: Start it first", s.name)
	}
	return s.process.Process.Signal(signal)
}

// PID of the running server, 0 when it is stopped.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return 0
	}
	return s.process.Process.Pid
}

// CPUTime that the running server has used so far, in user space and in the kernel.
func (s *Server) CPUTime() (time.Duration, error) { return CPUTime(s.PID()) }

// CPUTime that a process has used so far, in user space and in the kernel.
func CPUTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field is the command in brackets and may contain anything; count from behind it.
	_, rest, ok := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')'):]), " ")
	fields := strings.Fields(rest)
	const utime, stime = 11, 12
	if !ok || len(fields) <= stime {
		return 0, fmt.Errorf("read the CPU time of process %d: odd line %q", pid, stat)
	}
	user, err1 := strconv.ParseInt(fields[utime], 10, 64)
	system, err2 := strconv.ParseInt(fields[stime], 10, 64)
	const tick = time.Second / 100 // USER_HZ, fixed on all architectures that we build for
	return time.Duration(user+system) * tick, errors.Join(err1, err2)
}

// Queries is how many queries the server has received since it was started. It asks the server, so it fails while the
// server is stopped or paused.
func (s *Server) Queries(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	n, err := s.count(ctx)
	if err != nil {
		return 0, fmt.Errorf("count the queries of %s: %w", s.name, err)
	}
	return n, nil
}

// QueryLog lists the queries seen since the lab was raised; it needs Options.LogQueries. A server writes its log
// beside its answers, so the last ones may be a moment late.
func (s *Server) QueryLog() []Query {
	s.logMu.Lock()
	defer s.logMu.Unlock()
	return append([]Query(nil), s.queries...)
}

// Log is what else the server wrote, for failure messages.
func (s *Server) Log() string {
	s.logMu.Lock()
	defer s.logMu.Unlock()
	return strings.Join(s.output, "\n")
}
