//go:build linux

package daemon

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/control"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/handover"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
)

// leaveForwarder ends the forwarder, or leaves it running for programs that have yet to read the restored resolver
// configuration, if the detach asks for that. The caller holds the lock.
func (d *Daemon) leaveForwarder(ctx context.Context) {
	if d.replaced || d.linger > 0 && d.now.config.Resolver == config.ResolverTakeover {
		var err error
		if d.lingering, err = handover.Linger(d.now.config.RunDir, d.forwarder, d.linger, d.replaced, d.log); err == nil {
			return
		}
		d.log.Warn("not lingering", zap.Error(err))
	}
	handover.ShutDown(ctx, d.forwarder, d.log)
}

// ErrGone is returned by Detach if the client has gone away.
var ErrGone = errors.New("nobody waits for the detach")

// detaching is a detach order on its way to serve.
type detaching struct {
	linger  time.Duration
	result  chan control.DetachResult
	replied chan struct{} // closed after the reply is sent: the control socket closes when serve returns
}

// Detach implements control.Handler: it makes serve restore the resolver file and return.
func (d *Daemon) Detach(ctx context.Context, order control.DetachOrder) (result control.DetachResult, replied func(), err error) {
	request := detaching{order.Linger, make(chan control.DetachResult, 1), make(chan struct{})}
	select {
	case d.detaches <- request:
	case <-ctx.Done():
		return result, nil, ErrGone
	}
	return <-request.result, func() { close(request.replied) }, nil
}

// Manager is the service manager that runs this process, as far as successors are concerned.
type Manager interface {
	// StartSuccessor starts the program that the manager would start now, in the same way, within this service. The
	// child process is reaped.
	StartSuccessor() (pid int, err error)
	// Succeeded tells the manager which process is the service's main process now.
	Succeeded(pid int)
}

// successorTime is how long a daemon that is replaced waits for its successor.
const successorTime = 5 * time.Second

// Replace implements control.Handler: it makes serve return and leave everything attached to a successor.
func (d *Daemon) Replace(ctx context.Context) (result control.ReplaceResult, replied func(), err error) {
	done := make(chan struct{})
	select {
	case d.replacements <- done:
		d.leaving.Store(true)
		return control.ReplaceResult{Own: d.Manager != nil}, func() { close(done) }, nil
	case <-ctx.Done():
		return result, nil, ErrGone
	}
}

// giveWay ends what only this process needs. The successor finds the rest as after a crash, except that the sockets are served
// until it has taken them over, and the guardian runs until then.
func (d *Daemon) giveWay(ctx context.Context) error {
	d.guardian.Pause()
	d.linger = successorTime
	var err error
	if d.datapath != nil {
		err = d.datapath.Close()
	}
	d.leaveForwarder(ctx)
	return err
}

// startDetach restores the resolver file, the first step of a detach, and reports whether the rest should follow: not
// while the file can't be restored, since it would point nowhere then. The client learns why.
func (d *Daemon) startDetach(request detaching) bool {
	done, err := host.RestoreResolver(d.now.config, d.journal, d.log)
	for _, line := range done {
		d.log.Info(line)
	}
	if err != nil && !d.ours() {
		err = nil // detach reports it
	}
	result := control.DetachResult{Done: done}
	if err != nil {
		result.Error = err.Error()
	}
	request.result <- result
	awaitReply(request.replied)
	return err == nil
}

// awaitReply waits until a reply is sent: the control socket closes when serve returns.
func awaitReply(replied <-chan struct{}) {
	select {
	case <-replied:
	case <-time.After(control.Timeout):
	}
}
