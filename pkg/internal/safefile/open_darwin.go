package safefile

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Open opens a regular file for reading, through symbolic links. A FIFO is opened without waiting for its writer, and not read.
func Open(path string) (*os.File, error) {
	file, err := os.OpenFile(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil {
		err = checkRegular(path, info)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}
