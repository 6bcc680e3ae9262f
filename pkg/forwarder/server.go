package forwarder

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/errno"
)

// Defaults of Options.
const (
	// DefaultMaxInFlight is Options.MaxInFlight if that is 0.
	DefaultMaxInFlight = 4096
	// DefaultMaxConns is Options.MaxConns if that is 0.
	DefaultMaxConns = 512
)

// maxOctets bounds what long messages of TCP clients take at a time, in octets.
const maxOctets = 8 << 20

// drainWindow is how long sockets are served on after Shutdown: queries and
// connections that the kernel has queued already are answered, and those of
// programs that have read a resolver configuration with our address just before
// it was restored.
const drainWindow = 100 * time.Millisecond

// Options configure a Server. All may be zero.
type Options struct {
	// Listen are the addresses served, each on UDP and TCP. They must be
	// specific, so that a reply leaves from the address that was asked. Port
	// 0 takes a free port, the same one for UDP and TCP. A server without any
	// is asked by nobody.
	Listen []netip.AddrPort

	// MaxInFlight bounds the queries being answered at a time, MaxConns the open
	// TCP connections of clients. A quarter is kept for this host. At the bound
	// the source that has most gives up its oldest query, which is answered
	// REFUSED, or the connection that was idle longest. 0 means
	// DefaultMaxInFlight and DefaultMaxConns.
	MaxInFlight int
	MaxConns    int

	// MaxSockets bounds the sockets for both, those to the servers included; it
	// lowers the two bounds where they would not fit. 0 means no such bound.
	MaxSockets int

	// Kept, if set, is told of each answer to a name outside of all cluster zones when it is taken into the cache and when it is used.
	// It must not block.
	Kept func(KeptAnswer)

	// Logger gets a line per query at debug level only. Nil logs nothing.
	Logger *zap.Logger
}

// Server is a DNS server that forwards. Its methods are safe for concurrent
// use.
type Server struct {
	opts         Options
	log          *zap.Logger
	policy       healthPolicy
	loops        *loopGuard
	lastLoop     atomic.Pointer[Loop]
	loopWarned   atomic.Int64 // when a loop was last logged, in nanoseconds since 1970
	probeID      string
	counters     counters
	sockets      atomic.Int64 // to servers
	spareSockets int64        // of these, how many there may be before those are refused that a query can do without
	spares       atomic.Int64 // races that are over, of which a try still runs

	inFlight   *fair // queries
	connPlaces *fair // TCP connections of clients
	octets     *fair // of messages that are longer than a buffer

	ask     func(context.Context, *request) (*response, error) // the chain behind the routing: see New
	flights flights
	cache   *answerCache

	permitted atomic.Pointer[map[netip.Addr][]Permit]

	routesMu sync.Mutex // makes SetRoutes calls take turns
	routes   atomic.Pointer[table]

	queryCtx     context.Context // ends the exchanges of a Shutdown that runs out of time
	cancelQuery  context.CancelFunc
	spareCtx     context.Context // ends at the start of Shutdown
	cancelSpares context.CancelFunc

	wanted atomic.Pointer[[]netip.AddrPort] // Options.Listen, and what came to it

	closing  atomic.Bool
	drainEnd time.Time      // end of the drain window, set before closing
	wg       sync.WaitGroup // every goroutine of the server
	watch    sync.Once      // starts what waits for wg
	drained  chan struct{}  // closed when wg is done

	mu        sync.Mutex // guards what follows
	listening bool
	addrs     []netip.AddrPort
	udp       []*net.UDPConn
	tcp       []*net.TCPListener
	adopted   map[netip.AddrPort]Sockets
	conns     map[*net.TCPConn]struct{}
}

// New checks the options and opens nothing.
func New(opts Options) (*Server, error) {
	opts.Listen = slices.Clone(opts.Listen)
	for i, addr := range opts.Listen {
		addr = unmap(addr)
		switch {
		case !addr.IsValid():
			return nil, errors.New("forwarder: invalid listen address")
		case addr.Addr().IsUnspecified():
			return nil, fmt.Errorf("forwarder: listen address %v: name each address, a reply must leave from the one that was asked", addr)
		case addr.Port() != 0 && slices.Contains(opts.Listen[:i], addr):
			return nil, fmt.Errorf("forwarder: listen address %v: given twice", addr)
		}
		opts.Listen[i] = addr
	}
	if opts.MaxInFlight < 0 || opts.MaxConns < 0 || opts.MaxSockets < 0 {
		return nil, errors.New("forwarder: negative limit")
	}
	setDefault(&opts.MaxInFlight, DefaultMaxInFlight)
	setDefault(&opts.MaxConns, DefaultMaxConns)
	spareSockets := int64(math.MaxInt64)
	if opts.MaxSockets > 0 {
		// A query has one socket in any case; the rest is for asking the next server as well.
		opts.MaxConns = min(opts.MaxConns, max(hostShare, opts.MaxSockets/8))
		opts.MaxInFlight = min(opts.MaxInFlight, max(hostShare, opts.MaxSockets/2))
		spareSockets = int64(max(0, opts.MaxSockets-opts.MaxConns-opts.MaxInFlight))
	}
	setDefault(&opts.Logger, zap.NewNop())

	s := &Server{
		opts:         opts,
		log:          opts.Logger,
		policy:       defaultHealthPolicy,
		probeID:      rand.Text(),
		spareSockets: spareSockets,
		drained:      make(chan struct{}),
		adopted:      make(map[netip.AddrPort]Sockets),
		conns:        make(map[*net.TCPConn]struct{}),
	}
	s.wanted.Store(&s.opts.Listen)
	s.inFlight = newFair(opts.MaxInFlight, s.isLocal)
	s.connPlaces = newFair(opts.MaxConns, s.isLocal)
	s.octets = newFair(maxOctets, s.isLocal)
	s.loops = newLoopGuard(s.isLocal)
	s.ask = s.coalesce // what answers a query that has its servers
	s.cache = newAnswerCache()
	s.queryCtx, s.cancelQuery = context.WithCancel(context.Background())
	s.spareCtx, s.cancelSpares = context.WithCancel(context.Background())
	return s, nil
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// isLocal reports whether a is certainly an address of this host.
func (s *Server) isLocal(a netip.Addr) bool {
	return a.IsLoopback() || slices.ContainsFunc(*s.wanted.Load(), func(l netip.AddrPort) bool {
		return l.Addr().WithZone("") == a
	})
}

// Listen binds every socket and starts to serve. It binds all or, on an error,
// none. The error wraps that of the system call. ctx bounds the binding only.
func (s *Server) Listen(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closing.Load():
		return fmt.Errorf("forwarder: %w", ErrClosed)
	case s.listening:
		return errors.New("forwarder: already listening")
	}
	for _, addr := range s.opts.Listen {
		if err := s.bind(ctx, addr); err != nil {
			s.closeSockets()
			s.addrs, s.udp, s.tcp = nil, nil, nil
			return fmt.Errorf("forwarder: %w", err)
		}
	}
	s.listening = true
	for _, sockets := range s.adopted { // of addresses that are not served any more
		sockets.close()
	}
	clear(s.adopted)
	for i := range s.udp {
		s.serve(i)
	}
	return nil
}

// Add serves one more address, as if it had been among Options.Listen, while the server listens. One that it serves already
// stays as it is.
func (s *Server) Add(ctx context.Context, addr netip.AddrPort) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	addr = unmap(addr)
	switch {
	case s.closing.Load():
		return fmt.Errorf("forwarder: %w", ErrClosed)
	case !s.listening:
		return errors.New("forwarder: not listening")
	case slices.Contains(s.addrs, addr):
		return nil
	}
	if err := s.bind(ctx, addr); err != nil {
		return fmt.Errorf("forwarder: %w", err)
	}
	wanted := append(slices.Clone(*s.wanted.Load()), addr)
	s.wanted.Store(&wanted)
	s.serve(len(s.udp) - 1)
	return nil
}

// serve begins to serve the sockets of one address. It is called with mu held.
func (s *Server) serve(i int) {
	conn, l := s.udp[i], s.tcp[i]
	s.wg.Go(func() { s.serveUDP(conn) })
	s.wg.Go(func() { s.serveTCP(l) })
}

// bind opens addr for UDP and TCP. It is called with mu held.
func (s *Server) bind(ctx context.Context, addr netip.AddrPort) error {
	// The free port that UDP is given may be taken for TCP.
	const portTries = 16
	for try := 1; ; try++ {
		sockets, err := s.open(ctx, addr)
		if err == nil {
			s.udp = append(s.udp, sockets.UDP)
			s.tcp = append(s.tcp, sockets.TCP)
			s.addrs = append(s.addrs, sockets.addr())
			return nil
		}
		if addr.Port() != 0 || !errno.Is(err, syscall.EADDRINUSE) || try == portTries {
			return err
		}
	}
}

func listenBoth(ctx context.Context, addr netip.AddrPort) (Sockets, error) {
	lc := net.ListenConfig{Control: localOnly(addr)}
	pc, err := lc.ListenPacket(ctx, "udp", addr.String())
	if err != nil {
		return Sockets{}, listenError("udp", addr, err)
	}
	udp := pc.(*net.UDPConn)
	addr = netip.AddrPortFrom(addr.Addr(), uint16(udp.LocalAddr().(*net.UDPAddr).Port))
	l, err := lc.Listen(ctx, "tcp", addr.String())
	if err != nil {
		udp.Close()
		return Sockets{}, listenError("tcp", addr, err)
	}
	return Sockets{UDP: udp, TCP: l.(*net.TCPListener)}, nil
}

// listenError says which socket, why, and what to do about it.
func listenError(proto string, addr netip.AddrPort, err error) error {
	var remedy string
	switch {
	case errno.Is(err, syscall.EADDRINUSE):
		remedy = "stop the DNS server that has this port, or listen on another address"
	case errno.Is(err, syscall.EACCES):
		remedy = "ports below 1024 need root or CAP_NET_BIND_SERVICE"
	case errno.Is(err, syscall.EADDRNOTAVAIL):
		remedy = "bring the interface with this address up first, or listen on another address"
	default:
		remedy = "see whether the address exists and the port is free"
	}
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err // the rest of it repeats protocol and address
	}
	return fmt.Errorf("listen on %s %v: %w: %s", proto, addr, err, remedy)
}

// closeSockets is called with mu held.
func (s *Server) closeSockets() {
	for _, c := range s.udp {
		c.Close()
	}
	for _, l := range s.tcp {
		l.Close()
	}
	for _, sockets := range s.adopted {
		sockets.close()
	}
	clear(s.adopted)
}

// Addrs returns the bound addresses, in the order of Options.Listen, while the
// server listens.
func (s *Server) Addrs() []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.addrs)
}

// ownAddrs returns the addresses that no query may be forwarded to.
func (s *Server) ownAddrs() []netip.AddrPort {
	return append(s.Addrs(), *s.wanted.Load()...)
}

// Shutdown takes no more queries than those that are about to come, answers
// them and those in flight, and closes. If ctx ends before, the rest is given up and Shutdown returns an error; in any case
// nothing of the server runs any more when it returns. Further calls wait for
// the same end.
func (s *Server) Shutdown(ctx context.Context) error {
	s.beginShutdown()
	var err error
	select {
	case <-s.drained:
	case <-ctx.Done():
		select {
		case <-s.drained: // both: nothing was given up
		default:
			err = fmt.Errorf("forwarder: shut down with queries in flight: %w", context.Cause(ctx))
		}
	}
	s.cancelQuery()
	s.mu.Lock()
	s.closeSockets()
	for conn := range s.conns {
		_ = conn.SetDeadline(past) // frees a writer whose client does not read
	}
	s.mu.Unlock()
	<-s.drained
	return err
}

func (s *Server) beginShutdown() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing.Load() {
		return
	}
	s.drainEnd = time.Now().Add(drainWindow)
	s.closing.Store(true)
	s.cancelSpares()
	for _, l := range s.tcp {
		_ = l.SetDeadline(s.drainEnd)
	}
	for _, conn := range s.udp {
		_ = conn.SetReadDeadline(s.drainEnd)
	}
	for conn := range s.conns {
		_ = conn.SetReadDeadline(s.drainEnd)
	}
	s.watchDrained()
}

func (s *Server) watchDrained() {
	s.watch.Do(func() {
		go func() {
			s.wg.Wait()
			close(s.drained)
		}()
	})
}
