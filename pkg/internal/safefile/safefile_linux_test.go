package safefile

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func write(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func link(t *testing.T, to, path string) string {
	t.Helper()
	if err := os.Symlink(to, path); err != nil {
		t.Fatal(err)
	}
	return path
}

func fifo(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	file := write(t, filepath.Join(dir, "file"), "12345678")
	for name, c := range map[string]struct {
		path string
		want error
		text string
	}{
		"whole":            {file, nil, ""},
		"by a link":        {link(t, file, filepath.Join(dir, "link")), nil, ""},
		"missing":          {filepath.Join(dir, "none"), fs.ErrNotExist, ""},
		"too large":        {write(t, filepath.Join(dir, "large"), "123456789"), ErrTooLarge, "more than 8 bytes"},
		"directory":        {dir, ErrNotRegular, "a directory"},
		"FIFO":             {fifo(t), ErrNotRegular, "a FIFO"},
		"endless device":   {"/dev/zero", ErrNotRegular, "a character device"},
		"link to a device": {link(t, "/dev/zero", filepath.Join(dir, "zero")), ErrNotRegular, "a character device"},
		"a new terminal":   {"/dev/ptmx", ErrNotRegular, "a character device"},
	} {
		t.Run(name, func(t *testing.T) {
			data, err := ReadFile(context.Background(), c.path, 8)
			if !errors.Is(err, c.want) {
				t.Fatalf("%q, %v; want %v", data, err, c.want)
			}
			if c.want == nil && string(data) != "12345678" {
				t.Errorf("read %q", data)
			}
			var pathError *fs.PathError
			if c.want != nil && (!errors.As(err, &pathError) || pathError.Path != c.path || !strings.Contains(err.Error(), c.text)) {
				t.Errorf("%v; want a PathError of %s with %q", err, c.path, c.text)
			}
		})
	}
	if data, err := ReadFile(context.Background(), "/proc/self/comm", 64); err != nil || len(data) == 0 {
		t.Errorf("a file of /proc: %q, %v", data, err)
	}
}

// TestReadInterrupted: a file system that does not answer is a FIFO that is opened for waiting, here.
func TestReadInterrupted(t *testing.T) {
	path := fifo(t)
	wait := func() (*os.File, error) { return os.Open(path) }
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Read(ctx, path, 8, wait); !errors.Is(err, context.Canceled) || !errors.Is(err, ErrHangs) {
		t.Fatalf("interrupted: %v", err)
	}
	// A second one does not pile up behind the first.
	if _, err := Read(context.Background(), path, 8, wait); !errors.Is(err, ErrHangs) {
		t.Errorf("beside one that hangs: %v", err)
	}
	writer, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	for _, hangs := hanging.Load(path); hangs; _, hangs = hanging.Load(path) {
		_ = writer.Close()
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	write(t, path, "whole")
	if data, err := ReadFile(context.Background(), path, 8); string(data) != "whole" {
		t.Errorf("when it answers again: %q, %v", data, err)
	}
}

func TestOpenIn(t *testing.T) {
	outside := write(t, filepath.Join(t.TempDir(), "secret"), "of the host")
	root := t.TempDir()
	write(t, filepath.Join(root, "etc/file"), "inside")
	link(t, "/etc/file", filepath.Join(root, "absolute"))
	link(t, "../../../../../../../.."+outside, filepath.Join(root, "up"))
	link(t, outside, filepath.Join(root, "out"))
	if err := unix.Mkfifo(filepath.Join(root, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{
		"/etc/file": nil, "etc/file": nil, "/absolute": nil, "/../etc/file": nil,
		"/up": fs.ErrNotExist, "/out": fs.ErrNotExist, "/fifo": ErrNotRegular, "/etc": ErrNotRegular,
	} {
		data, err := Read(context.Background(), path, 64, func() (*os.File, error) { return OpenIn(root, path) })
		if !errors.Is(err, want) || want == nil && string(data) != "inside" {
			t.Errorf("%s: %q, %v; want %v", path, data, err, want)
		}
	}
	// A link of /proc leads anywhere (proc_pid_fd(5)).
	if _, err := OpenIn("/proc", "/self/exe"); !errors.Is(err, unix.ELOOP) {
		t.Errorf("a magic link: %v", err)
	}
}

func TestOpenWithoutProc(t *testing.T) {
	file, err := openWithoutProc(write(t, filepath.Join(t.TempDir(), "file"), "x"))
	if err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	if _, err := openWithoutProc(fifo(t)); !errors.Is(err, ErrNotRegular) {
		t.Errorf("a FIFO: %v", err)
	}
}
