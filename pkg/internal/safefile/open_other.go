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

// OpenTrusted is [Open]. Whose a file is, is not judged here: suspect is never empty.
func OpenTrusted(path string) (file *os.File, suspect string, err error) {
	file, err = Open(path)
	return file, "its owner is not known", err
}
