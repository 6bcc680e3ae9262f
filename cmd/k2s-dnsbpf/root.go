//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// complete gives the shell the values that a flag may have.
func complete[T ~string](cmd *cobra.Command, flag string, values ...T) {
	words := make([]cobra.Completion, 0, len(values))
	for _, value := range values {
		words = append(words, string(value))
	}
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // there is no such flag
	}
}

// report is what a command prints in the form that the user asks for.
type report interface {
	Write(w io.Writer, format status.Format) error
}

// reporting makes a command print what gather makes of the settings, and fail with exit status 3 if that is not healthy.
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

// settings are the flags that change the configuration. Only those that were given do so: the file comes before the
// defaults, and the command line before the file.
type settings struct {
	file string
	warn func() io.Writer
	// strict settings need a file without a fault. Commands that look or take away go on without what is wrong in it: a host
	// must not be left without its resolver file for a slip in ours.
	strict bool
	flags  config.Config
	set    []func(*config.Config)
	names  *pflag.FlagSet
}

// newSettings adds the flags that every command has.
func newSettings(cmd *cobra.Command) *settings {
	s := &settings{flags: config.Default(), names: cmd.Flags(), warn: cmd.ErrOrStderr}
	s.names.StringVar(&s.file, "config", config.DefaultFile, "configuration `FILE`, optional if it is the default one")
	bind(s, s.names.StringVar, "resolv-conf", func(c *config.Config) *string { return &c.ResolvConf }, "resolver configuration `FILE` of the host")
	bind(s, s.names.StringVar, "state-dir", func(c *config.Config) *string { return &c.StateDir }, "`DIR` of the journal, kept over a reboot")
	bind(s, s.names.StringVar, "run-dir", func(c *config.Config) *string { return &c.RunDir }, "`DIR` of the lock and the control socket")
	bind(s, s.names.StringVar, "bpffs", func(c *config.Config) *string { return &c.BPFFS }, "`DIR` on a BPF file system for the pins")
	bind(s, s.names.StringVar, "log-level", func(c *config.Config) *string { return &c.LogLevel }, "log `LEVEL`: debug, info, warn or error")
	return s
}

// addAttachFlags adds the flags that say what to attach.
func (s *settings) addAttachFlags() {
	s.strict = true
	s.text("topology", string(s.flags.Topology), "kind of host: native-linux", func(c *config.Config, text string) error {
		c.Topology = config.Topology(text)
		return nil
	})
	bind(s, s.names.StringVar, "kubeconfig", func(c *config.Config) *string { return &c.Kubeconfig },
		"kubeconfig `FILE` (default: $KUBECONFIG, the sudo user's, root's, /etc/kubernetes/admin.conf, in-cluster)")
	s.list("dns-endpoint", "`IP[:PORT]` of a CoreDNS to ask in place of discovery; may be repeated", func(c *config.Config, texts []string) error {
		return parseAll(&c.DNSEndpoints, texts, config.ParseServer)
	})
	s.addDiscoveryFlags()
	s.list("zone", "cluster zone `NAME`, in place of those of the Corefile; may be repeated (default "+config.DefaultZone+" if there is none)", func(c *config.Config, texts []string) error {
		c.Zones = texts
		return nil
	})
	s.list("service-cidr", "range of Service addresses, `PREFIX`, whose reverse zones are the cluster's too, in place of the ServiceCIDR objects; may be repeated", func(c *config.Config, texts []string) error {
		return parseAll(&c.ServiceCIDRs, texts, parsePrefix)
	})
	s.list("pod-cidr", "range of Pod addresses, `PREFIX`, whose reverse zones are the cluster's too, in place of the nodes' podCIDRs; may be repeated", func(c *config.Config, texts []string) error {
		return parseAll(&c.PodCIDRs, texts, parsePrefix)
	})
	s.text("kubeswitch-address", "", "this host's `IP` on the KubeSwitch, or none (default "+config.DefaultKubeSwitchAddress.String()+" when an interface has it)",
		func(c *config.Config, text string) error { return c.SetKubeSwitch(text) })
	s.list("allow", "`PREFIX` that may ask at the KubeSwitch address; may be repeated (default: the subnets of its interface)", func(c *config.Config, texts []string) error {
		return parseAll(&c.Allowed, texts, parsePrefix)
	})
	s.list("pods", "`PATTERN` of interfaces that pods are behind, such as cni0, veth*, cali*: their queries to the cluster's DNS address are steered too; may be repeated",
		func(c *config.Config, texts []string) error {
			c.Pods = texts
			return nil
		})
	s.list("cluster-dns", "`IP` that pods ask; may be repeated (default: the addresses of the kube-dns Service)", func(c *config.Config, texts []string) error {
		return parseAll(&c.ClusterDNS, texts, parseAddress)
	})
	s.list("upstream", "`IP[:PORT]` of a server for all other names (default: those of the resolver configuration)", func(c *config.Config, texts []string) error {
		return parseAll(&c.Upstreams, texts, config.ParseServer)
	})
	s.text("resolver", string(s.flags.Resolver), "what to do with the resolver configuration: takeover, transparent (leave it, steer what goes to the host's own resolver on loopback) or none", func(c *config.Config, text string) error {
		c.Resolver = config.ResolverMode(text)
		return nil
	})
	bind(s, s.names.BoolVar, "in-place", func(c *config.Config) *bool { return &c.InPlace },
		"overwrite a resolver configuration that is a bind mount, as in a container, and so can't be exchanged")
	bind(s, s.names.BoolVar, "override-immutable", func(c *config.Config) *bool { return &c.OverrideImmutable },
		"take the attribute of chattr +i or +a from the resolver configuration while attached")
	s.text("on-foreign-change", string(s.flags.OnForeignChange),
		"when somebody else rewrites the resolver configuration: retake it, with theirs as what detach restores, or yield", func(c *config.Config, text string) error {
			c.OnForeignChange = config.ChangePolicy(text)
			return nil
		})
	var noBPF bool
	s.names.BoolVar(&noBPF, "no-bpf", false, "do everything in user space")
	s.set = append(s.set, func(c *config.Config) {
		if s.names.Changed("no-bpf") {
			c.BPF = !noBPF
		}
	})
	bind(s, s.names.DurationVar, "wait", func(c *config.Config) *time.Duration { return &c.Wait }, "how long to wait for the cluster")
}

// bind adds a flag for one field, with the default of that field.
func bind[T any](s *settings, add func(*T, string, T, string), name string, field func(*config.Config) *T, usage string) {
	value := field(&s.flags)
	add(value, name, *value, usage)
	s.set = append(s.set, func(c *config.Config) {
		if s.names.Changed(name) {
			*field(c) = *value
		}
	})
}

// text adds a flag whose value is parsed; a bad one is wrong usage, as it is for flags that pflag parses.
func (s *settings) text(name, value, usage string, parse func(*config.Config, string) error) {
	s.names.Var(&parsedFlag{value: value, parse: func(text string) error {
		var checked config.Config
		if err := parse(&checked, text); err != nil {
			return err
		}
		s.set = append(s.set, func(c *config.Config) { _ = parse(c, text) })
		return nil
	}}, name, usage)
}

// list adds a flag that may be repeated. All its values together replace what the file says.
func (s *settings) list(name, usage string, parse func(*config.Config, []string) error) {
	var texts []string
	s.names.Var(&parsedFlag{parse: func(text string) error {
		var checked config.Config
		if err := parse(&checked, []string{text}); err != nil {
			return err
		}
		texts = append(texts, text)
		return nil
	}}, name, usage)
	s.set = append(s.set, func(c *config.Config) {
		if len(texts) > 0 {
			_ = parse(c, texts)
		}
	})
}

// parsedFlag implements pflag.Value.
type parsedFlag struct {
	value string
	parse func(string) error
}

func (f *parsedFlag) String() string { return f.value }
func (f *parsedFlag) Type() string   { return "string" }

func (f *parsedFlag) Set(text string) error {
	if err := f.parse(text); err != nil {
		return err
	}
	f.value = text
	return nil
}

func parseAll[T any](to *[]T, texts []string, parse func(string) (T, error)) error {
	*to = nil
	for _, text := range texts {
		value, err := parse(text)
		if err != nil {
			return err
		}
		*to = append(*to, value)
	}
	return nil
}

func parseAddress(text string) (netip.Addr, error) {
	address, err := netip.ParseAddr(text)
	if err != nil {
		return address, fmt.Errorf("%q: %w: write an IP address", text, config.ErrInvalid)
	}
	return address.Unmap(), nil
}

func parsePrefix(text string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(strings.TrimSpace(text))
	if err != nil {
		return prefix, fmt.Errorf("%q: %w: write a range such as 172.21.0.0/16", text, config.ErrInvalid)
	}
	return prefix.Masked(), nil
}

// config joins defaults, file and flags. Where the file has a fault, and that is no error, directories are those of the
// attachment that the journal knows.
func (s *settings) config(ctx context.Context) (config.Config, error) {
	c, err := config.Load(ctx, s.file, s.names.Changed("config"))
	if err != nil && s.strict {
		return c, err
	}
	if err != nil {
		fmt.Fprintf(s.warn(), "k2s-dnsbpf: warning: %s: going on without it\n", status.Printable(err.Error(), ""))
		c = client.AttachedPaths(c)
	}
	for _, set := range s.set {
		set(&c)
	}
	if err := c.Validate(); err != nil {
		return c, err
	}
	return c, nil
}

// configAndLogger is config, with a logger of the level that it names.
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
