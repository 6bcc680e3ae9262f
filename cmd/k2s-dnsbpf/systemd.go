//go:build linux

package main

import (
	"fmt"
	"net"
	"os"
)

// notifySystemd reports this service's state to the service manager by the protocol of sd_notify(3). Without a manager
// it does nothing.
func notifySystemd(state string) error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	conn, err := net.Dial("unixgram", socket) // a leading @ is an abstract name for both of them
	if err != nil {
		return fmt.Errorf("notify %s: %w", socket, err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify %s: %w", socket, err)
	}
	return nil
}
