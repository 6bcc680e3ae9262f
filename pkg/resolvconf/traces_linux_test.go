package resolvconf

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestTracesDoNotStay: whoever edits our file, and however, our lines are not in what detach leaves: not when the edit was
// taken for the original meanwhile, and not when detach comes first.
func TestTracesDoNotStay(t *testing.T) {
	const (
		before = "# by hand\nnameserver 192.0.2.1\nsearch corp.example\noptions edns0\n"
		rest   = "search corp.example\noptions edns0\n"
	)
	replace := func(pairs ...string) func(string) string { return strings.NewReplacer(pairs...).Replace }
	sed := replace("nameserver 127.0.0.1", "nameserver 198.51.100.7")
	crlf := replace("\n", "\r\n")
	for name, test := range map[string]struct {
		edit func(ours string) string
		want string
	}{
		"sed":                   {sed, "# by hand\nnameserver 198.51.100.7\n" + rest},
		"sed, twice":            {func(ours string) string { return sed(ours) + "# again\n" }, "# by hand\nnameserver 198.51.100.7\n" + rest + "# again\n"},
		"line ends":             {func(ours string) string { return crlf(sed(ours)) }, crlf("# by hand\nnameserver 198.51.100.7\n" + rest)},
		"put before ours":       {func(ours string) string { return "# vpn\nnameserver 198.51.100.7\n" + ours }, "# vpn\nnameserver 198.51.100.7\n# by hand\n" + rest},
		"put behind ours":       {func(ours string) string { return ours + "nameserver 198.51.100.7\n" }, "# by hand\n" + rest + "nameserver 198.51.100.7\n"},
		"other comments":        {func(ours string) string { return replace("# ", ";;  ")(sed(ours)) }, ";;  by hand\nnameserver 198.51.100.7\n" + rest},
		"blanks":                {func(ours string) string { return replace("  ", " ", "   ", "\t", "\n", " \n")(sed(ours)) }, replace("\n", " \n")("# by hand\nnameserver 198.51.100.7\n" + rest)},
		"without the first":     {func(ours string) string { _, ours, _ = strings.Cut(sed(ours), "\n"); return ours }, "# by hand\nnameserver 198.51.100.7\n" + rest},
		"without most comments": {func(ours string) string { return sed(ours[strings.Index(ours, "# By hand:"):]) }, "# by hand\nnameserver 198.51.100.7\n" + rest},
		"servers alone":         {func(string) string { return "nameserver 198.51.100.7\nnameserver 127.0.0.1\n" }, "nameserver 198.51.100.7\n"},
		"a comment like ours": {
			func(string) string {
				return "# Original: 192.0.2.1\n# By hand: me\n# Attach id: 7\nnameserver 198.51.100.7\n"
			},
			"# Original: 192.0.2.1\n# By hand: me\n# Attach id: 7\nnameserver 198.51.100.7\n",
		},
	} {
		for _, renamed := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				h := newHost(t)
				write(t, h.path, before)
				attach := func() { must(t, h.manager(t, nil).TakeOver(ask)) }
				edit := func() {
					text := test.edit(readFile(t, h.path))
					path := h.path
					if renamed {
						path = filepath.Join(h.etc, "sed")
					}
					write(t, path, text)
					must(t, os.Chmod(path, 0o640))
					must(t, os.Rename(path, h.path))
				}
				check := func(want string) {
					t.Helper()
					if diff := cmp.Diff(want, readFile(t, h.path)); diff != "" {
						t.Error(diff)
					}
					if mode := stat(t, h.path).Mode; mode != 0o640 {
						t.Errorf("mode %v", mode)
					}
				}
				attach()
				edit()
				out, err := h.manager(t, nil).Restore()
				must(t, err)
				if out.Result != LeftForeign {
					t.Errorf("detach at once: %+v", out)
				}
				check(test.want)
				attach()
				attach() // it goes on
				if strings.Count(readFile(t, h.path), commentsFollow) > 1 {
					t.Errorf("ours has our own comments in it:\n%s", readFile(t, h.path))
				}
				_, err = h.manager(t, nil).Restore()
				must(t, err)
				check(test.want)
				h.clean(t)

				write(t, h.path, before)
				attach()
				edit()
				attach() // as the keeper does
				_, err = h.manager(t, nil).Restore()
				must(t, err)
				check(test.want)
				h.clean(t)
			})
		}
	}
}

// TestTracesFromBefore: a file that an earlier version left so.
func TestTracesFromBefore(t *testing.T) {
	h := newHost(t)
	write(t, h.path, two)
	must(t, h.manager(t, nil).TakeOver(ask))
	left := strings.Replace(readFile(t, h.path), "nameserver 127.0.0.1", "nameserver 198.51.100.7", 1)
	other := newHost(t)
	write(t, other.path, left)
	must(t, other.manager(t, nil).TakeOver(ask))
	_, err := other.manager(t, nil).Restore()
	must(t, err)
	if got := readFile(t, other.path); strings.Contains(got, "k2s-dnsbpf") || !strings.Contains(got, "198.51.100.7") {
		t.Error(got)
	}
	other.clean(t)
}

// TestOwnAddressFromBefore: an address that the host had before us is the host's.
func TestOwnAddressFromBefore(t *testing.T) {
	h := newHost(t)
	write(t, h.path, "nameserver 127.0.0.1\nnameserver 192.0.2.1\n")
	must(t, h.manager(t, nil).TakeOver(ask))
	const theirs = "nameserver 127.0.0.1\nnameserver 192.0.2.9\n"
	write(t, h.path, theirs)
	_, err := h.manager(t, nil).Restore()
	must(t, err)
	if got := readFile(t, h.path); got != theirs {
		t.Errorf("%q", got)
	}
}
