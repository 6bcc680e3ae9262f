package discovery

import (
	"bytes"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/coredns/caddy/caddyfile"
)

// corefileName stands for the file in the parser's messages.
const corefileName = "Corefile"

// masked marks what only CoreDNS itself can know: an environment variable of its
// container, a quoted text. It is of a private use area of Unicode, so that no
// zone has it.
const masked = "\uE000"

// Bounds of what a Corefile may cost. A real one has some hundred words and a handful of zones; what costs more is
// refused, since it is read on every host that follows the cluster.
const (
	maxCorefileBytes = 1 << 20 // all files together; the API's bound of an object is about the same
	maxCorefileWords = 100_000 // looked at while imports are expanded, however often
	maxImportDepth   = 16
	maxCorefileZones = 1024
)

var errCorefileTooLarge = fmt.Errorf("it is too large, or its imports are: at most %d octets, %d words when expanded, %d imports in each other and %d zones",
	maxCorefileBytes, maxCorefileWords, maxImportDepth, maxCorefileZones)

// serverBlock is one server of a Corefile.
type serverBlock struct {
	keys    []string               // as written: zone, with or without scheme and port
	plugins map[string][]pluginUse // by name
}

// pluginUse is one use of a plugin.
type pluginUse struct {
	args       []string
	directives [][]string // the lines of its braces
}

// directive returns the arguments of its first line in braces that begins with name.
func (u pluginUse) directive(name string) (args []string, ok bool) {
	for _, d := range u.directives {
		if d[0] == name {
			return d[1:], true
		}
	}
	return nil, false
}

// corefile is what a Corefile says, as far as it can be seen from here.
type corefile struct {
	blocks  []serverBlock
	imports []string // files that it imports and that can't be seen
}

// corefilePath is where a Corefile is by default in CoreDNS's container, for what it imports.
const corefilePath = "/etc/coredns/" + corefileName

// container are the files that CoreDNS's container sees, as far as they are known.
type container struct {
	files map[string]string   // by absolute path
	dirs  map[string]struct{} // whose files are all known
}

// match returns the paths that an import means, in their order, and whether that is known (filepath.Glob and CoreDNS's
// parser agree with path.Match on what is allowed there).
func (c container) match(pattern string) (paths []string, known bool) {
	for file := range c.files {
		if ok, err := path.Match(pattern, file); err == nil && ok {
			paths = append(paths, file)
		}
	}
	slices.Sort(paths)
	for dir := range c.dirs {
		if ok, err := path.Match(path.Dir(pattern), dir); err == nil && ok {
			known = true
		}
	}
	return paths, known || len(paths) > 0
}

// parseCorefile reads the Corefile at a path with the parser that CoreDNS uses.
//
// Two things of that parser must not happen here, since the text describes a file
// in another file system and another environment: that it imports files of this
// host, and that it puts variables of this process in. So imports are expanded
// first, from the files that are known; others are left out and remembered, and
// variables are masked.
func parseCorefile(text, at string, in container) (*corefile, error) {
	x := expander{snippets: make(map[string][]word), container: in}
	words, err := x.lex(text)
	if err == nil {
		err = x.expand(words, path.Dir(at), 0, true)
	}
	if err != nil {
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
		b := serverBlock{keys: p.Keys, plugins: make(map[string][]pluginUse)}
		for plugin, tokens := range p.Tokens {
			b.plugins[plugin] = pluginUses(tokens)
		}
		c.blocks = append(c.blocks, b)
	}
	return c, nil
}

// pluginUses splits the tokens of a plugin, of all its uses in a block, into each.
// What is in braces within braces is left out.
func pluginUses(tokens []caddyfile.Token) []pluginUse {
	var uses []pluginUse
	depth, line := 0, 0
	for _, t := range tokens {
		switch {
		case len(uses) > 0 && t.Text == "{":
			depth++
			line = t.Line
		case len(uses) > 0 && t.Text == "}":
			depth--
			line = t.Line
		case depth > 1:
		case depth == 1 && t.Line != line:
			line = t.Line
			u := &uses[len(uses)-1]
			u.directives = append(u.directives, []string{t.Text})
		case depth == 1:
			if d := uses[len(uses)-1].directives; len(d) > 0 {
				d[len(d)-1] = append(d[len(d)-1], t.Text)
			}
		case t.Line != line:
			line = t.Line
			uses = append(uses, pluginUse{args: []string{}}) // t is the plugin's name
		default:
			u := &uses[len(uses)-1]
			u.args = append(u.args, t.Text)
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

// lex splits a file, and masks what is not to be interpreted.
func (x *expander) lex(text string) ([]word, error) {
	if x.octets += len(text); x.octets > maxCorefileBytes {
		return nil, errCorefileTooLarge
	}
	var words []word
	end := 0 // line on which the last word ends
	d := caddyfile.NewDispenser(corefileName, strings.NewReader(text))
	for d.Next() {
		words = append(words, word{text: mask(d.Val()), line: d.Line(), first: d.Line() != end})
		end = d.Line() + strings.Count(d.Val(), "\n")
	}
	return words, nil
}

// mask makes a token one plain word that the parser does not replace.
func mask(token string) string {
	if token == "" || strings.ContainsAny(token, "\"#") || len(strings.Fields(token)) != 1 || strings.TrimSpace(token) != token {
		return masked
	}
	return strings.NewReplacer("{$", "{"+masked+"$", "{%", "{"+masked+"%").Replace(token)
}

// expander replaces imports by the words that they name.
type expander struct {
	container
	snippets map[string][]word
	imports  []string
	out      []word
	octets   int
	words    int // looked at
}

// expand adds words of a file in dir. Only at the top of a file there can be snippets.
func (x *expander) expand(words []word, dir string, depth int, top bool) error {
	if depth > maxImportDepth {
		return errCorefileTooLarge
	}
	braces := 0
	for i := 0; i < len(words); i++ {
		// Every word counts that is looked at, not only those that are put out: an import of nothing costs too.
		if x.words++; x.words > maxCorefileWords {
			return errCorefileTooLarge
		}
		w := words[i]
		if name, ok := snippetName(words, i); ok && top && braces == 0 {
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
			if i+1 < len(words) && !words[i+1].first {
				return fmt.Errorf("line %d: import takes one argument", w.line)
			}
			if err := x.include(words[i].text, dir, depth, top && braces == 0); err != nil {
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
		x.out = append(x.out, w)
	}
	return nil
}

// include puts in what an import names.
func (x *expander) include(name, dir string, depth int, top bool) error {
	start := len(x.out)
	if snippet, ok := x.snippets[name]; ok {
		if err := x.expand(snippet, dir, depth+1, false); err != nil {
			return err
		}
		x.beginLine(start)
		return nil
	}
	pattern := name
	if !path.IsAbs(pattern) {
		pattern = path.Join(dir, pattern)
	}
	files, known := x.match(pattern)
	if !known {
		x.imports = append(x.imports, name)
	}
	for _, file := range files {
		words, err := x.lex(x.files[file])
		if err != nil {
			return err
		}
		start := len(x.out)
		if err := x.expand(words, path.Dir(file), depth+1, top); err != nil {
			return err
		}
		x.beginLine(start)
	}
	return nil
}

// beginLine puts the word at i on a line of its own: what was imported stood on one.
func (x *expander) beginLine(i int) {
	if i < len(x.out) {
		x.out[i].first = true
	}
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
