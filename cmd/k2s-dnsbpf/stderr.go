package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

const (
	// stderrRoom limits the octets that wait for the reader of standard error.
	stderrRoom = 1 << 20
	// stderrPatience is how long the program waits for that reader at its end.
	stderrPatience = time.Second
)

// stderr is standard error. It never blocks and never fails: if a pipe is not read, a terminal
// is stopped or a disk is full, lines are dropped and counted.
var stderr = newPatient(os.Stderr)

// patient writes in a separate goroutine. It is safe for concurrent use.
type patient struct {
	mu     sync.Mutex
	to     io.Writer
	queue  bytes.Buffer
	lost   int           // lines dropped since the last one written
	idle   chan struct{} // closed while nothing is waiting to be written
	active bool
}

func newPatient(to io.Writer) *patient {
	idle := make(chan struct{})
	close(idle)
	return &patient{to: to, idle: idle}
}

// Write implements io.Writer. Each call should bring whole lines.
func (p *patient) Write(lines []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.queue.Len()+len(lines) > stderrRoom {
		p.lost += bytes.Count(lines, []byte{'\n'})
		return len(lines), nil
	}
	p.queue.Write(lines)
	if !p.active {
		p.active, p.idle = true, make(chan struct{})
		go p.drain()
	}
	return len(lines), nil
}

// drain writes what is waiting, until nothing is left.
func (p *patient) drain() {
	for {
		p.mu.Lock()
		if p.queue.Len() == 0 {
			p.active = false
			close(p.idle)
			p.mu.Unlock()
			return
		}
		text, lost := bytes.Clone(p.queue.Bytes()), p.lost
		lines, to := bytes.Count(text, []byte{'\n'}), p.to
		p.queue.Reset()
		p.mu.Unlock()
		if lost > 0 {
			text = fmt.Appendf(text, "k2s-dnsbpf: %d lines before this one could not be written\n", lost)
		}
		_, err := to.Write(text)
		p.mu.Lock()
		if err != nil {
			p.lost += lines
		} else {
			p.lost -= lost
		}
		p.mu.Unlock()
	}
}

// use redirects further output to another writer.
func (p *patient) use(to io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.to = to
}

// Sync implements zapcore.WriteSyncer.
func (p *patient) Sync() error { return nil }

// flush waits until everything is written, but not longer than stderrPatience.
func (p *patient) flush() {
	p.mu.Lock()
	idle := p.idle
	p.mu.Unlock()
	select {
	case <-idle:
	case <-time.After(stderrPatience):
	}
}
