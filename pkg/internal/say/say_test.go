package say

import (
	"encoding/json"
	"errors"
	"testing"
	"unicode"
)

func TestCount(t *testing.T) {
	for want, got := range map[string]string{
		"0 endpoints": Count(0, "endpoint"), "1 endpoint": Count(1, "endpoint"), "2 endpoints": Count(uint64(2), "endpoint"),
		"1 query": Count(1, "query"), "3 queries": Count(3, "query"),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"plain, ünïcode – 名 \\ \"":  "plain, ünïcode – 名 \\ \"",
		"\x1b]0;title\a\x1b[2J":     `\x1b]0;title\x07\x1b[2J`,
		"a\nb\tc\rd\x00":            "a\\nb\tc\\x0dd\\x00",
		"\x7f\u009b31m\u202e\ufeff": `\u007f\u009b31m\u202e\ufeff`,
		"\xff\x9b \U000e0001":       `\xff\x9b \udb40\udc01`,
		"\ufffd":                    "\ufffd",
	} {
		if got := Printable(text, "\t"); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func FuzzPrintable(f *testing.F) {
	f.Add("\x1b[2J\n")
	f.Add("\xff\u2028")
	f.Fuzz(func(t *testing.T, text string) {
		got := Printable(text, "\n\t")
		for _, r := range got {
			if r != '\n' && r != '\t' && !unicode.IsPrint(r) {
				t.Errorf("%q: %q", text, got)
			}
		}
		quoted, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		var before, after string
		if err := errors.Join(json.Unmarshal(quoted, &before), json.Unmarshal([]byte(Printable(string(quoted), "")), &after)); err != nil || before != after {
			t.Errorf("%q in JSON: %q, %q: %v", text, before, after, err)
		}
	})
}
