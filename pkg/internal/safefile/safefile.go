// Package safefile reads files that are not this program's alone: a path that others name, or that others can put
// something else under, must not hang the program, fill its memory, or have a device do something. A read is bounded in
// size and in time, opens regular files only, and can be interrupted. It is a leaf; every room may use it.
package safefile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"time"
)

var (
	// ErrTooLarge says that a file is longer than its reader allows.
	ErrTooLarge = errors.New("file is too large")
	// ErrNotRegular says that a file was not opened because it is not a regular file but a directory, FIFO, socket or device.
	ErrNotRegular = errors.New("not a regular file")
	// ErrHangs says that a read did not come back, as on a file system whose server is gone. It goes with an error of the
	// context.
	ErrHangs = errors.New("its file system does not answer")
)

// Patience is how long a read may take, with a context that allows for more.
const Patience = 5 * time.Second

// ReadFile reads a regular file of at most limit octets, through symbolic links. Errors are *fs.PathError, and may be
// ErrTooLarge, ErrNotRegular or ErrHangs. Files of /proc and /sys, which have no length, are read to their end.
func ReadFile(ctx context.Context, path string, limit int64) ([]byte, error) {
	return Read(ctx, path, limit, func() (*os.File, error) { return Open(path) })
}

// Read is ReadFile of what open returns, such as Open and then a look at whose the file is. The path is for errors.
func Read(ctx context.Context, path string, limit int64, open func() (*os.File, error)) ([]byte, error) {
	if _, hangs := hanging.Load(path); hangs {
		return nil, &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w: an earlier read waits for it yet", ErrHangs)}
	}
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	type result struct {
		data []byte
		err  error
	}
	came := make(chan result, 1)
	go func() {
		data, err := readAll(path, limit, open)
		came <- result{data, err}
	}()
	select {
	case r := <-came:
		return r.data, r.err
	case <-ctx.Done():
	}
	// Nothing interrupts it but its own end. At most one for each path is waited for.
	hanging.Store(path, struct{}{})
	go func() {
		<-came
		hanging.Delete(path)
	}()
	return nil, &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w: %w", ErrHangs, ctx.Err())}
}

// hanging are the paths whose readers were left behind.
var hanging sync.Map

func readAll(path string, limit int64, open func() (*os.File, error)) ([]byte, error) {
	file, err := open()
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, limit+1))
	switch {
	case err != nil:
		return nil, err
	case int64(len(data)) > limit:
		return nil, &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w: more than %d bytes", ErrTooLarge, limit)}
	}
	return data, nil
}

// Kind says what a file is, with its article, as a person would: "a FIFO".
func Kind(mode fs.FileMode) string {
	switch {
	case mode.IsRegular():
		return "a regular file"
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeSymlink != 0:
		return "a symbolic link"
	case mode&fs.ModeNamedPipe != 0:
		return "a FIFO"
	case mode&fs.ModeSocket != 0:
		return "a socket"
	case mode&fs.ModeCharDevice != 0:
		return "a character device"
	case mode&fs.ModeDevice != 0:
		return "a block device"
	}
	return "no file"
}

func checkRegular(path string, info fs.FileInfo) error {
	if info.Mode().IsRegular() {
		return nil
	}
	return &fs.PathError{Op: "open", Path: path, Err: fmt.Errorf("%w: it is %s", ErrNotRegular, Kind(info.Mode()))}
}
