package discovery

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/coredns/caddy/caddyfile"
)

// corefileName stands for the file in the parser's messages.
const corefileName = "Corefile"

// masked marks what only CoreDNS itself can know: an environment variable of its
// container, a quoted text. It is of a private use area of Unicode, so that no
// zone has it.
const masked = "\uE000"

// Bounds of what snippets may expand to. A real Corefile has some hundred tokens.
const (
	maxCorefileTokens = 100_000
	maxSnippetDepth   = 16
)

var errCorefileTooLarge = fmt.Errorf("snippets import each other more than %d deep, or become more than %d words", maxSnippetDepth, maxCorefileTokens)

// serverBlock is one server of a Corefile.
type serverBlock struct {
	keys    []string              // as written: zone, with or without scheme and port
	plugins map[string][][]string // the arguments of each use of a plugin
}

// corefile is what a Corefile says, as far as it can be seen from here.
type corefile struct {
	blocks  []serverBlock
	imports []string // files that it imports: they are in CoreDNS's container
}

// parseCorefile reads a Corefile with the parser that CoreDNS uses.
//
// Two things of that parser must not happen here, since the text describes a file
// in another file system and another environment: that it imports files of this
// host, and that it puts variables of this process in. So snippets are expanded
// first, imports of files are left out and remembered, and variables are masked.
func parseCorefile(text string) (*corefile, error) {
	words := lexCorefile(text)
	x := expander{snippets: make(map[string][]word)}
	if err := x.expand(words, 0); err != nil {
		return nil, fmt.Errorf("%s: %w", corefileName, err)
	}
	parsed, err := caddyfile.Parse(corefileName, bytes.NewReader(render(x.out)), nil)
	if err != nil {
		return nil, oneLine(err)
	}
	if len(parsed) == 0 {
		return nil, fmt.Errorf("%s: no server block", corefileName)
	}
	c := &corefile{imports: x.imports}
	for _, p := range parsed {
		b := serverBlock{keys: p.Keys, plugins: make(map[string][][]string)}
		for plugin, tokens := range p.Tokens {
			b.plugins[plugin] = pluginUses(tokens)
		}
		c.blocks = append(c.blocks, b)
	}
	return c, nil
}

// pluginUses splits the tokens of a plugin, of all its uses in a block, into the
// arguments of each. What is in braces is left out.
func pluginUses(tokens []caddyfile.Token) [][]string {
	var uses [][]string
	depth, line := 0, 0
	for _, t := range tokens {
		switch {
		case t.Text == "{":
			depth++
		case t.Text == "}":
			depth--
		case depth > 0:
		case t.Line != line:
			line = t.Line
			uses = append(uses, []string{}) // t is the plugin's name
		default:
			uses[len(uses)-1] = append(uses[len(uses)-1], t.Text)
		}
	}
	return uses
}

// word is a token of the Corefile and where it stands.
type word struct {
	text  string
	line  int
	first bool // of its line
}

// lexCorefile splits the text, and masks what is not to be interpreted.
func lexCorefile(text string) []word {
	var words []word
	end := 0 // line on which the last word ends
	d := caddyfile.NewDispenser(corefileName, strings.NewReader(text))
	for d.Next() {
		words = append(words, word{text: mask(d.Val()), line: d.Line(), first: d.Line() != end})
		end = d.Line() + strings.Count(d.Val(), "\n")
	}
	return words
}

// mask makes a token one plain word that the parser does not replace.
func mask(token string) string {
	if token == "" || strings.ContainsAny(token, "\"#") || len(strings.Fields(token)) != 1 || strings.TrimSpace(token) != token {
		return masked
	}
	return strings.NewReplacer("{$", "{"+masked+"$", "{%", "{"+masked+"%").Replace(token)
}

// expander replaces imports of snippets by their words.
type expander struct {
	snippets map[string][]word
	imports  []string
	out      []word
}

func (x *expander) expand(words []word, depth int) error {
	if depth > maxSnippetDepth {
		return errCorefileTooLarge
	}
	braces := 0
	for i := 0; i < len(words); i++ {
		w := words[i]
		if name, ok := snippetName(words, i); ok && depth == 0 && braces == 0 {
			end := closingBrace(words, i+1)
			if end < 0 {
				return fmt.Errorf("line %d: snippet (%s) has no end", w.line, name)
			}
			x.snippets[name] = words[i+2 : end]
			i = end
			continue
		}
		if w.text == "import" && (w.first || i > 0 && words[i-1].text == "{") && i+1 < len(words) && !words[i+1].first {
			i++
			if err := x.include(words[i], depth); err != nil {
				return err
			}
			continue
		}
		switch w.text {
		case "{":
			braces++
		case "}":
			braces--
		case "import": // of nothing, or an argument
			w.text = masked
		}
		if x.out = append(x.out, w); len(x.out) > maxCorefileTokens {
			return errCorefileTooLarge
		}
	}
	return nil
}

// include puts in what an import names.
func (x *expander) include(name word, depth int) error {
	snippet, ok := x.snippets[name.text]
	if !ok {
		x.imports = append(x.imports, name.text)
		return nil
	}
	start := len(x.out)
	if err := x.expand(snippet, depth+1); err != nil {
		return err
	}
	if len(x.out) > start {
		x.out[start].first = true
	}
	return nil
}

// snippetName reports whether the definition of a snippet begins at i.
func snippetName(words []word, i int) (string, bool) {
	if !words[i].first || i+1 >= len(words) || words[i+1].text != "{" {
		return "", false
	}
	name, opens := strings.CutPrefix(words[i].text, "(")
	name, closes := strings.CutSuffix(name, ")")
	return name, opens && closes
}

// closingBrace returns the index of the brace that closes the one at open, -1 if
// there is none.
func closingBrace(words []word, open int) int {
	depth := 0
	for i := open; i < len(words); i++ {
		switch words[i].text {
		case "{":
			depth++
		case "}":
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return -1
}

// render writes the words as text again, on the lines that they were on as far as
// no snippet has moved them: the parser's messages name lines.
func render(words []word) []byte {
	var b bytes.Buffer
	line := 1
	for i, w := range words {
		switch {
		case w.first:
			breaks := max(w.line-line, 1)
			if i == 0 {
				breaks = w.line - line
			}
			b.WriteString(strings.Repeat("\n", breaks))
			line += breaks
		case i > 0:
			b.WriteByte(' ')
		}
		b.WriteString(w.text)
	}
	return b.Bytes()
}
