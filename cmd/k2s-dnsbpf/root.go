//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// complete tells the shell the possible values of a flag.
func complete[T ~string](cmd *cobra.Command, flag string, values ...T) {
	words := make([]cobra.Completion, 0, len(values))
	for _, value := range values {
		words = append(words, string(value))
	}
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // there is no such flag
	}
}

// report is what a command prints, in the format that the user asks for.
type report interface {
	Write(w io.Writer, format status.Format) error
}

// reporting makes a command print the result of gather, and exit with status 3 if that is not healthy.
func reporting(cmd *cobra.Command, s *settings, gather func(context.Context, config.Config) (r report, healthy bool, err error)) {
	var output string
	cmd.Flags().StringVarP(&output, "output", "o", string(status.Table), "output `FORMAT`: table, json or yaml")
	complete(cmd, "output", status.Table, status.JSON, status.YAML)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		format, err := status.ParseFormat(output)
		if err != nil {
			return usageError{err}
		}
		c, err := s.config(cmd.Context())
		if err != nil {
			return err
		}
		r, healthy, err := gather(cmd.Context(), c)
		if err != nil {
			return err
		}
		if err := r.Write(cmd.OutOrStdout(), format); err != nil {
			return err
		}
		if !healthy {
			return errUnhealthy
		}
		return nil
	}
}

// settings are the flags that change the configuration. Only flags that were given do: the file overrides the
// defaults, and the command line overrides the file.
type settings struct {
	file string
	warn func() io.Writer
	// strict rejects an invalid file. Commands that only look or undo ignore what is wrong in it: a host
	// must not be left without its resolver file because of a mistake in ours.
	strict bool
	given  []*settingFlag
	names  *pflag.FlagSet
}

// newSettings adds the flags that all commands have.
func newSettings(cmd *cobra.Command) *settings {
	s := &settings{names: cmd.Flags(), warn: cmd.ErrOrStderr}
	s.names.StringVar(&s.file, "config", config.DefaultFile, "configuration `FILE`, optional if it is the default one")
	s.add(cmd, func(row config.Setting) bool { return row.Common })
	return s
}

// addAttachFlags adds the flags that say what to attach.
func (s *settings) addAttachFlags(cmd *cobra.Command) {
	s.strict = true
	s.add(cmd, func(row config.Setting) bool { return !row.Common })
}

func (s *settings) add(cmd *cobra.Command, wanted func(config.Setting) bool) {
	for _, row := range config.Settings() {
		if wanted(row) {
			s.offer(cmd, row)
		}
	}
}

// offer adds the flag of one setting.
func (s *settings) offer(cmd *cobra.Command, row config.Setting) {
	value := &settingFlag{row: row}
	s.given = append(s.given, value)
	flag := s.names.VarPF(value, row.Flag, "", row.Help())
	if row.Kind() == "bool" {
		flag.NoOptDefVal = "true"
	}
	if len(row.Values) > 0 {
		complete(cmd, row.Flag, row.Values...)
	}
}

// settingFlag is a setting on the command line. It implements pflag.Value.
type settingFlag struct {
	row   config.Setting
	texts []string // all values given; for a setting that is not a list, the last one
}

func (f *settingFlag) Type() string { return f.row.Kind() }

func (f *settingFlag) String() string {
	if len(f.texts) == 0 {
		if f.row.Negated || f.row.Otherwise != "" {
			return "" // the help describes it in words
		}
		return f.row.Display(config.Default())
	}
	return strings.Join(f.texts, ",")
}

func (f *settingFlag) Set(text string) error {
	if err := f.row.Assign(new(config.Config), text); err != nil {
		return err
	}
	if !f.row.Repeated() {
		f.texts = nil
	}
	f.texts = append(f.texts, text)
	return nil
}

// config combines defaults, file and flags. If the file is invalid and that is not an error, directories are those of the
// attachment in the journal.
func (s *settings) config(ctx context.Context) (config.Config, error) {
	c, err := config.Load(ctx, s.file, s.names.Changed("config"))
	if err != nil && s.strict {
		return c, err
	}
	if err != nil {
		fmt.Fprintf(s.warn(), "k2s-dnsbpf: warning: %s: ignored\n", status.Printable(err.Error(), ""))
		c = client.AttachedPaths(c)
	}
	for _, flag := range s.given {
		if len(flag.texts) == 0 {
			continue
		}
		if err := flag.row.Assign(&c, flag.texts...); err != nil {
			return c, err
		}
	}
	if err := c.Validate(); err != nil {
		return c, err
	}
	return c, nil
}

// configAndLogger is config, with a logger of the configured level.
func (s *settings) configAndLogger(ctx context.Context) (config.Config, *zap.Logger, error) {
	c, err := s.config(ctx)
	if err != nil {
		return c, nil, err
	}
	log, err := newLogger(c.LogLevel)
	if err != nil {
		return c, nil, usageError{err}
	}
	return c, log, nil
}
