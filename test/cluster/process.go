package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// process is one program of the control plane, which can be stopped and started again.
type process struct {
	name string
	node *lab.Node
	argv []string
	log  string // path in the node of what it writes

	mu    sync.Mutex
	cmd   *lab.Cmd
	ended chan struct{}
}

// start starts the program and returns when ready, which is tried again and again, has no complaint.
func (p *process) start(ctx context.Context, ready func(context.Context) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil {
		return nil
	}
	var file *os.File
	if err := p.node.Do(func() (err error) {
		file, err = os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		return err
	}); err != nil {
		return err
	}
	defer file.Close()
	cmd := p.node.Command(context.WithoutCancel(ctx), p.argv[0], p.argv[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = file, file, "/"
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	if err := p.await(ctx, ended, ready); err != nil {
		_ = cmd.Process.Kill()
		<-ended
		return fmt.Errorf("start %s: %w:\n%s", p.name, err, p.tail())
	}
	p.cmd, p.ended = cmd, ended
	return nil
}

func (p *process) await(ctx context.Context, ended <-chan struct{}, ready func(context.Context) error) error {
	poll := time.NewTicker(50 * time.Millisecond) // none of them announces that it is ready
	defer poll.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ended:
			return errors.New("it ended")
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		case <-poll.C:
		}
	}
}

// stop ends the program and waits until it has. A program that is not running is no error.
func (p *process) stop(ctx context.Context, signal unix.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return nil
	}
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.ended:
		p.cmd = nil
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for %s to end: %w", p.name, ctx.Err())
	}
}

func (p *process) signal(signal unix.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return fmt.Errorf("%s is not running", p.name)
	}
	return p.cmd.Process.Signal(signal)
}

// tail is the end of what the program wrote, for failure messages.
func (p *process) tail() string {
	const most = 4096
	content, err := p.node.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(content[max(0, len(content)-most):])
}
