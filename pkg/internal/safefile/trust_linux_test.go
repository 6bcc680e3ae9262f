package safefile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTrust: a file is ours if nobody else can write it, nor put another in its place.
func TestTrust(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("gives files away, which takes root")
	}
	const other = 4711
	for name, tc := range map[string]struct {
		spoil   func(t *testing.T, dir string) // dir/a/b/file is ours
		path    string
		suspect string
	}{
		"ours":                  {nil, "a/b/file", ""},
		"below a sticky one":    {func(t *testing.T, dir string) { mode(t, dir+"/a", 0o777|fs.ModeSticky) }, "a/b/file", ""},
		"a link of ours":        {func(t *testing.T, dir string) { symlink(t, "b/file", dir+"/a/l", 0) }, "a/l", ""},
		"an absolute link":      {func(t *testing.T, dir string) { symlink(t, dir+"/a/b", dir+"/a/l", 0) }, "a/l/../b/file", ""},
		"the file is another's": {func(t *testing.T, dir string) { give(t, dir+"/a/b/file", other) }, "a/b/file", `a/b/file" belongs to the user with the ID 4711`},
		"its directory is":      {func(t *testing.T, dir string) { give(t, dir+"/a/b", other) }, "a/b/file", `a/b" belongs to`},
		"one above is":          {func(t *testing.T, dir string) { give(t, dir+"/a", other) }, "a/b/file", `a" belongs to`},
		"the group may write":   {func(t *testing.T, dir string) { mode(t, dir+"/a/b/file", 0o660) }, "a/b/file", "(its mode is 0660)"},
		"others may write":      {func(t *testing.T, dir string) { mode(t, dir+"/a/b/file", 0o606) }, "a/b/file", "(its mode is 0606)"},
		"others may replace":    {func(t *testing.T, dir string) { mode(t, dir+"/a", 0o777) }, "a/b/file", "a\" can be written to by others (its mode is 0777)"},
		"a sticky file":         {func(t *testing.T, dir string) { mode(t, dir+"/a/b/file", 0o602|fs.ModeSticky) }, "a/b/file", "can be written to"},
		"another's link":        {func(t *testing.T, dir string) { symlink(t, "b/file", dir+"/a/l", other) }, "a/l", `a/l" belongs to`},
		"a link through another's": {func(t *testing.T, dir string) {
			symlink(t, dir+"/a/b", dir+"/c/l", 0)
			give(t, dir+"/c", other)
		}, "c/l/file", `c" belongs to`},
		"a link out of another's": {func(t *testing.T, dir string) {
			symlink(t, "../c/file", dir+"/a/l", 0)
			give(t, dir+"/c", other)
		}, "a/l", `c" belongs to`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for _, d := range []string{"a/b", "c"} {
				if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, d, "file"), []byte("x"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if tc.spoil != nil {
				tc.spoil(t, dir)
			}
			file, suspect, err := OpenTrusted(dir + "/" + tc.path)
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			if (suspect == "") != (tc.suspect == "") || !strings.Contains(suspect, tc.suspect) {
				t.Errorf("suspect since %q, want %q", suspect, tc.suspect)
			}
			if content, err := os.ReadFile(file.Name()); err != nil || string(content) != "x" {
				t.Errorf("content %q, %v", content, err)
			}
		})
	}
}

func TestTrustRefuses(t *testing.T) {
	dir := t.TempDir()
	symlink(t, "loop", dir+"/loop", os.Geteuid())
	if err := unix.Mkfifo(dir+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{
		"none": fs.ErrNotExist, "loop": unix.ELOOP, "": unix.EISDIR, "fifo": ErrNotRegular, "fifo/x": unix.ENOTDIR, "../../../../../../../../dev/zero": ErrNotRegular,
	} {
		if _, _, err := OpenTrusted(dir + "/" + path); !errors.Is(err, want) {
			t.Errorf("%s: error %v, want %v", path, err, want)
		}
	}
}

func give(t *testing.T, path string, uid int) {
	t.Helper()
	if err := os.Lchown(path, uid, uid); err != nil {
		t.Fatal(err)
	}
}

func mode(t *testing.T, path string, mode fs.FileMode) {
	t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func symlink(t *testing.T, target, path string, uid int) {
	t.Helper()
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	give(t, path, uid)
}
