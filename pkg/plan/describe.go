package plan

import (
	"fmt"
	"path"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

// Describe says for a person what will be done to make a plan true, a line for each step. The resolver file is for who
// inspects it to describe.
func (d Desired) Describe(c config.Config) (lines []string) {
	say := func(format string, arguments ...any) { lines = append(lines, fmt.Sprintf(format, arguments...)) }
	for _, address := range d.Listen {
		say("listen on %s, UDP and TCP", address)
	}
	if d.Kernel != nil {
		lines = append(lines, d.describeKernel(c.BPFFS)...)
	}
	for _, zone := range d.Zones {
		say("answer zone %s from CoreDNS (%s)", zone.Name, zone.Source)
	}
	for _, e := range d.Endpoints {
		how := "over " + e.Way.Interface
		if !e.Steerable() {
			how = e.Note
		}
		say("endpoint %s (%s), %s", e.Address, e.Source, how)
	}
	for _, resolver := range d.SteeredAt {
		say("steer cluster names that are asked by UDP at %s, leave all else to the resolver there", resolver)
	}
	if d.Shared != nil {
		say("%s", d.Shared)
	}
	if IsTransparent(c) {
		for _, limit := range config.TransparentLimits() {
			say("not covered: %s", limit)
		}
	}
	if len(d.Listen) > 0 {
		for _, upstream := range d.Forward.Upstreams {
			say("send all other names to %s", upstream)
		}
	}
	for _, note := range d.Notes {
		say("note: %s", note)
	}
	for _, problem := range d.Problems {
		say("problem: %s", problem.Text)
	}
	return lines
}

func (d Desired) describeKernel(bpffs string) (lines []string) {
	say := func(format string, arguments ...any) { lines = append(lines, fmt.Sprintf(format, arguments...)) }
	for _, name := range d.Kernel.Sysctls {
		say("set sysctl %s=1", name)
	}
	say("load the programs, pin them below %s", path.Clean(bpffs))
	for _, hook := range d.Kernel.Hooks {
		say("attach %s", hook)
	}
	if d.KubeSwitch.Index != 0 {
		what := ""
		if d.Shared != nil {
			what = " for cluster names"
		}
		say("let only %s ask%s on %s", d.Allowed, what, d.KubeSwitch.Name)
	}
	return lines
}
