//go:build linux

package handover

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/peer"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// Predecessor is the client side of a daemon that lingers.
type Predecessor struct {
	conn *net.UnixConn
	pid  int
}

// Errors of a request, besides those that the other side reports.
var (
	errGone  = errors.New("gone")
	errHangs = errors.New("it does not answer")
)

// dial returns nil without an error if no daemon lingers.
func dial(runDir string) (*Predecessor, error) {
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(runDir, lingerFile), Net: "unixpacket"})
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) { // killed, it leaves its socket behind
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask the daemon that lingers: %w", err)
	}
	peer, err := peer.Of(conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &Predecessor{conn: conn, pid: int(peer.Pid)}, nil
}

// Close may be called on a nil Predecessor.
func (l *Predecessor) Close() {
	if l != nil {
		_ = l.conn.Close()
	}
}

// ask sends a request and returns the reply and the descriptors that came with it. If the process ends or dies meanwhile, in
// whatever form that shows, it returns errGone once its sockets are closed; if it hangs, errHangs.
func (l *Predecessor) ask(do string) (reply lingerReply, fds []int, err error) {
	_ = l.conn.SetDeadline(time.Now().Add(timeout))
	err = writeLinger(l.conn, lingerRequest{Do: do}, nil)
	if err == nil {
		reply, err = readLinger[lingerReply](l.conn, &fds)
	}
	switch {
	case err == nil && reply.Error != "":
		return reply, nil, errors.New(reply.Error)
	case err == nil:
		return reply, fds, nil
	case errors.Is(err, os.ErrDeadlineExceeded) && !rundir.AwaitEnd(l.pid, 0):
		return reply, nil, fmt.Errorf("%w within %s", errHangs, timeout)
	}
	rundir.AwaitEnd(l.pid, timeout)
	return reply, nil, fmt.Errorf("%w: %w", errGone, err)
}

// Inherit returns the sockets of a daemon that lingers, if there is one, their addresses, and that daemon. It keeps serving
// them until it is told that they have been taken over.
func Inherit(runDir string) (from *Predecessor, sockets []forwarder.Sockets, addresses []netip.AddrPort, err error) {
	l, err := dial(runDir)
	if l == nil || err != nil {
		return nil, nil, nil, err
	}
	reply, fds, err := l.ask(lingerSockets)
	if errors.Is(err, errGone) {
		l.Close()
		return nil, nil, nil, nil
	}
	if err == nil {
		if sockets, err = adopt(fds); err == nil {
			return l, sockets, reply.Listen, nil
		}
	}
	l.Close()
	return nil, nil, nil, fmt.Errorf("take over from process %d, which lingers after a detach: %w: end it with k2s-dnsbpf detach --linger 0", l.pid, err)
}

// Succeed tells the daemon that lingered, if any, that its sockets are being served. The caller holds the lock. After an
// error the other daemon ends by itself when its time is over.
func (l *Predecessor) Succeed(runDir string) error {
	if l == nil {
		return nil
	}
	_ = l.conn.SetDeadline(time.Now().Add(timeout))
	err := writeLinger(l.conn, lingerRequest{Do: lingerTaken}, nil)
	if err := errors.Join(err, removeLingerFile(runDir)); err != nil {
		return fmt.Errorf("end of process %d, which lingers: %w", l.pid, err)
	}
	return nil
}

// ForgetDead removes the socket of a daemon that was killed while it lingered. The caller holds the lock.
func ForgetDead(runDir string) error {
	l, err := dial(runDir)
	if l == nil && err == nil {
		return removeLingerFile(runDir)
	}
	l.Close()
	return err
}

// End returns a message about a daemon that lingers, empty if there is none. With a configuration without
// lingering, it ends that daemon. The caller holds the lock.
func End(c config.Config) (said string, err error) {
	l, err := dial(c.RunDir)
	if err != nil {
		return "", err
	}
	if l == nil {
		return "", removeLingerFile(c.RunDir)
	}
	defer l.Close()
	if c.Linger > 0 {
		reply, _, err := l.ask(lingerStatus)
		if errors.Is(err, errGone) {
			return "", removeLingerFile(c.RunDir)
		}
		if err != nil {
			return "", fmt.Errorf("process %d lingers and does not answer: %w: end it with k2s-dnsbpf detach --linger 0", l.pid, err)
		}
		if len(reply.Listen) == 0 {
			return "", nil // for a successor alone
		}
		return fmt.Sprintf("process %d lingers: it keeps answering on %v for %s or longer, for programs that have not yet read %s again (--linger 0 ends it)",
			l.pid, reply.Listen[0], time.Until(reply.Until).Round(time.Second), c.ResolvConf), nil
	}
	// First, so that it leaves the run directory to us.
	if err := removeLingerFile(c.RunDir); err != nil {
		return "", err
	}
	if err := rundir.Terminate(l.pid); err != nil {
		return "", err
	}
	if !rundir.AwaitEnd(l.pid, cleanUpLimit) {
		return "", fmt.Errorf("process %d, which lingers, does not end within %s: kill it", l.pid, cleanUpLimit)
	}
	return fmt.Sprintf("process %d no longer lingers", l.pid), nil
}

// Report adds a daemon that lingers.
func Report(report *status.Report, c config.Config) {
	l, err := dial(c.RunDir)
	if l == nil || err != nil {
		return
	}
	defer l.Close()
	reply, _, err := l.ask(lingerStatus)
	if errors.Is(err, errGone) {
		return
	}
	report.Lingering = &status.Lingering{PID: l.pid}
	if err != nil {
		report.Problems = append(report.Problems, fmt.Sprintf("process %d lingers and does not answer: end it with k2s-dnsbpf detach --linger 0", l.pid))
		return
	}
	report.Lingering.Until = reply.Until.UTC().Truncate(time.Second)
	for _, address := range reply.Listen {
		report.Lingering.Listen = append(report.Lingering.Listen, address.String())
	}
}

// duplicate returns a new descriptor of a socket, closed on exec.
func duplicate(socket syscall.Conn) (fd int, err error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return -1, err
	}
	var dupErr error
	err = raw.Control(func(original uintptr) { fd, dupErr = unix.FcntlInt(original, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(err, dupErr)
}

// CloseAll closes sockets that will not be served.
func CloseAll(all []forwarder.Sockets) (err error) {
	for _, sockets := range all {
		err = errors.Join(err, sockets.UDP.Close(), sockets.TCP.Close())
	}
	return err
}

// adopt turns descriptors into sockets, UDP before TCP for each address. It always closes the descriptors.
func adopt(fds []int) (all []forwarder.Sockets, err error) {
	files := make([]*os.File, len(fds))
	for i, fd := range fds {
		files[i] = os.NewFile(uintptr(fd), "inherited socket")
		defer files[i].Close()
	}
	defer func() {
		if err != nil {
			_ = CloseAll(all)
		}
	}()
	for i := 0; i+1 < len(files); i += 2 {
		packets, err := net.FilePacketConn(files[i])
		if err != nil {
			return all, err
		}
		udp, ok := packets.(*net.UDPConn)
		if !ok {
			return all, errors.Join(fmt.Errorf("a %s socket in place of a UDP one", packets.LocalAddr().Network()), packets.Close())
		}
		listener, err := net.FileListener(files[i+1])
		if err != nil {
			return all, errors.Join(err, udp.Close())
		}
		tcp, ok := listener.(*net.TCPListener)
		if !ok {
			return all, errors.Join(fmt.Errorf("a %s socket in place of a TCP one", listener.Addr().Network()), udp.Close(), listener.Close())
		}
		all = append(all, forwarder.Sockets{UDP: udp, TCP: tcp})
	}
	return all, nil
}

func writeLinger(conn *net.UnixConn, message any, rights []byte) error {
	packet, err := json.Marshal(message)
	if err != nil {
		return err
	}
	_, _, err = conn.WriteMsgUnix(packet, rights, nil)
	return err
}

// readLinger reads one packet, and its descriptors if wanted. The end of the connection is io.EOF.
func readLinger[T any](conn *net.UnixConn, fds *[]int) (message T, err error) {
	packet := make([]byte, maxLingerMessage)
	var rights []byte
	if fds != nil {
		rights = make([]byte, unix.CmsgSpace(4*maxInherited))
	}
	n, nrights, _, _, err := conn.ReadMsgUnix(packet, rights)
	if err != nil {
		return message, err
	}
	if nrights > 0 {
		if *fds, err = descriptors(rights[:nrights]); err != nil {
			return message, err
		}
	}
	return message, json.Unmarshal(packet[:n], &message)
}

// maxInherited limits the descriptors of a message; the kernel's limit is 253 (SCM_MAX_FD, unix(7)).
const maxInherited = 64

func descriptors(rights []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}
	for _, message := range messages {
		sent, err := unix.ParseUnixRights(&message)
		if err != nil {
			return nil, err
		}
		fds = append(fds, sent...)
	}
	return fds, nil
}
