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
	// stderrRoom is how many octets may wait for who reads standard error.
	stderrRoom = 1 << 20
	// stderrPatience is how long the end of the program waits for that.
	stderrPatience = time.Second
)

// stderr is standard error, for all that this program says there. It never blocks and never fails: a pipe that nobody reads, a terminal that
// is held and a full disk cost lines, which are counted, and nothing else.
var stderr = newPatient(os.Stderr)

// patient writes from a goroutine of its own. It is safe for concurrent use.
type patient struct {
	mu     sync.Mutex
	to     io.Writer
	queue  bytes.Buffer
	lost   int           // lines since the last that was written
	idle   chan struct{} // closed while nothing waits to be written
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

// drain writes out what waits, until nothing does.
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

// use has what is written from now on go to another writer.
func (p *patient) use(to io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.to = to
}

// Sync implements zapcore.WriteSyncer.
func (p *patient) Sync() error { return nil }

// flush waits until all is written, for as long as that is worth it.
func (p *patient) flush() {
	p.mu.Lock()
	idle := p.idle
	p.mu.Unlock()
	select {
	case <-idle:
	case <-time.After(stderrPatience):
	}
}
