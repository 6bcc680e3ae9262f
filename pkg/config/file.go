package config

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
)

// maxFile bounds a configuration file, in bytes.
const maxFile = 1 << 20

// Load returns the defaults, changed by the file at path. A missing file is an error only if it is required: the one at
// DefaultFile is optional, one that the user named is not. Errors name file, line and key; beside one come the settings as
// far as the file is good.
func Load(ctx context.Context, path string, required bool) (Config, error) {
	c := Default()
	data, err := safefile.ReadFile(ctx, path, maxFile)
	if errors.Is(err, os.ErrNotExist) && !required {
		return c, nil
	}
	if err != nil {
		return c, fmt.Errorf("read configuration: %w: name a file that can be read, or leave --config out", err)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var document, second yaml.Node
	if err := decoder.Decode(&document); err != nil && !errors.Is(err, io.EOF) {
		return c, fmt.Errorf("configuration %s: %w: %w", path, ErrInvalid, err)
	}
	if err := c.applyKeys(document); err != nil {
		return c, fmt.Errorf("configuration %s: %w", path, err)
	}
	if err := decoder.Decode(&second); !errors.Is(err, io.EOF) {
		return c, fmt.Errorf("configuration %s: line %d: %w: a second document, which nobody reads: write one", path, second.Line, ErrInvalid)
	}
	return c, nil
}

// applyKeys applies the keys one by one: an error then names its key, also one that Validate finds. The error is the first one;
// a bad key changes nothing.
func (c *Config) applyKeys(document yaml.Node) (first error) {
	if len(document.Content) == 0 || document.Content[0].Tag == "!!null" {
		return nil
	}
	if top := document.Content[0]; top.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: %w: write keys with values, such as logLevel: debug", top.Line, ErrInvalid)
	}
	seen := make(map[string]int)
	pairs := document.Content[0].Content
	for i := 0; i+1 < len(pairs); i += 2 {
		key := pairs[i]
		if line, twice := seen[key.Value]; twice {
			first = cmp.Or(first, fmt.Errorf("line %d: key %s: %w: it is in line %d already", key.Line, say.Printable(key.Value, ""), ErrInvalid, line))
			continue
		}
		seen[key.Value] = key.Line
		first = cmp.Or(first, c.applyKey(key, pairs[i+1]))
	}
	return first
}

// applyKey sets what one key says. A key without a value, as in "zones:", says nothing.
func (c *Config) applyKey(key, value *yaml.Node) error {
	setting, known := Find(key.Value)
	if !known {
		return unknownKey(key)
	}
	if value.Tag == "!!null" {
		return nil
	}
	next := *c
	line, err := setting.decode(&next, value)
	if err == nil {
		line, err = key.Line, next.Validate()
	}
	if err != nil {
		return fmt.Errorf("line %d: key %s: %w", line, key.Value, oneLine(err))
	}
	*c = next
	return nil
}

// maxKey is more than any key has, in octets.
const maxKey = 64

// unknownKey names the nearest key that there is, if one is near.
func unknownKey(key *yaml.Node) error {
	best, lowered := "", make(map[string]string)
	for _, known := range keys() {
		lowered[strings.ToLower(known)] = known
	}
	if len(key.Value) <= maxKey {
		best = lowered[say.Nearest(strings.ToLower(key.Value), slices.Sorted(maps.Keys(lowered)))]
	}
	hint := "this version has no such key"
	if best != "" {
		hint = "did you mean " + best + "?"
	}
	return fmt.Errorf("line %d: unknown key %s: %w: %s", key.Line, say.Printable(key.Value, ""), ErrInvalid, hint)
}

// oneLine joins the lines of a YAML error, which has one for each fault, without their numbers.
func oneLine(err error) error {
	var faults *yaml.TypeError
	if !errors.As(err, &faults) {
		return err
	}
	texts := make([]string, 0, len(faults.Errors))
	for _, text := range faults.Errors {
		if _, fault, ok := strings.Cut(text, ": "); ok && strings.HasPrefix(text, "line ") {
			text = fault
		}
		texts = append(texts, text)
	}
	return fmt.Errorf("%w: %s", ErrInvalid, say.Printable(strings.Join(texts, "; "), ""))
}
