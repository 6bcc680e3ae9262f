package diagnose

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

func step(question Question, about string, state StepState, format string, arguments ...any) Step {
	return Step{Question: question, About: about, State: state, Text: fmt.Sprintf(format, arguments...)}
}

func okIf(good bool) StepState {
	if good {
		return StepOK
	}
	return StepBad
}

func (s Step) in(took time.Duration) Step {
	s.Microseconds = took.Microseconds()
	return s
}

// What some steps are about: the problems that status has, and the name's own answers.
const (
	aboutStatus = "status"
	aboutAnswer = "answer"
	aboutAlias  = "alias"
)

// whereSteps tell how the name was resolved.
func (e Evidence) whereSteps() []Step {
	if _, isAddress := e.Target.Address(); isAddress {
		return nil
	}
	steps := []Step{e.resolverStep()}
	for _, problem := range e.Host.Problems {
		steps = append(steps, step(Where, aboutStatus, StepBad, "%s", problem))
	}
	for i, q := range e.Queries {
		steps = append(steps, e.pathStep(q), answerStep(aboutAnswer, q, i != e.Decisive && q.Reply.Rcode == dns.RcodeNameError))
	}
	if e.Alias != nil {
		steps = append(steps, e.pathStep(*e.Alias), answerStep(aboutAlias, *e.Alias, false))
	}
	reference := e.Queries[e.Decisive].Reply
	for _, r := range e.CoreDNS {
		steps = append(steps, directStep("CoreDNS", "asked directly", r, reference))
	}
	for _, r := range e.Upstreams {
		steps = append(steps, directStep("upstream", "asked directly", r, reference))
	}
	if e.Forwarder != nil {
		steps = append(steps, directStep("forwarder", "by TCP", *e.Forwarder, reference))
	}
	return steps
}

func (e Evidence) resolverStep() Step {
	is := e.Host.State
	if is == "transparent" {
		is = "left alone"
	}
	text := fmt.Sprintf("%s is %s", e.Host.File, is)
	if e.Host.Owner != "" {
		text += " (owner before: " + e.Host.Owner + ")"
		if e.Host.State != "ours" {
			text = fmt.Sprintf("%s is %s (owner: %s)", e.Host.File, is, e.Host.Owner)
		}
	}
	text += fmt.Sprintf(": programs ask %s", e.Host.server())
	if !e.Host.Attached {
		return step(Where, "resolver", StepBad, "%s; k2s-dnsbpf is not attached", text)
	}
	// A kernel program that has a reason has seen the query on its way to the host's own resolver, in transparent mode.
	asked := slices.ContainsFunc(e.Queries, func(q Query) bool { return q.Path.Carrier != Direct || q.Path.Reason != "" })
	asWanted := e.Host.State == "original" && !slices.ContainsFunc(e.Host.Problems, func(p string) bool { return strings.HasPrefix(p, e.Host.File) })
	return step(Where, "resolver", okIf(asked || asWanted), "%s", text)
}

func (e Evidence) pathStep(q Query) Step {
	text := map[Carrier]string{
		Kernel:    "the kernel steers it to CoreDNS",
		Cached:    "answered from the kernel",
		Fallback:  "the kernel steers it to an upstream server of the host, since the daemon is dead",
		Forwarder: "the forwarder takes it",
		Direct:    "nothing of k2s-dnsbpf takes it: it goes to " + q.Reply.Server.String(),
	}[q.Path.Carrier]
	if q.Path.Carrier == Cached && q.Reply.Failure == nil {
		text += fmt.Sprintf(", TTL %d s left", int(q.Reply.TTL.Seconds()))
	}
	if q.Path.Carrier != Cached && q.Reply.Steered.IsValid() {
		text += ", to " + q.Reply.Steered.String()
	}
	state := okIf(q.Path.Carrier != Direct || !q.InZone)
	switch {
	case q.Path.Inferred != "":
		text += "; expected, since the kernel program can't be asked: " + q.Path.Inferred
		state = StepUnknown
	case q.Path.Reason != "":
		text += " (" + q.Path.Reason + ")"
	}
	return step(Where, "path", state, "%s: %s", bare(q.Name), text)
}

// answerStep describes one query. A name from the search list that does not exist is not a fault: the next one is tried.
func answerStep(about string, q Query, next bool) Step {
	text := fmt.Sprintf("%s: %s", bare(q.Name), q.Reply.describe())
	if q.Reply.Tries > 1 {
		text += fmt.Sprintf(", at try %d", q.Reply.Tries)
	}
	return step(Where, about, okIf(next || len(q.Reply.Addresses) > 0), "%s", text).in(q.Reply.Took)
}

// directStep compares what a server says by itself with what came by way of the resolver.
func directStep(about, how string, r, reference Reply) Step {
	text := fmt.Sprintf("%s %s: %s", r.Server, how, r.describe())
	if r.Failure != nil && about == "CoreDNS" {
		text += "; " + r.wayTo()
	}
	if r.same(reference) {
		text = fmt.Sprintf("%s %s: the same", r.Server, how)
	}
	return step(Where, about, okIf(r.helpful()), "%s", text).in(r.Took)
}

func (r Reply) wayTo() string {
	text := "a connection by TCP succeeds"
	if r.TCP != nil {
		text = "by TCP: " + r.TCP.Text
	}
	if r.Way != "" {
		text += "; " + r.Way
	}
	return text
}

// same is whether two servers answered alike. Addresses come in any order.
func (r Reply) same(other Reply) bool {
	if r.Failure != nil || other.Failure != nil || r.Rcode != other.Rcode || len(r.Addresses) != len(other.Addresses) {
		return false
	}
	for _, address := range r.Addresses {
		if !slices.Contains(other.Addresses, address) {
			return false
		}
	}
	return slices.Equal(r.Aliases, other.Aliases)
}

// describe is a reply in a few words.
func (r Reply) describe() string {
	if r.Failure != nil {
		return r.Failure.Text
	}
	text := dns.RcodeToString[r.Rcode]
	switch {
	case r.Rcode == dns.RcodeNameError:
		text += ", there is no such name"
	case r.Rcode == dns.RcodeSuccess && len(r.Addresses) == 0:
		text += ", without an address"
	}
	if r.Extended != "" {
		text += " (" + r.Extended + ")"
	}
	for _, alias := range r.Aliases {
		text += ", alias of " + bare(alias)
	}
	if len(r.Addresses) > 0 {
		text += ", " + join(r.Addresses[:min(len(r.Addresses), fewest)])
		if more := len(r.Addresses) - fewest; more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		text += fmt.Sprintf(", TTL %d s", int(r.TTL.Seconds()))
	}
	return text
}

// howSteps tell how the addresses were connected to.
func (e Evidence) howSteps() (steps []Step) {
	say := func(about string, state StepState, format string, arguments ...any) {
		steps = append(steps, step(How, about, state, format, arguments...))
	}
	s := e.Cluster.Service
	switch {
	case e.Cluster.Missing != "":
		say("Service", StepBad, "%s does not exist (%s)", e.Cluster.Missing, e.Cluster.Source)
	case e.Cluster.Problem != "":
		say("Service", StepUnknown, "%s", e.Cluster.Problem)
	case s != nil:
		steps = append(steps, e.serviceSteps()...)
	case e.Cluster.Source != "" && len(e.addresses()) > 0:
		say("Service", StepUnknown, "none has this address (%s)", e.Cluster.Source)
	}
	for _, c := range e.Connections {
		text := c.To.String()
		if c.Pod != "" {
			text += " (Pod " + c.Pod + ")"
		}
		switch {
		case !c.works():
			text += ": " + c.Failure.Text
		case c.Good < c.Tries:
			text += fmt.Sprintf(": %d of %d connections succeed, else %s", c.Good, c.Tries, c.Failure.Text)
		default:
			text += ": connected"
		}
		if c.Tries > 1 && !c.works() {
			text += fmt.Sprintf(", %d times", c.Tries)
		}
		steps = append(steps, step(How, string(c.Role), okIf(c.Good == c.Tries), "%s", text).in(c.Took))
	}
	if e.Untried > 0 {
		say("endpoint", StepUnknown, "%d more were not tried", e.Untried)
	}
	return steps
}

func (e Evidence) serviceSteps() []Step {
	s := e.Cluster.Service
	if s.ExternalName != "" {
		return []Step{step(How, "Service", StepOK, "%s is an alias of %s (%s)", s.fullName(), s.ExternalName, e.Cluster.Source)}
	}
	kind := "has the address " + join(s.IPs)
	if len(s.IPs) == 0 {
		kind = "is headless: its addresses are its endpoints'"
	}
	steps := []Step{step(How, "Service", StepOK, "%s %s (%s)", s.fullName(), kind, e.Cluster.Source)}
	if e.Cluster.Port == nil {
		steps = append(steps, step(How, "port", StepBad, "%d is none of the Service's: %s", e.Target.Port, s.portList()))
	} else if e.Target.Port == 0 {
		steps = append(steps, step(How, "port", StepOK, "%d/%s, of %s", e.Cluster.Port.Port, e.Cluster.Port.Protocol, s.portList()))
	}
	var unready, ending []netip.Addr
	published := 0
	for _, endpoint := range s.Endpoints {
		switch {
		case endpoint.Ready && !endpoint.Serving:
			published++
		case endpoint.Ready:
		case endpoint.Serving && endpoint.Terminating:
			ending = append(ending, endpoint.Address)
		default:
			unready = append(unready, endpoint.Address)
		}
	}
	text := fmt.Sprintf("%d of %d ready", s.ready(), len(s.Endpoints))
	for _, others := range []struct {
		are       string
		addresses []netip.Addr
	}{{"not", unready}, {"ending, but serving on", ending}} {
		if len(others.addresses) > 0 {
			text += fmt.Sprintf(", %s %s", others.are, join(others.addresses[:min(len(others.addresses), fewest)]))
		}
	}
	if published > 0 {
		text += fmt.Sprintf(", of these %d only by publishNotReadyAddresses", published)
	}
	if s.LocalOnly {
		text += fmt.Sprintf(", %d for clients on this Node, %s (internalTrafficPolicy: Local)", len(e.delivered()), e.Cluster.Node)
	}
	return append(steps, step(How, "endpoints", okIf(len(e.delivered()) > 0), "%s", text))
}
