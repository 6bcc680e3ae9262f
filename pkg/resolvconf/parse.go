package resolvconf

import (
	"bytes"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// File is the content of a resolv.conf(5).
type File struct {
	// Nameservers in the order of the file, with their zones, as written:
	// duplicates, loopback and unspecified addresses included.
	Nameservers []netip.Addr
	// Search is the list of the last "search" or "domain" line, which override
	// each other; SearchKeyword says which of the two it was.
	Search        []string
	SearchKeyword string
	// Options are the words of all "options" lines, which add up.
	Options []string
	// Sortlist are the operands of all "sortlist" lines, as written.
	Sortlist []string
	// Comments are the comment lines with their leading character.
	Comments []string
	// Skipped lists what glibc wouldn't use either, and why.
	Skipped []Skip
}

// Skip is a part of the input that was not used.
type Skip struct {
	Line   int    // from 1; 0 if it isn't from a line of a file
	Text   string // at most maxSkipText bytes of it
	Reason string
}

func (s Skip) String() string {
	if s.Line == 0 {
		return fmt.Sprintf("%s: %s", s.Text, s.Reason)
	}
	return fmt.Sprintf("line %d: %q: %s", s.Line, s.Text, s.Reason)
}

const (
	maxSkipText = 80
	// maxSkips bounds the list for a file of binary junk.
	maxSkips = 50
)

// MaxSize is the largest file, in bytes, that is taken over.
const MaxSize = 1 << 20

// Parse reads data as glibc's res_init(3) does (resolv/res_init.c): a keyword
// counts only at the very start of a line, in lower case and followed by a
// space or tab; a line ends at a NUL; "nameserver" takes one word, up to a
// blank, '#' or ';', and an IPv4 address in any form of inet_aton(3). In one
// thing it takes more than glibc, to which a carriage return is a part of the
// word before: it ends a line, because files of that kind exist and the intent
// is plain. It never fails: what it can't use is listed in Skipped.
func Parse(data []byte) File {
	var f File
	for n := 1; len(data) > 0; n++ {
		line, rest, _ := bytes.Cut(data, []byte{'\n'})
		data = rest
		f.line(n, string(line))
	}
	return f
}

func (f *File) skip(n int, text, reason string) {
	if len(f.Skipped) == maxSkips {
		text, reason = "", fmt.Sprintf("more than %d lines can't be used; the others are not listed", maxSkips)
	} else if len(f.Skipped) > maxSkips {
		return
	}
	if len(text) > maxSkipText {
		text = text[:maxSkipText]
	}
	f.Skipped = append(f.Skipped, Skip{n, text, reason})
}

// Retries says how a stub resolver asks by the options of the file, those of
// resolv.conf(5) within glibc's bounds: how long it waits for one answer, how
// often it asks a server, and whether it spreads its queries over them. 0 is
// its default.
func (f File) Retries() (timeout time.Duration, attempts int, rotate bool) {
	for _, o := range f.Options {
		name, value, _ := strings.Cut(o, ":")
		n, err := strconv.Atoi(value)
		switch {
		case o == "rotate":
			rotate = true
		case err != nil: // not one of the two, or it has no meaning
		case name == "timeout":
			timeout = time.Duration(min(max(n, 1), 30)) * time.Second // RES_MAXRETRANS
		case name == "attempts":
			attempts = min(max(n, 1), 5) // RES_MAXRETRY
		}
	}
	return timeout, attempts, rotate
}

const blanks = " \t"

func (f *File) line(n int, line string) {
	if before, after, found := strings.Cut(line, "\x00"); found {
		f.skip(n, after, "after a NUL byte, which ends the line")
		line = before
	}
	line, after, _ := strings.Cut(line, "\r")
	if strings.Trim(after, "\r"+blanks) != "" {
		f.skip(n, after, "after a carriage return, which ends the line")
	}
	if line == "" {
		return
	}
	if line[0] == '#' || line[0] == ';' {
		f.Comments = append(f.Comments, line)
		return
	}
	keyword, operand := line, ""
	if i := strings.IndexAny(line, blanks); i >= 0 {
		keyword, operand = line[:i], strings.Trim(line[i:], blanks)
	}
	switch keyword {
	case "nameserver", "search", "domain", "options", "sortlist":
		if operand == "" {
			f.skip(n, line, "nothing after the keyword")
			return
		}
	}
	switch keyword {
	case "nameserver":
		f.nameserver(n, operand)
	case "search":
		f.Search, f.SearchKeyword = strings.FieldsFunc(operand, isBlank), keyword
	case "domain":
		// One word only; "domain" replaces "search" and the other way round.
		words := strings.FieldsFunc(operand, isBlank)
		f.Search, f.SearchKeyword = words[:1], keyword
		if len(words) > 1 {
			f.skip(n, strings.Join(words[1:], " "), "domain takes one name")
		}
	case "options":
		f.Options = append(f.Options, strings.FieldsFunc(operand, isBlank)...)
	case "sortlist":
		f.Sortlist = append(f.Sortlist, operand)
	case "": // A line that starts with a blank.
		switch {
		case operand == "" || operand[0] == '#' || operand[0] == ';':
		default:
			f.skip(n, line, "a keyword must be at the start of the line")
		}
	default:
		switch {
		case strings.HasPrefix(line, "\xef\xbb\xbf"):
			f.skip(n, line, "starts with a byte order mark, which is not part of a keyword")
		case isKeyword(strings.ToLower(keyword)):
			f.skip(n, line, "keywords are lower case")
		default:
			f.skip(n, line, "unknown keyword")
		}
	}
}

func isBlank(r rune) bool { return r == ' ' || r == '\t' }

func isKeyword(s string) bool {
	switch s {
	case "nameserver", "search", "domain", "options", "sortlist":
		return true
	}
	return false
}

func (f *File) nameserver(n int, operand string) {
	word := operand
	if i := strings.IndexAny(word, "#; \t"); i >= 0 {
		word = word[:i]
	}
	if a, ok := parseAton(word); ok {
		f.Nameservers = append(f.Nameservers, a)
		return
	}
	a, err := netip.ParseAddr(word)
	if err != nil {
		reason := "not an IP address"
		if strings.HasPrefix(word, "[") {
			reason = "an address with a port or in brackets is not allowed here"
		}
		f.skip(n, operand, reason)
		return
	}
	f.Nameservers = append(f.Nameservers, a)
}

// parseAton is inet_aton(3): one to four numbers, decimal, octal or
// hexadecimal, of which the last fills all bytes that are left ("10.1" is
// 10.0.0.1). glibc reads nameservers so.
func parseAton(s string) (netip.Addr, bool) {
	parts := strings.Split(s, ".")
	if len(parts) > 4 {
		return netip.Addr{}, false
	}
	var addr uint64
	for i, p := range parts {
		last := i == len(parts)-1
		limit := uint64(0xff)
		if last {
			limit = 1<<(8*(5-len(parts))) - 1
		}
		v, ok := parseAtonPart(p)
		if !ok || v > limit {
			return netip.Addr{}, false
		}
		if last {
			addr |= v
		} else {
			addr |= v << (24 - 8*i)
		}
	}
	return netip.AddrFrom4([4]byte{byte(addr >> 24), byte(addr >> 16), byte(addr >> 8), byte(addr)}), true
}

func parseAtonPart(p string) (uint64, bool) {
	// Not base 0 of ParseUint, which would take 0b, 0o and underscores.
	digits, base := p, 10
	switch {
	case len(p) > 2 && (p[:2] == "0x" || p[:2] == "0X"):
		digits, base = p[2:], 16
	case len(p) > 1 && p[0] == '0':
		digits, base = p[1:], 8
	}
	if digits == "" {
		return 0, false
	}
	v, err := strconv.ParseUint(digits, base, 32)
	return v, err == nil
}
