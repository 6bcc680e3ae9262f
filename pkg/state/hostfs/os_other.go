//go:build !linux

package hostfs

import (
	"errors"
	"fmt"
)

// What a resolver file is saved with is asked for on Linux only.
func (osFS) Xattrs(name string) ([]Xattr, error)  { return nil, unsupported("listxattr", name) }
func (osFS) SetXattr(name string, x Xattr) error  { return unsupported("setxattr "+x.Name, name) }
func (osFS) Flags(name string) (uint32, error)    { return 0, unsupported("getflags", name) }
func (osFS) SetFlags(name string, _ uint32) error { return unsupported("setflags", name) }

func unsupported(op, name string) error {
	return pathErr(op, name, fmt.Errorf("this program does so on Linux only: %w", errors.ErrUnsupported))
}

// Reserve reserves nothing.
func (osFile) Reserve(int64) error { return nil }
