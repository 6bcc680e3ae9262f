package say

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Printable is a text of others as it may reach a terminal or a log: what is not printable, and not in keep, is written as
// an escape of Go and, above ASCII, of JSON. So nobody's name clears a screen, sets its title, or begins a line.
func Printable(text, keep string) string {
	plain := func(r rune, size int) bool {
		return unicode.IsPrint(r) && (r != utf8.RuneError || size > 1) || strings.ContainsRune(keep, r)
	}
	var b strings.Builder
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRuneInString(text[i:])
		switch {
		case plain(r, size):
			b.WriteString(text[i : i+size])
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r < 0x7f:
			fmt.Fprintf(&b, `\x%02x`, r)
		default:
			for _, unit := range utf16.AppendRune(nil, r) {
				fmt.Fprintf(&b, `\u%04x`, unit)
			}
		}
		i += size
	}
	return b.String()
}
