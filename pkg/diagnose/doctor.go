// Package diagnose judges a host. What is there is gathered first, into plain values; the judgements are pure functions
// of them.
package diagnose

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// Result is how one of doctor's checks ended.
type Result string

// The results. Only Fail makes a host unhealthy.
const (
	OK      Result = "ok"
	Warn    Result = "warn"    // works, with a cost or at a risk
	Fail    Result = "fail"    // does not work, or an attach would not
	Unknown Result = "unknown" // could not be seen
)

// Finding is one line of doctor's. Its JSON form is a contract: fields are added, never renamed.
type Finding struct {
	Check       string `json:"check" yaml:"check"`
	Result      Result `json:"result" yaml:"result"`
	Says        string `json:"says" yaml:"says"`
	Consequence string `json:"consequence,omitempty" yaml:"consequence,omitempty"`
	Fix         string `json:"fix,omitempty" yaml:"fix,omitempty"`
}

// Examination is all that doctor found.
type Examination struct {
	Healthy  bool      `json:"healthy" yaml:"healthy"`
	Findings []Finding `json:"findings" yaml:"findings"`
}

// checks are all of doctor's, in the order of the output: from the file that programs read, by who else has a say in it,
// to the cluster and the system beneath.
var checks = []struct {
	name string
	of   func(Facts) []Finding
}{
	{"daemon", checkDaemon},
	{"guardian", checkGuardian},
	{"file", checkFile},
	{"owner", checkOwner},
	{"leftovers", checkLeftovers},
	{"journal", checkJournal},
	{"nsswitch", checkNSSwitch},
	{"resolved", checkResolved},
	{"networkmanager", checkNetworkManager},
	{"openresolv", checkOpenresolv},
	{"takeovers", checkTakeovers},
	{"port53", checkPort53},
	{"kubelet", checkKubelet},
	{"podfile", checkPodFile},
	{"docker", checkDocker},
	{"coredns", checkCoreDNS},
	{"pods", checkPods},
	{"kernel", checkKernel},
	{"sysctls", checkSysctls},
	{"boot", checkBoot},
}

// Examine judges what was gathered. It is a pure function.
func Examine(f Facts) Examination {
	e := Examination{Healthy: true}
	for _, check := range checks {
		for _, finding := range check.of(f) {
			finding.Check = check.name
			e.Healthy = e.Healthy && finding.Result != Fail
			e.Findings = append(e.Findings, finding)
		}
	}
	for _, unseen := range f.Unseen {
		e.Findings = append(e.Findings, Finding{Check: "doctor", Result: Unknown, Says: unseen})
	}
	return e
}

func ok(format string, arguments ...any) []Finding {
	return []Finding{{Result: OK, Says: fmt.Sprintf(format, arguments...)}}
}

func unknown(format string, arguments ...any) []Finding {
	return []Finding{{Result: Unknown, Says: fmt.Sprintf(format, arguments...), Fix: "run it as root: sudo k2s-dnsbpf doctor"}}
}

// Write writes the examination.
func (e Examination) Write(w io.Writer, format status.Format) error {
	return status.Encode(w, format, e, e.writeTable)
}

func (e Examination) writeTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "CHECK\tRESULT\tFINDING")
	for _, f := range e.Findings {
		status.Row(t, f.Check, string(f.Result), f.Says)
		for _, more := range []struct{ label, text string }{{"consequence", f.Consequence}, {"fix", f.Fix}} {
			if more.text != "" {
				status.Row(t, "", "", more.label+": "+more.text)
			}
		}
	}
	return t.Flush()
}

// list joins things for a sentence.
func list[T any](things []T) string {
	texts := make([]string, 0, len(things))
	for _, thing := range things {
		texts = append(texts, fmt.Sprint(thing))
	}
	return strings.Join(slices.Compact(texts), ", ")
}
