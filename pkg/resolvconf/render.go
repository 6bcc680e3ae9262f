package resolvconf

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
)

const (
	// headerLine is the stable first line of our file.
	headerLine = "# k2s-dnsbpf: temporary resolver configuration, here only while it is attached."
	// sumPrefix starts the line with the checksum of all other lines. It tells
	// whether a file is ours, unchanged, when the journal is lost.
	sumPrefix = "# checksum: sha256:"
	// createdMark stands in the header if there was no file before ours.
	createdMark = "# Original:  none, there was no such file."
	// Further lines of the header, without the comment character.
	dontEdit       = "Don't edit: changes are lost at detach."
	commentsFollow = "Comments of the original:"

	// ParkedName is where the original lies while ours is in place, in the
	// same directory. Before the swap, for an instant, ours is made there.
	ParkedName = ".resolv.conf.k2s-dnsbpf-original"

	// maxNameservers is MAXNS of resolv.h: a resolver reads no more.
	maxNameservers = 3
)

// byHand is how somebody gets the original back without this program.
type byHand struct {
	parked  string // "" if there was no file before
	command string
}

// rendering is what our file is made of.
type rendering struct {
	path        string // absolute
	undo        byHand
	attachID    string
	serial      int // of the original
	version     string
	nameservers []netip.Addr
	base        File // search, options and sortlist are carried over from it
}

// render makes our file. What it returns parses back to the same nameservers,
// or it fails: a file that no resolver can read must never be installed.
func (r rendering) render() ([]byte, error) {
	if len(r.nameservers) == 0 || len(r.nameservers) > maxNameservers {
		return nil, fmt.Errorf("%s for %s: give 1 to %d", say.Count(len(r.nameservers), "nameserver"), r.path, maxNameservers)
	}
	var b bytes.Buffer
	fmt.Fprintln(&b, headerLine)
	again := ""
	if r.serial > 0 {
		again = fmt.Sprintf(", taken over again %d", r.serial)
	}
	fmt.Fprintf(&b, "# Attach id: %s%s (k2s-dnsbpf %s)\n", r.attachID, again, r.version)
	fmt.Fprintln(&b, "# "+dontEdit)
	fmt.Fprintln(&b, "# Look:      k2s-dnsbpf status")
	fmt.Fprintln(&b, "# Undo:      sudo k2s-dnsbpf detach")
	if r.undo.parked != "" {
		fmt.Fprintf(&b, "# Original:  %s\n", r.undo.parked)
	} else {
		fmt.Fprintln(&b, createdMark)
	}
	fmt.Fprintf(&b, "# By hand:   %s\n", r.undo.command)
	if comments := carriedComments(r.base.Comments); len(comments) > 0 {
		fmt.Fprintln(&b, "# "+commentsFollow)
		for _, c := range comments {
			fmt.Fprintln(&b, c)
		}
	}
	for _, a := range r.nameservers {
		if !a.IsValid() || a.IsUnspecified() {
			return nil, fmt.Errorf("nameserver %v for %s: not an address to ask", a, r.path)
		}
		fmt.Fprintf(&b, "nameserver %s\n", a)
	}
	if len(r.base.Search) > 0 {
		fmt.Fprintf(&b, "%s %s\n", r.base.SearchKeyword, strings.Join(r.base.Search, " "))
	}
	if o := carriedOptions(r.base.Options); len(o) > 0 {
		fmt.Fprintf(&b, "options %s\n", strings.Join(o, " "))
	}
	for _, s := range r.base.Sortlist {
		fmt.Fprintf(&b, "sortlist %s\n", s)
	}
	data := seal(b.Bytes())
	if got := Parse(data); !slices.Equal(got.Nameservers, r.nameservers) {
		return nil, errors.New("the file made for " + r.path + " doesn't read back as it should")
	}
	return data, nil
}

// maxComments bounds what is carried over, in lines.
const maxComments = 50

// carriedComments are a person's. A manager's say that the file is its own,
// which ours is not, and other programs would believe it.
func carriedComments(comments []string) []string {
	for _, c := range comments {
		if owner, _ := marked([]byte(c)); owner != "" {
			return nil
		}
	}
	comments = slices.DeleteFunc(slices.Clone(comments), func(c string) bool {
		return strings.Contains(c, "k2s-dnsbpf") || isTrace(c)
	})
	return comments[:min(len(comments), maxComments)]
}

// carriedOptions drops no-reload: a program that starts while our file is in
// place would keep to it after detach. trust-ad stays only because the original
// had it, so the upstreams were trusted with the AD bit before.
func carriedOptions(options []string) []string {
	return slices.DeleteFunc(slices.Clone(options), func(o string) bool { return o == "no-reload" })
}

// seal inserts the checksum as the second line.
func seal(data []byte) []byte {
	first, rest, _ := bytes.Cut(data, []byte{'\n'})
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\n%s%s\n%s", first, sumPrefix, digest(data), rest)
	return b.Bytes()
}

// sealed reports whether data is a file of ours that nobody changed.
func sealed(data []byte) bool {
	lines := bytes.SplitN(data, []byte{'\n'}, 3)
	if len(lines) < 3 || string(lines[0]) != headerLine {
		return false
	}
	sum, ok := bytes.CutPrefix(lines[1], []byte(sumPrefix))
	return ok && string(sum) == digest(slices.Concat(lines[0], []byte{'\n'}, lines[2]))
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// isTrace reports whether a line is one of those that only our file has, whatever has become of its comment character,
// its blanks and its end.
func isTrace(line string) bool {
	text := strings.Join(strings.Fields(strings.TrimLeft(line, "#; \t")), " ")
	if text == strings.TrimSpace(line) {
		return false // no comment
	}
	for _, start := range []string{
		strings.TrimLeft(headerLine, "# "), strings.TrimLeft(sumPrefix, "# "), "Look: k2s-dnsbpf status", "Undo: sudo k2s-dnsbpf detach",
	} {
		if strings.HasPrefix(text, start) {
			return true
		}
	}
	switch {
	case text == dontEdit, text == commentsFollow, text == "Original: none, there was no such file.":
		return true
	case strings.HasPrefix(text, "Attach id: "):
		return strings.Contains(text, "(k2s-dnsbpf ")
	case strings.HasPrefix(text, "Original: "):
		return strings.HasSuffix(text, ParkedName)
	case strings.HasPrefix(text, "By hand: "):
		return strings.Contains(text, ParkedName) || strings.HasPrefix(text, "By hand: rm -f ")
	}
	return false
}
