//go:build linux

package daemon

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

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// lingerer is the other side of a daemon that lingers: what others ask of it.
type lingerer struct {
	conn *net.UnixConn
	pid  int
}

// dialLingerer returns nil without an error if no daemon lingers.
func dialLingerer(runDir string) (*lingerer, error) {
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(runDir, lingerFile), Net: "unixpacket"})
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) { // killed, it leaves its socket behind
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask the daemon that lingers: %w", err)
	}
	peer, err := peerOf(conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &lingerer{conn: conn, pid: int(peer.Pid)}, nil
}

// close may be called on a nil lingerer.
func (l *lingerer) close() {
	if l != nil {
		_ = l.conn.Close()
	}
}

// ask sends a request and returns the reply and the descriptors that came with it. Of one that ends or dies meanwhile, in
// whatever form that shows, it returns errGone once that one's sockets are closed; of one that hangs, errHangs.
func (l *lingerer) ask(do string) (reply lingerReply, fds []int, err error) {
	_ = l.conn.SetDeadline(time.Now().Add(controlTimeout))
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
		return reply, nil, fmt.Errorf("%w within %s", errHangs, controlTimeout)
	}
	rundir.AwaitEnd(l.pid, controlTimeout)
	return reply, nil, fmt.Errorf("%w: %w", errGone, err)
}

// inherit returns the sockets of a daemon that lingers, if there is one, and their addresses. That daemon goes on serving
// them until told that they are taken, and for good if it never is.
func (d *Daemon) inherit() (sockets []forwarder.Sockets, addresses []netip.AddrPort, err error) {
	l, err := dialLingerer(d.now.config.RunDir)
	if l == nil || err != nil {
		return nil, nil, err
	}
	reply, fds, err := l.ask(lingerSockets)
	if errors.Is(err, errGone) {
		l.close()
		return nil, nil, nil
	}
	if err == nil {
		if sockets, err = adopt(fds); err == nil {
			d.predecessor = l
			return sockets, reply.Listen, nil
		}
	}
	l.close()
	return nil, nil, fmt.Errorf("take over from process %d, which lingers after a detach: %w: end it with k2s-dnsbpf detach --linger 0", l.pid, err)
}

// succeed tells the daemon that lingered, if one did, that its sockets are served now. The caller holds the lock.
func (d *Daemon) succeed() {
	if d.predecessor == nil {
		return
	}
	_ = d.predecessor.conn.SetDeadline(time.Now().Add(controlTimeout))
	err := writeLinger(d.predecessor.conn, lingerRequest{Do: lingerTaken}, nil)
	if err := errors.Join(err, removeLingerFile(d.now.config.RunDir)); err != nil {
		// It ends by itself when its time is over.
		d.log.Warn("end of the daemon that lingers", zap.Int("pid", d.predecessor.pid), zap.Error(err))
	}
}

// forgetDeadLingerer removes the socket of a daemon that was killed while it lingered. The caller holds the lock.
func forgetDeadLingerer(runDir string) error {
	l, err := dialLingerer(runDir)
	if l == nil && err == nil {
		return removeLingerFile(runDir)
	}
	l.close()
	return err
}

// endLingering returns what is to be said of a daemon that lingers, empty if none does. With a configuration that wants
// no lingering, it ends that daemon. The caller holds the lock.
func endLingering(c config.Config) (said string, err error) {
	l, err := dialLingerer(c.RunDir)
	if err != nil {
		return "", err
	}
	if l == nil {
		return "", removeLingerFile(c.RunDir)
	}
	defer l.close()
	if c.Linger > 0 {
		reply, _, err := l.ask(lingerStatus)
		if errors.Is(err, errGone) {
			return "", removeLingerFile(c.RunDir)
		}
		if err != nil {
			return "", fmt.Errorf("process %d lingers and does not answer: %w: end it with k2s-dnsbpf detach --linger 0", l.pid, err)
		}
		return fmt.Sprintf("process %d lingers: it answers on %v for %s or longer, for programs that have not read %s again (--linger 0 ends it)",
			l.pid, reply.Listen[0], time.Until(reply.Until).Round(time.Second), c.ResolvConf), nil
	}
	// First: then it leaves the run directory to us.
	if err := removeLingerFile(c.RunDir); err != nil {
		return "", err
	}
	if err := rundir.Terminate(l.pid); err != nil {
		return "", err
	}
	if !rundir.AwaitEnd(l.pid, stopTimeout) {
		return "", fmt.Errorf("process %d, which lingers, does not end within %s: kill it", l.pid, stopTimeout)
	}
	return fmt.Sprintf("process %d lingers no more", l.pid), nil
}

// fillLingering adds a daemon that lingers.
func fillLingering(report *status.Report, c config.Config) {
	l, err := dialLingerer(c.RunDir)
	if l == nil || err != nil {
		return
	}
	defer l.close()
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

func closeAll(all []forwarder.Sockets) (err error) {
	for _, sockets := range all {
		err = errors.Join(err, sockets.UDP.Close(), sockets.TCP.Close())
	}
	return err
}

// adopt makes sockets of descriptors, UDP before TCP of each address. It closes the descriptors in any case.
func adopt(fds []int) (all []forwarder.Sockets, err error) {
	files := make([]*os.File, len(fds))
	for i, fd := range fds {
		files[i] = os.NewFile(uintptr(fd), "inherited socket")
		defer files[i].Close()
	}
	defer func() {
		if err != nil {
			_ = closeAll(all)
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

// readLinger reads one packet, and the descriptors with it if they are wanted. The end of the connection is io.EOF.
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

// maxInherited bounds the descriptors of a message; the kernel does at 253 (SCM_MAX_FD, unix(7)).
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
