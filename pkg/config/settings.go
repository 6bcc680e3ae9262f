package config

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Setting is one row of the table from which everything about a setting is made: the key of the file, the flag and its help, the
// default, the check, what a change requires, and the documentation.
type Setting struct {
	Key       string   // in the file, in the journal's copy of the settings and on the control socket
	Flag      string   // on the command line; empty if only the file has it
	Negated   bool     // the flag switches the setting off, as --no-bpf does
	Common    bool     // every command has the flag, not attach alone
	Usage     string   // the meaning, with the placeholder of the value in backquotes
	Otherwise string   // what applies if the setting is not given, if that is not the default value
	Values    []string // all values there are, where they are words
	Example   string   // a value for the documentation, in YAML
	Live      bool     // it can change while attached; else the host has to be detached first
	Anchors   bool     // it locates an attachment: what a dead daemon left elsewhere can't be adopted

	kind    string                                          // as pflag names types: string, bool, duration; list is ours
	assign  func(*Config, []string) error                   // a list takes all texts, anything else the first
	decode  func(*Config, *yaml.Node) (line int, err error) // the line is that of the fault
	reset   func(*Config)                                   // to the default
	display func(Config) string
	check   func(Config) error
}

// Repeated reports whether the setting is a list, whose flag may be given more than once.
func (s Setting) Repeated() bool { return s.kind == "list" }

// Kind is the type of the value as pflag names it: string, bool or duration. That of a list is that of its elements.
func (s Setting) Kind() string {
	if s.Repeated() {
		return "string"
	}
	return s.kind
}

// Assign sets the setting in c from texts as a flag has them: all values of a list, one of anything else. It changes nothing if
// there is an error, which wraps ErrInvalid.
func (s Setting) Assign(c *Config, texts ...string) error { return s.assign(c, texts) }

// Display is the setting's value in c as a flag would have it; that of a list or of an unset address is empty by default.
func (s Setting) Display(c Config) string { return s.display(c) }

// Help is the flag's description.
func (s Setting) Help() string {
	usage := s.Usage
	if len(s.Values) > 0 && !strings.Contains(usage, s.Values[0]) {
		usage += ": " + enumerate(s.Values)
	}
	if s.Repeated() {
		usage += "; may be repeated"
	}
	if s.Otherwise != "" {
		usage += " (default: " + s.Otherwise + ")"
	}
	return usage
}

// Settings returns the table, in the order of the documentation.
func Settings() []Setting { return slices.Clone(table) }

// scalar completes the row of a setting with one value. A check may be nil.
func scalar[T any](s Setting, kind string, field func(*Config) *T, value T, parse func(string) (T, error), check func(string, T) error) Setting {
	s.kind = kind
	if check != nil {
		s.check = func(c Config) error { return check(s.Key, *field(&c)) }
	}
	s.reset = func(c *Config) { *field(c) = value }
	s.display = func(c Config) string { return fmt.Sprint(*field(&c)) }
	s.assign = func(c *Config, texts []string) error {
		parsed, err := parse(texts[0])
		if err == nil {
			*field(c) = parsed
		}
		return err
	}
	s.decode = func(c *Config, node *yaml.Node) (int, error) {
		var text string
		if err := node.Decode(&text); err != nil {
			return node.Line, err
		}
		return node.Line, s.assign(c, []string{text})
	}
	return s
}

// text completes the row of a setting that is any text.
func text(s Setting, field func(*Config) *string, value string, check func(key, value string) error) Setting {
	return scalar(s, "string", field, value, asIs, check)
}

// word completes the row of a setting that is one of a few words.
func word[T ~string](s Setting, field func(*Config) *T, value T, all ...T) Setting {
	for _, one := range all {
		s.Values = append(s.Values, string(one))
	}
	check := func(key string, got T) error {
		if !slices.Contains(all, got) {
			return fmt.Errorf("%s %q: %w: write %s", key, got, ErrInvalid, enumerate(s.Values))
		}
		return nil
	}
	return scalar(s, "string", field, value, func(text string) (T, error) { return T(text), nil }, check)
}

// toggle completes the row of a setting that is on or off.
func toggle(s Setting, field func(*Config) *bool, value bool) Setting {
	s = scalar(s, "bool", field, value, func(text string) (bool, error) {
		parsed, err := strconv.ParseBool(text)
		if err != nil {
			return false, fmt.Errorf("%q: %w: write true or false", text, ErrInvalid)
		}
		return parsed != s.Negated, nil
	}, nil)
	s.decode = func(c *Config, node *yaml.Node) (int, error) { return node.Line, node.Decode(field(c)) } // YAML has words of its own
	return s
}

// number completes the row of a setting that is a count.
func number(s Setting, field func(*Config) *int, value int, check func(string, int) error) Setting {
	return scalar(s, "int", field, value, func(text string) (int, error) {
		parsed, err := strconv.Atoi(text)
		if err != nil {
			return 0, fmt.Errorf("%q: %w: write a whole number", text, ErrInvalid)
		}
		return parsed, nil
	}, check)
}

// duration completes the row of a setting that is a time.
func duration(s Setting, field func(*Config) *time.Duration, value time.Duration, check func(string, time.Duration) error) Setting {
	return scalar(s, "duration", field, value, func(text string) (time.Duration, error) {
		parsed, err := time.ParseDuration(text)
		if err != nil {
			return 0, fmt.Errorf("%q: %w: write a time such as 30s", text, ErrInvalid)
		}
		return parsed, nil
	}, check)
}

// list completes the row of a setting with any number of values, none of them by default.
func list[T any](s Setting, field func(*Config) *[]T, parse func(string) (T, error), check func(key string, value T) error) Setting {
	s.kind = "list"
	s.reset = func(c *Config) { *field(c) = nil }
	s.display = func(c Config) string { return strings.Trim(fmt.Sprint(*field(&c)), "[]") }
	s.assign = func(c *Config, texts []string) error {
		values := make([]T, 0, len(texts))
		for _, text := range texts {
			value, err := parse(text)
			if err != nil {
				return err
			}
			values = append(values, value)
		}
		*field(c) = values
		return nil
	}
	s.decode = func(c *Config, node *yaml.Node) (int, error) {
		var elements []yaml.Node
		if err := node.Decode(&elements); err != nil {
			return node.Line, err
		}
		var texts []string
		for _, element := range elements {
			var text string
			if err := cmp.Or(element.Decode(&text), s.assign(new(Config), []string{text})); err != nil {
				return element.Line, err
			}
			texts = append(texts, text)
		}
		return node.Line, s.assign(c, texts)
	}
	if check == nil {
		return s
	}
	s.check = func(c Config) error {
		for _, value := range *field(&c) {
			if err := check(s.Key, value); err != nil {
				return err
			}
		}
		return nil
	}
	return s
}

// kubeSwitch completes the row of the KubeSwitch address, which may be "none".
func kubeSwitch(s Setting) Setting {
	s = scalar(s, "string", func(c *Config) *netip.Addr { return &c.KubeSwitchAddress }, netip.Addr{}, parseAddress, checkOwn)
	address := s.assign
	s.reset = func(c *Config) { c.KubeSwitchAddress, c.NoKubeSwitch = netip.Addr{}, false }
	s.display = func(c Config) string {
		switch {
		case c.NoKubeSwitch:
			return "none"
		case !c.KubeSwitchAddress.IsValid():
			return ""
		}
		return c.KubeSwitchAddress.String()
	}
	s.assign = func(c *Config, texts []string) error {
		if texts[0] == "none" {
			c.KubeSwitchAddress, c.NoKubeSwitch = netip.Addr{}, true
			return nil
		}
		if err := address(c, texts); err != nil {
			return fmt.Errorf("%w, or none", err)
		}
		c.NoKubeSwitch = false
		return nil
	}
	s.decode = func(c *Config, node *yaml.Node) (int, error) { return node.Line, s.assign(c, []string{node.Value}) }
	return s
}

// enumerate writes "a, b or c".
func enumerate(words []string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// Default returns the default settings.
func Default() (c Config) {
	for _, s := range table {
		s.reset(&c)
	}
	return c
}

// Validate checks the values that can be judged without looking at the host.
func (c Config) Validate() error {
	for _, s := range table {
		if s.check == nil {
			continue
		}
		if err := s.check(c); err != nil {
			return err
		}
	}
	if c.Resolver == ResolverTransparent && !c.BPF {
		return fmt.Errorf("resolver %q: %w: only the kernel can steer past the host's resolver: leave out --no-bpf (bpf: false), or use %q",
			c.Resolver, ErrInvalid, ResolverTakeover)
	}
	return nil
}

// NeedDetach returns the keys of those settings in which two configurations differ and that can't change while attached.
func NeedDetach(now, next Config) (keys []string) {
	return differing(now, next, func(s Setting) bool { return !s.Live })
}

// CanAdopt reports whether what a daemon with the settings old left behind is where a daemon with the settings next would put it.
// Without programs in the kernel there is nothing that keeps working until then.
func CanAdopt(old, next Config) bool {
	return old.BPF && len(differing(old, next, func(s Setting) bool { return s.Anchors })) == 0
}

func differing(a, b Config, of func(Setting) bool) (keys []string) {
	for _, s := range table {
		if of(s) && s.display(a) != s.display(b) {
			keys = append(keys, s.Key)
		}
	}
	slices.Sort(keys)
	return keys
}

// CommonArgs are the arguments that give another process of this program the settings that every command has.
func (c Config) CommonArgs() (args []string) {
	for _, s := range table {
		if s.Common {
			args = append(args, "--"+s.Flag, s.display(c))
		}
	}
	return args
}

// ParseCommonArgs is the other end of CommonArgs: the settings of a process that another one of this program has started.
func ParseCommonArgs(name string, args []string) (Config, error) {
	c := Default()
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard) // the error says it
	for _, s := range table {
		if s.Common {
			flags.Func(s.Flag, "", func(text string) error { return s.Assign(&c, text) })
		}
	}
	if err := flags.Parse(args); err != nil {
		return c, err
	}
	return c, c.Validate()
}

// Find returns the row of a key.
func Find(key string) (Setting, bool) {
	i := slices.IndexFunc(table, func(s Setting) bool { return s.Key == key })
	if i < 0 {
		return Setting{}, false
	}
	return table[i], true
}

// keys are those that a file may have.
func keys() (all []string) {
	for _, s := range table {
		all = append(all, s.Key)
	}
	return all
}
