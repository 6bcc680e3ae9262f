package main

import (
	"bytes"
	"io"
	"strings"
	"testing"
)

// TestNobodyReads: what can't be written is waited for by nobody, and counted once somebody reads again.
func TestNobodyReads(t *testing.T) {
	reader, writer := io.Pipe()
	p := newPatient(writer)
	line := []byte(strings.Repeat("x", 1023) + "\n")
	const lines = 3 * stderrRoom / 1024
	for range lines {
		if _, err := p.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	var read bytes.Buffer
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(&read, reader)
	}()
	<-p.idle
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	<-done
	whole, note := strings.Count(read.String(), string(line)), strings.Index(read.String(), "lines before this one could not be written")
	if whole < stderrRoom/1024 || whole >= lines || note < 0 {
		t.Errorf("%d of %d lines, the note on the others at %d", whole, lines, note)
	}
}

// TestReaderGone: neither does an error get to who logs.
func TestReaderGone(t *testing.T) {
	reader, writer := io.Pipe()
	p := newPatient(writer)
	_ = reader.Close()
	for range 3 {
		if n, err := p.Write([]byte("lost\n")); n != 5 || err != nil {
			t.Fatal(n, err)
		}
		p.flush()
	}
	if p.lost != 3 {
		t.Errorf("%d lines are lost, want 3", p.lost)
	}
}
