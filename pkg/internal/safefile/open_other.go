//go:build !linux

package safefile

import "os"

// Open opens a regular file for reading, through symbolic links.
func Open(path string) (*os.File, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if err := checkRegular(path, info); err != nil {
		return nil, err
	}
	return os.Open(path)
}
