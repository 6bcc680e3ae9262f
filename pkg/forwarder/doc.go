// Package forwarder is the userspace DNS server of k2s-dnsbpf. It listens on
// UDP and TCP, sends names of a cluster zone to that zone's servers and every
// other name to the servers that the host used before.
//
// Messages stay in wire format from end to end: only the header, the question
// and the OPT record are read, and answer records are passed on byte for byte.
// That keeps the answers in order and unchanged, and costs little. miekg/dns'
// own server is not used, because it gives the handler a decoded message only
// (an odd packet for CoreDNS could not be passed on as it is) and starts a
// goroutine for each packet without a bound.
//
// The two kinds of names are treated differently on purpose:
//
//   - a cluster query is passed on as it is, OPT record included, and so is
//     the reply, so that the client gets what CoreDNS would have told it
//     directly, and what the kernel path tells it;
//   - an external query is rebuilt from its question, because OPT is
//     hop-by-hop (RFC 6891 section 6.1.1): no cookie, client subnet or other
//     option passes this server in either direction.
//
// The package is portable: it knows neither Linux, eBPF nor Kubernetes.
package forwarder
