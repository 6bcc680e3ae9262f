package lab

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Tap is a network interface with a program as its cable.
type Tap struct {
	file *os.File
	// fragmented frames have no more than the Ethernet header in the linear part of the socket buffer.
	fragmented bool
}

// OpenTap makes a tap of the calling thread's network namespace, which is gone when it is closed. What is written to a
// fragmented one the kernel gets as from a driver that leaves all but the Ethernet header in pages.
func OpenTap(name string, fragmented bool) (*Tap, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open tap %s: %w", name, err)
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("name tap %s: %w", name, err), unix.Close(fd))
	}
	flags := uint16(unix.IFF_TAP | unix.IFF_NO_PI)
	if fragmented {
		flags |= unix.IFF_NAPI | unix.IFF_NAPI_FRAGS
	}
	request.SetUint16(flags)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return nil, errors.Join(fmt.Errorf("make tap %s: %w", name, err), unix.Close(fd))
	}
	if fragmented {
		// It would put the headers into the linear part.
		if err := disableGRO(name); err != nil {
			return nil, errors.Join(err, unix.Close(fd))
		}
	}
	return &Tap{os.NewFile(uintptr(fd), name), fragmented}, nil
}

// disableGRO turns generic receive offload of an interface off.
func disableGRO(name string) error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	// struct ethtool_value and, with a pointer to it, struct ifreq.
	value := struct{ command, data uint32 }{command: unix.ETHTOOL_SGRO}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		rest [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:], name)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	err = unix.Close(socket)
	if errno != 0 {
		return fmt.Errorf("turn GRO of %s off: %w", name, errno)
	}
	return err
}

const ethernetLength = 14

// Write has the interface receive a frame.
func (t *Tap) Write(frame []byte) error {
	pieces := [][]byte{frame}
	if t.fragmented && len(frame) > ethernetLength {
		pieces = [][]byte{frame[:ethernetLength], frame[ethernetLength:]}
	}
	raw, err := t.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("write to tap: %w", err)
	}
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		_, failed = unix.Writev(int(fd), pieces)
		return !errors.Is(failed, syscall.EAGAIN)
	})
	return errors.Join(err, failed)
}

// Read waits for a frame that the interface sends.
func (t *Tap) Read(frame []byte) (int, error) { return t.file.Read(frame) }

// Carry brings the frames of each of two taps to the other, as edit leaves them, until close is called, which removes
// both. A nil edit changes nothing. An interface that is down takes no frames: they are lost.
func Carry(a, b *Tap, edit func(frame []byte) []byte) (close func()) {
	var carriers sync.WaitGroup
	for _, way := range []struct{ from, to *Tap }{{a, b}, {b, a}} {
		carriers.Go(func() {
			buf := make([]byte, 65535)
			for {
				n, err := way.from.Read(buf)
				if errors.Is(err, os.ErrClosed) {
					return
				}
				if err != nil {
					continue
				}
				frame := buf[:n]
				if edit != nil {
					frame = edit(frame)
				}
				_ = way.to.Write(frame)
			}
		})
	}
	return func() {
		_ = a.file.Close()
		_ = b.file.Close()
		carriers.Wait()
	}
}
