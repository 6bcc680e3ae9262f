package diagnose

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// CheckReport is what "k2s-dnsbpf check" says about one name. Its JSON form is a contract: fields are added, never
// renamed.
type CheckReport struct {
	Name    string `json:"name" yaml:"name"`
	Port    uint16 `json:"port,omitempty" yaml:"port,omitempty"` // 0: none was given, and none chosen
	Healthy bool   `json:"healthy" yaml:"healthy"`
	Verdict string `json:"verdict" yaml:"verdict"` // one sentence
	Cause   Cause  `json:"cause" yaml:"cause"`
	Steps   []Step `json:"steps" yaml:"steps"`
}

// Step is one thing that was looked at.
type Step struct {
	Question     Question  `json:"question" yaml:"question"`
	About        string    `json:"about" yaml:"about"` // such as resolver, path, answer, Service
	State        StepState `json:"state" yaml:"state"`
	Text         string    `json:"text" yaml:"text"`
	Microseconds int64     `json:"microseconds,omitempty" yaml:"microseconds,omitempty"` // where something was timed
}

// Question is one of the two that a name raises.
type Question string

// The questions: DNS answers the first, the network's datapath the second.
const (
	Where Question = "where"
	How   Question = "how"
)

// StepState says how a step went.
type StepState string

// The states of a step. Only the verdict tells whether all is well: a bad step may be made up for by another one.
const (
	StepOK      StepState = "ok"
	StepBad     StepState = "bad"
	StepUnknown StepState = "unknown"
)

// Cause names a verdict for programs.
type Cause string

// The causes.
const (
	CauseNone               Cause = "none" // all that was looked at is well
	CauseNotAttached        Cause = "not-attached"
	CauseResolverForeign    Cause = "resolver-foreign"    // programs do not ask us
	CauseCoreDNSUnknown     Cause = "coredns-unknown"     // no endpoint of it is known
	CauseCoreDNSSilent      Cause = "coredns-silent"      // it does not answer; the way to it works
	CauseCoreDNSUnreachable Cause = "coredns-unreachable" // the way to it does not work
	CauseCoreDNSFails       Cause = "coredns-fails"       // it answers that it can't
	CauseCoreDNSStale       Cause = "coredns-stale"       // it does not say what the apiserver says
	CauseOwnPath            Cause = "own-path"            // servers answer, but not through us
	CauseKernelPath         Cause = "kernel-path"         // the kernel's path to an endpoint is broken, and so not used
	CauseInPart             Cause = "in-part"             // the name is answered, but not all that answers names is well
	CauseUpstreams          Cause = "upstreams"           // no server for external names answers
	CauseNoSuchName         Cause = "no-such-name"
	CauseNoAddress          Cause = "no-address"
	CauseAPIServer          Cause = "apiserver" // what is behind the address is unknown
	CauseNoSuchPort         Cause = "no-such-port"
	CauseNoReadyEndpoint    Cause = "no-ready-endpoint"
	CauseTrafficPolicy      Cause = "traffic-policy"   // the Service is for other hosts
	CauseServiceDatapath    Cause = "service-datapath" // endpoints answer, the Service address does not
	CauseEndpoint           Cause = "endpoint"         // one of several does not answer
	CauseNotListening       Cause = "not-listening"    // endpoints are reached, and refuse
	CauseUnreachable        Cause = "unreachable"      // endpoints are not reached
	CauseAddress            Cause = "address"          // an address that belongs to no Service does not answer
)

// Target is what to check.
type Target struct {
	Name string // as written; an address is one too
	Port uint16 // 0: none given
}

// Address is the target's where it is an address and no name.
func (t Target) Address() (netip.Addr, bool) {
	address, err := netip.ParseAddr(t.Name)
	return address.Unmap(), err == nil
}

// ParseTarget reads NAME[:PORT], where the name may be an address.
func ParseTarget(text string) (Target, error) {
	bad := func(why string) (Target, error) {
		return Target{}, fmt.Errorf("%q: %s: write NAME or NAME:PORT, such as backend.default.svc.cluster.local:80", text, why)
	}
	bare := strings.TrimSuffix(strings.TrimPrefix(text, "["), "]")
	if _, err := netip.ParseAddr(bare); err == nil {
		return Target{Name: bare}, nil
	}
	t := Target{Name: text}
	if strings.Contains(text, ":") {
		name, port, err := net.SplitHostPort(text)
		if err != nil {
			return bad("not a name and a port")
		}
		number, err := strconv.ParseUint(port, 10, 16)
		if err != nil || number == 0 {
			return bad("the port is a number from 1 to 65535")
		}
		t.Name, t.Port = name, uint16(number)
	}
	if _, isAddress := t.Address(); isAddress {
		return t, nil
	}
	if labels, isName := dns.IsDomainName(t.Name); !isName || labels == 0 || strings.ContainsAny(t.Name, "/ \\") {
		return bad("not a name of a host")
	}
	return t, nil
}

// Write writes the report.
func (r CheckReport) Write(w io.Writer, format status.Format) error {
	return status.Encode(w, format, r, r.writeTable)
}

func (r CheckReport) writeTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	status.Row(t, r.Verdict)
	for _, part := range []struct {
		question Question
		title    string
	}{{Where, "WHERE IS IT?"}, {How, "HOW DO I GET THERE?"}} {
		title := part.title
		for _, step := range r.Steps {
			if step.Question != part.question {
				continue
			}
			if title != "" {
				fmt.Fprintf(t, "\n%s\n", title)
				title = ""
			}
			status.Row(t, "  "+string(step.State), step.About, step.Text+step.took())
		}
	}
	return t.Flush()
}

// took is the time of a step as the table has it.
func (s Step) took() string {
	if s.Microseconds == 0 {
		return ""
	}
	return fmt.Sprintf(", %.1f ms", float64(s.Microseconds)/float64(time.Millisecond/time.Microsecond))
}
