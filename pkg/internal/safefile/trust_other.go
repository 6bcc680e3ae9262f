//go:build !linux

package safefile

import "os"

// OpenTrusted is [Open]. Whose a file is, is not judged here: suspect is never empty.
func OpenTrusted(path string) (file *os.File, suspect string, err error) {
	file, err = Open(path)
	return file, "its owner is not known", err
}
