package errno

import (
	"io"
	"net"
	"syscall"
	"testing"
)

// What the system says of a port that is taken, and of one where nobody listens.
func TestSockets(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := taken.Addr().String()
	if second, err := net.Listen("tcp", address); !Is(err, syscall.EACCES, syscall.EADDRINUSE) {
		t.Errorf("second listener: %v, %v", second, err)
	}
	if err := taken.Close(); err != nil {
		t.Fatal(err)
	}
	if conn, err := net.Dial("tcp", address); !Is(err, syscall.ECONNREFUSED) {
		t.Errorf("nobody listens: %v, %v", conn, err)
	}
	if number, ok := Of(io.EOF); ok || Is(io.EOF, 0) {
		t.Errorf("no number: %v", number)
	}
}
