package hostfs

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func holds(t *testing.T, name, want string) {
	t.Helper()
	if got, err := OS().ReadFile(name, 64); err != nil || string(got) != want {
		t.Errorf("%s: %q, %v, want %q", name, got, err, want)
	}
}

// TestOS: the real file system, of whichever operating system, does what the interface says.
func TestOS(t *testing.T) {
	fsys, dir := OS(), t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	must(t, WriteNew(fsys, a, []byte("one"), 0o600))
	if err := WriteNew(fsys, a, nil, 0o600); !errors.Is(err, fs.ErrExist) {
		t.Errorf("made twice: %v", err)
	}
	must(t, fsys.Link(a, b))
	first, err := fsys.Lstat(a)
	must(t, err)
	second, err := fsys.Lstat(b)
	must(t, err)
	if !first.SameFile(second) || first.Links != 2 || first.Size != 3 || !first.Mode.IsRegular() {
		t.Errorf("two names of one file: %+v, %+v", first, second)
	}
	must(t, WriteFile(fsys, a, []byte("two"), 0o600))
	holds(t, a, "two")
	holds(t, b, "one")
	if replaced, err := fsys.Lstat(a); err != nil || replaced.SameFile(second) {
		t.Errorf("replaced: %+v, %v", replaced, err)
	}
	if err := fsys.RenameNew(a, b); !errors.Is(err, fs.ErrExist) {
		t.Errorf("renamed over another: %v", err)
	}
	must(t, fsys.RenameNew(a, a+"2"))
	if err := fsys.Exchange(a+"2", b); err == nil {
		holds(t, b, "two")
		must(t, fsys.Exchange(a+"2", b))
	} else if runtime.GOOS != "windows" || !errors.Is(err, errors.ErrUnsupported) {
		t.Error(err)
	}
	then := time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC)
	must(t, fsys.SetTimes(b, then, then))
	if info, err := fsys.Lstat(b); err != nil || !info.Mtime.Equal(then) {
		t.Errorf("times: %+v, %v", info, err)
	}
	must(t, Overwrite(fsys, b, []byte("x")))
	holds(t, b, "x")
	must(t, MkdirAll(fsys, filepath.Join(dir, "c", "d")))
	must(t, fsys.Access(dir))
	for _, name := range []string{a + "2", b, filepath.Join(dir, "c", "d"), filepath.Join(dir, "c")} {
		must(t, fsys.Remove(name))
	}
	must(t, fsys.SyncDir(dir))
	if _, err := fsys.Lstat(a); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("removed: %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestReadersInTheWay: a file is replaced, and read whole, while others read it.
func TestReadersInTheWay(t *testing.T) {
	fsys, name := OS(), filepath.Join(t.TempDir(), "f")
	texts := [][]byte{bytes.Repeat([]byte("a"), 4096), bytes.Repeat([]byte("b"), 4096)}
	must(t, WriteFile(fsys, name, texts[0], 0o600))
	begin, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for range begin {
			if got, err := fsys.ReadFile(name, 1<<20); err != nil || !bytes.Equal(got, texts[0]) && !bytes.Equal(got, texts[1]) {
				t.Errorf("%d octets, %v", len(got), err)
			}
		}
	}()
	for i := range 200 {
		begin <- struct{}{}
		if err := WriteFile(fsys, name, texts[i%2], 0o600); err != nil {
			t.Error(err)
		}
	}
	close(begin)
	<-done
}
