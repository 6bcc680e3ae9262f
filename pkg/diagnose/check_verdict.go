package diagnose

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
)

// judgement is a verdict, or the half of one that one question gets.
type judgement struct {
	cause Cause
	text  string
	leads bool // there is an address that is worth a look at the way to it
}

func judge(cause Cause, format string, arguments ...any) judgement {
	return judgement{cause: cause, text: fmt.Sprintf(format, arguments...)}
}

// andOn is a judgement of DNS after which the way counts too.
func (j judgement) andOn() judgement {
	j.leads = true
	return j
}

// Conclude judges the evidence. It is a pure function.
func Conclude(e Evidence) CheckReport {
	verdict := e.where()
	if verdict.leads {
		way := e.how()
		verdict.text += "; " + way.text
		if way.cause != CauseNone {
			verdict.cause = way.cause
		}
	}
	r := CheckReport{
		Name: e.Target.Name, Port: e.Target.Port,
		Healthy: verdict.cause == CauseNone, Cause: verdict.cause, Verdict: verdict.text,
		Steps: append(e.whereSteps(), e.howSteps()...),
	}
	if r.Port == 0 && e.Cluster.Port != nil {
		r.Port = e.Cluster.Port.Port
	}
	return r
}

// where judges DNS.
func (e Evidence) where() judgement {
	if _, isAddress := e.Target.Address(); isAddress {
		return judge(CauseNone, "no DNS is needed").andOn()
	}
	q := e.Queries[e.Decisive]
	if q.InZone && q.Path.Carrier == Direct && !slices.ContainsFunc(q.Reply.Addresses, e.belongs) {
		return e.notAsked(q)
	}
	switch {
	case q.Reply.Failure != nil || q.Reply.Rcode != dns.RcodeSuccess && q.Reply.Rcode != dns.RcodeNameError:
		if q.InZone {
			return e.coreDNSBroken(q)
		}
		return e.upstreamsBroken(q)
	case len(q.Reply.Addresses) > 0:
		return e.answered(q)
	case q.alias() != "":
		return judge(CauseNoAddress, "DNS is broken: %s is an alias of %s, and its address does not come with it: %s",
			bare(q.Name), bare(q.alias()), e.aliasRemedy(q))
	}
	return e.empty(q)
}

// notAsked is about a cluster name for which this program is not asked, and for which no address is known to be right:
// some servers answer for every name.
func (e Evidence) notAsked(q Query) judgement {
	if !e.Host.Attached {
		return judge(CauseNotAttached, "DNS is broken: k2s-dnsbpf is not attached: programs ask %s for cluster names: run sudo k2s-dnsbpf attach",
			q.Reply.Server)
	}
	return judge(CauseResolverForeign, "DNS is broken: programs do not ask k2s-dnsbpf: %s is %s and names %s: %s",
		e.Host.File, e.Host.State, q.Reply.Server, e.Host.fileRemedy())
}

// fileRemedy is what to do about a resolver file by which programs do not ask us. Status knows, where it is not as was
// asked for.
func (h CheckedHost) fileRemedy() string {
	for _, problem := range h.Problems {
		if _, remedy, ok := strings.Cut(problem, h.File+" is "+h.State+": programs do not ask k2s-dnsbpf: "); ok {
			return remedy
		}
		if text, ok := strings.CutPrefix(problem, h.File+": "); ok {
			return text
		}
	}
	switch h.State {
	case "original":
		return "it is left alone, as --resolver none says"
	case "foreign":
		return "it is left in place, as --on-foreign-change yield says"
	}
	return "run k2s-dnsbpf detach and attach again"
}

// answered is about a name for which there is an address.
func (e Evidence) answered(q Query) judgement {
	s := e.Cluster.Service
	if q.InZone && s != nil && len(s.IPs) > 0 && !slices.ContainsFunc(q.Reply.Addresses, e.belongs) {
		return judge(CauseCoreDNSStale, "DNS is stale: CoreDNS answers %s, but the address of the Service %s is %s: look at CoreDNS's log",
			join(q.Reply.Addresses), s.fullName(), join(s.IPs))
	}
	switch {
	case !e.Host.Attached:
		return judge(CauseNotAttached, "k2s-dnsbpf is not attached; DNS answers without it").andOn()
	case q.Path.Carrier == Direct && (e.Host.State == "foreign" || e.Host.State == "missing"):
		return judge(CauseResolverForeign, "programs do not ask k2s-dnsbpf, since %s is %s; DNS answers without it", e.Host.File, e.Host.State).andOn()
	}
	if q.InZone && len(e.Host.Severed) > 0 {
		return judge(CauseKernelPath, "DNS is fine, but the kernel's path to CoreDNS at %s is broken, so that queries are not steered to it: look at k2s-dnsbpf status",
			some(e.Host.Severed)).andOn()
	}
	cause, text := e.standing()
	return judge(cause, "%s", text).andOn()
}

// standing says that DNS is fine only if no line below the verdict says otherwise; else it names the first that does. What
// the name itself was answered is judged apart.
func (e Evidence) standing() (Cause, string) {
	for _, s := range e.whereSteps() {
		if s.State == StepBad && s.About != aboutAnswer && s.About != aboutAlias {
			what, _, _ := strings.Cut(s.Text, ";")
			if s.About != aboutStatus {
				what = s.About + ": " + what
			}
			return CauseInPart, "DNS answers, but not all is well: " + what
		}
	}
	return CauseNone, "DNS is fine"
}

// belongs is whether an address is one of the Service's or of its endpoints'.
func (e Evidence) belongs(address netip.Addr) bool {
	s := e.Cluster.Service
	return s != nil && (slices.Contains(s.IPs, address) ||
		slices.ContainsFunc(s.Endpoints, func(e ServiceEndpoint) bool { return e.Address == address }))
}

func (e Evidence) aliasRemedy(q Query) string {
	if e.Alias != nil && len(e.Alias.Reply.Addresses) == 0 {
		return "that name has none"
	}
	if q.InZone {
		return "CoreDNS can't resolve that name: check the forward plugin of its Corefile"
	}
	return "the server does not resolve that name"
}

// empty is about a name without an address.
func (e Evidence) empty(q Query) judgement {
	server := "the server for external names"
	if q.InZone {
		server = "CoreDNS"
	}
	s := e.Cluster.Service
	_, dnsIs := e.standing()
	switch {
	case s != nil && len(s.IPs) == 0 && s.ExternalName == "" && s.ready() == 0:
		return judge(CauseNoReadyEndpoint, "%s; the headless Service %s has no ready endpoint%s, and so no address", dnsIs, s.fullName(), s.ofHowMany())
	case q.Reply.Rcode == dns.RcodeSuccess:
		return judge(CauseNoAddress, "%s; %s exists, but has no address", dnsIs, bare(q.Name))
	case s != nil && s.aliasOfAddress():
		return judge(CauseNoAddress, "%s; the name has no address: the Service %s is an alias of %s, which is not a name: give it an EndpointSlice instead",
			dnsIs, s.fullName(), s.ExternalName)
	case s != nil:
		return judge(CauseCoreDNSStale, "DNS is stale: the Service %s exists, but CoreDNS says that %s does not: look at CoreDNS's log",
			s.fullName(), bare(q.Name))
	case e.Cluster.Missing != "":
		return judge(CauseNoSuchName, "%s; the name does not exist: there is no Service %s%s", dnsIs, e.Cluster.Missing, e.suggestion())
	}
	return judge(CauseNoSuchName, "%s; the name does not exist: %s says so", dnsIs, server)
}

// suggestion is what may have been meant by the name of a Service that does not exist.
func (e Evidence) suggestion() string {
	if e.Cluster.Problem != "" {
		return ""
	}
	namespace, name, _ := strings.Cut(e.Cluster.Missing, "/")
	if len(e.Cluster.Others) == 0 {
		return fmt.Sprintf(", nor any other in the namespace %s, if that exists", namespace)
	}
	if near := say.Nearest(name, e.Cluster.Others); near != "" {
		return fmt.Sprintf(", but there is %s/%s", namespace, near)
	}
	return fmt.Sprintf("; the namespace %s has other ones", namespace)
}

// helpful is whether a server did its work, even if by saying that there is nothing.
func (r Reply) helpful() bool {
	return r.Failure == nil && (r.Rcode == dns.RcodeSuccess || r.Rcode == dns.RcodeNameError)
}

// reachable is whether packets reach the server of a reply that failed, and come back.
func (r Reply) reachable() bool {
	return r.Failure.Kind == Refused || r.TCP == nil || r.TCP.Kind == Refused
}

// why a server does not answer, in a few words.
func (r Reply) why() string {
	switch {
	case r.Failure == nil:
		return dns.RcodeToString[r.Rcode]
	case r.Failure.Kind == Refused || r.TCP != nil && r.TCP.Kind == Refused:
		return "connection refused"
	case r.TCP == nil:
		return "it takes connections, but does not reply"
	case r.TCP.Kind == Unreachable:
		return r.TCP.Text
	}
	return r.Failure.Text
}

// coreDNSBroken tells a CoreDNS that is down from a way to it that is, and both from us.
func (e Evidence) coreDNSBroken(q Query) judgement {
	switch {
	case len(e.CoreDNS) == 0 && e.Host.Unconfirmed != "":
		return judge(CauseCoreDNSUnknown, "DNS is broken: %s", e.Host.Unconfirmed)
	case len(e.CoreDNS) == 0:
		return judge(CauseCoreDNSUnknown, "DNS is broken: no endpoint of CoreDNS is known: look at k2s-dnsbpf status")
	}
	var helpful, unhelpful, reachable, unreachable []Reply
	for _, r := range e.CoreDNS {
		switch {
		case r.helpful():
			helpful = append(helpful, r)
		case r.Failure == nil:
			unhelpful = append(unhelpful, r)
		case r.reachable():
			reachable = append(reachable, r)
		default:
			unreachable = append(unreachable, r)
		}
	}
	silent := append(slices.Clone(reachable), unreachable...)
	switch {
	case len(helpful) > 0 && slices.ContainsFunc(silent, func(r Reply) bool {
		return r.Server.Addr().WithZone("") == q.Reply.Steered.Addr() && r.Server.Port() == q.Reply.Steered.Port()
	}):
		return judge(CauseCoreDNSSilent, "DNS is broken in part: the query went to CoreDNS at %s, which does not answer, while %s does",
			q.Reply.Steered, servers(helpful))
	case len(helpful) > 0 && len(e.Host.Severed) > 0:
		return judge(CauseKernelPath, "DNS is broken: CoreDNS answers at %s, but the kernel's path to %s is broken: look at k2s-dnsbpf status",
			servers(helpful), some(e.Host.Severed))
	case len(helpful) > 0:
		return judge(CauseOwnPath, "DNS is broken: CoreDNS answers at %s, but not by way of k2s-dnsbpf (%s): look at k2s-dnsbpf status",
			servers(helpful), q.carriedBy())
	case len(unhelpful) > 0:
		return judge(CauseCoreDNSFails, "DNS is broken: CoreDNS answers %s at %s: look at its log", unhelpful[0].why(), servers(unhelpful))
	case len(unreachable) == 0:
		return judge(CauseCoreDNSSilent, "DNS is broken: CoreDNS does not answer; the datapath to it works (%s)", reachable[0].why())
	case len(reachable) == 0 && e.Host.Unconfirmed != "":
		return judge(CauseCoreDNSUnknown, "DNS is broken: CoreDNS does not answer where it was last (%s), and where it is now is unknown: %s",
			unreachable[0].why(), e.Host.Unconfirmed)
	case len(reachable) == 0:
		return judge(CauseCoreDNSUnreachable, "DNS is broken: CoreDNS does not answer; the datapath to it does not work (%s)", unreachable[0].why())
	}
	return judge(CauseCoreDNSSilent, "DNS is broken: CoreDNS does not answer; the datapath works to %s (%s) and not to %s (%s)",
		servers(reachable), reachable[0].why(), servers(unreachable), unreachable[0].why())
}

func (q Query) carriedBy() string {
	switch q.Path.Carrier {
	case Kernel:
		return "steered by the kernel"
	case Cached:
		return "answered from the kernel"
	default:
		return "through the forwarder"
	}
}

// upstreamsBroken is about an external name that nobody answers for.
func (e Evidence) upstreamsBroken(q Query) judgement {
	if q.Path.Carrier == Direct {
		return judge(CauseUpstreams, "DNS is broken: %s, which %s names, does not answer (%s)", q.Reply.Server, e.Host.File, q.Reply.describe())
	}
	var helpful []Reply
	for _, r := range e.Upstreams {
		if r.helpful() {
			helpful = append(helpful, r)
		}
	}
	switch {
	case len(helpful) > 0:
		return judge(CauseOwnPath, "DNS is broken: %s %s, but not by way of k2s-dnsbpf (%s): look at k2s-dnsbpf status",
			servers(helpful), verb(len(helpful), "answer"), q.carriedBy())
	case len(e.Upstreams) == 0:
		return judge(CauseUpstreams, "DNS is broken: no server for external names is known: look at k2s-dnsbpf status")
	}
	return judge(CauseUpstreams, "DNS is broken for external names: no upstream server of this host answers: %s (%s)",
		servers(e.Upstreams), e.Upstreams[0].why())
}

// how judges the way to the addresses.
func (e Evidence) how() judgement {
	s := e.Cluster.Service
	if s == nil || s.ExternalName != "" {
		return e.toAddresses()
	}
	switch port := e.Cluster.Port; {
	case len(s.deliverable(anywhere)) == 0:
		return judge(CauseNoReadyEndpoint, "the Service %s has no ready endpoint%s", s.fullName(), s.ofHowMany())
	case port == nil:
		return judge(CauseNoSuchPort, "the Service %s has no port %d, but %s", s.fullName(), e.Target.Port, s.portList())
	case port.Protocol != "TCP":
		return judge(CauseNone, "whether port %d/%s answers can't be told by connecting", port.Port, port.Protocol)
	case len(e.delivered()) == 0 && !slices.ContainsFunc(e.Connections, Connection.works):
		return judge(CauseTrafficPolicy, "the Service %s is for clients beside its endpoints only (internalTrafficPolicy: Local), and none is on this Node, %s: nothing is delivered from here, as it says",
			s.fullName(), e.Cluster.Node)
	}
	return e.toService()
}

// toAddresses is about addresses of which no Service is known.
func (e Evidence) toAddresses() judgement {
	behind := ""
	cause := CauseNone
	if e.Cluster.Problem != "" {
		behind = "; what is behind is unknown: " + e.Cluster.Problem
	}
	if e.Cluster.Down {
		cause = CauseAPIServer
	}
	if len(e.Connections) == 0 {
		return judge(cause, "no port was given, so no connection was tried%s", behind)
	}
	good, bad := split(e.Connections)
	switch {
	case len(good) == 0 && len(bad) == 1:
		return judge(CauseAddress, "%s does not answer (%s)%s", connections(bad), bad[0].Failure.Text, behind)
	case len(good) == 0:
		return judge(CauseAddress, "none of %s answers (%s)%s", connections(bad), bad[0].Failure.Text, behind)
	case len(bad) > 0:
		behind = fmt.Sprintf(", but not %s (%s)%s", connections(bad), bad[0].Failure.Text, behind)
	}
	return judge(cause, "%s %s%s", connections(good), verb(len(good), "answer"), behind)
}

// toService is about a Service with endpoints, or one endpoint of it.
func (e Evidence) toService() judgement {
	s := e.Cluster.Service
	var service, endpoints []Connection
	for _, c := range e.Connections {
		if c.Role == RoleEndpoint {
			endpoints = append(endpoints, c)
		} else {
			service = append(service, c)
		}
	}
	_, serviceBad := split(service)
	good, bad := split(endpoints)
	switch {
	case len(bad) > 0 && len(good) == 0 && (len(serviceBad) > 0 || len(service) == 0):
		return e.endpointsDown(bad)
	case len(serviceBad) > 0 && len(good) > 0 && len(bad) > 0 && s.Sticky:
		return judge(CauseEndpoint, "of %d endpoints of the Service %s, %d %s not answer, %s (%s), and all connections from here go to the same one (sessionAffinity: ClientIP)",
			len(endpoints), s.fullName(), len(bad), verb(len(bad), "do"), connections(bad), bad[0].Failure.Text)
	case len(serviceBad) > 0 && len(good) > 0:
		text := fmt.Sprintf("endpoints answer, but the Service address %s does not (%s): the Service datapath (kube-proxy or eBPF) is broken",
			connections(serviceBad), serviceBad[0].Failure.Text)
		if len(bad) > 0 {
			text += fmt.Sprintf("; nor does the endpoint %s (%s)", connections(bad), bad[0].Failure.Text)
		}
		return judge(CauseServiceDatapath, "%s", text)
	case len(serviceBad) > 0:
		return judge(CauseAddress, "the Service address %s does not answer (%s)", connections(serviceBad), serviceBad[0].Failure.Text)
	case len(bad) > 0 && len(good) > 0:
		return judge(CauseEndpoint, "of %d endpoints of the Service %s, %d %s not answer, %s (%s): a part of all connections fails",
			len(endpoints), s.fullName(), len(bad), verb(len(bad), "do"), connections(bad), bad[0].Failure.Text)
	case len(service) == 0 && len(good) == 0:
		return judge(CauseNone, "which port the endpoints of the Service %s listen on is unknown, so no connection was tried", s.fullName())
	case len(service) == 0:
		return judge(CauseNone, "%s %s", connections(good), verb(len(good), "answer"))
	case len(good) == 0:
		return judge(CauseNone, "the Service address %s answers", connections(service))
	case len(good) == 1:
		return judge(CauseNone, "the Service address %s and its endpoint answer", connections(service))
	}
	return judge(CauseNone, "the Service address %s and its %d endpoints answer", connections(service), len(good))
}

// endpointsDown tells endpoints where nobody listens from those that are not reached.
func (e Evidence) endpointsDown(bad []Connection) judgement {
	s := e.Cluster.Service
	listening := func(c Connection) bool { return c.Failure.Kind != Refused }
	if !slices.ContainsFunc(bad, listening) {
		return judge(CauseNotListening, "nothing listens at the %s of the Service %s: %s %s connections: look at the program in the Pod, and at the Service's targetPort",
			plural(len(bad), "endpoint"), s.fullName(), connections(bad), verb(len(bad), "refuse"))
	}
	return judge(CauseUnreachable, "no endpoint of the Service %s can be reached: %s (%s): the path to the Pods is broken",
		s.fullName(), connections(bad), bad[0].Failure.Text)
}

func split(all []Connection) (good, bad []Connection) {
	for _, c := range all {
		if c.works() {
			good = append(good, c)
		} else {
			bad = append(bad, c)
		}
	}
	return good, bad
}

// aliasOfAddress is whether an ExternalName is an address, which CoreDNS does not serve.
func (s Service) aliasOfAddress() bool {
	_, err := netip.ParseAddr(s.ExternalName)
	return err == nil
}

func (s Service) fullName() string { return s.Namespace + "/" + s.Name }

func (s Service) ready() (count int) {
	for _, e := range s.Endpoints {
		if e.Ready {
			count++
		}
	}
	return count
}

func (s Service) ofHowMany() string {
	switch {
	case len(s.Endpoints) == 0 && s.Selectorless:
		return ": it has no selector, so nobody makes its EndpointSlices but by hand"
	case len(s.Endpoints) == 0:
		return ""
	}
	return fmt.Sprintf(" of %d", len(s.Endpoints))
}

func (s Service) portList() string {
	if len(s.Ports) == 0 {
		return "none at all"
	}
	texts := make([]string, 0, len(s.Ports))
	for _, p := range s.Ports {
		texts = append(texts, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
	}
	return strings.Join(texts, ", ")
}

// fewest is how many things a sentence names before it only counts them.
const fewest = 3

func connections(all []Connection) string {
	addresses := make([]netip.AddrPort, 0, len(all))
	for _, c := range all {
		addresses = append(addresses, c.To)
	}
	return some(addresses)
}

func servers(all []Reply) string {
	addresses := make([]netip.AddrPort, 0, len(all))
	for _, r := range all {
		addresses = append(addresses, r.Server)
	}
	return some(addresses)
}

func some(addresses []netip.AddrPort) string {
	if len(addresses) <= fewest {
		return join(addresses)
	}
	return fmt.Sprintf("%s and %d more", join(addresses[:fewest]), len(addresses)-fewest)
}

func join[T fmt.Stringer](things []T) string {
	texts := make([]string, 0, len(things))
	for _, thing := range things {
		texts = append(texts, thing.String())
	}
	return strings.Join(texts, ", ")
}

// verb is a verb with as many subjects, in the present tense.
func verb(subjects int, infinitive string) string {
	switch {
	case subjects != 1:
		return infinitive
	case infinitive == "do":
		return "does"
	}
	return infinitive + "s"
}

func plural(count int, noun string) string {
	if count == 1 {
		return noun
	}
	return noun + "s"
}

// bare is a name without its final dot, as people write it.
func bare(name string) string { return strings.TrimSuffix(name, ".") }
