package forwarder

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/miekg/dns"
)

// ErrOwnAddress is returned by SetRoutes for a server that is one of the
// addresses this Server listens on.
var ErrOwnAddress = errors.New("would forward to itself")

// ErrClosed is returned by Listen after Shutdown.
var ErrClosed = errors.New("server is shut down")

// maxExtraText bounds the text of an extended error in octets, so that the
// error always fits into 512 octets beside the longest question.
const maxExtraText = 160

// failure is an answer that is made here: a response code and, for a client
// that speaks EDNS, why (RFC 8914).
type failure struct {
	rcode int
	code  uint16 // INFO-CODE
	text  string // EXTRA-TEXT, without the program's name; "" for no option
}

func failNotReady() failure {
	return failure{dns.RcodeServerFailure, dns.ExtendedErrorCodeNotReady, "no routes yet"}
}

func failNoUpstream() failure {
	return failure{dns.RcodeServerFailure, dns.ExtendedErrorCodeNotReady, "no upstream server is known"}
}

// failNoEndpoint is for a zone without servers. RFC 8914 section 4.23: no
// authoritative server could be reached.
func failNoEndpoint(zone, why string) failure {
	text := "no endpoint for zone " + zone
	if why != "" {
		text += ": " + why
	}
	return failure{dns.RcodeServerFailure, dns.ExtendedErrorCodeNoReachableAuthority, text}
}

// failExchange is for servers that did not answer: 22 when they are the
// authority for a zone of ours, 23 (section 4.24) when they are resolvers.
func failExchange(zone string, err error) failure {
	f := failure{dns.RcodeServerFailure, dns.ExtendedErrorCodeNetworkError, "no answer from upstream: " + err.Error()}
	if zone != "" {
		f.code = dns.ExtendedErrorCodeNoReachableAuthority
		f.text = "no answer for zone " + zone + ": " + err.Error()
	}
	if errors.Is(err, errBadReply) {
		f.code = dns.ExtendedErrorCodeInvalidData
	}
	return f
}

func failLoop() failure {
	return failure{dns.RcodeServerFailure, dns.ExtendedErrorCodeOther, "forwarding loop: an upstream server asks back"}
}

// failOverload is REFUSED, as CoreDNS' forward plugin does it: a stub asks its
// next server at once, and none remembers a SERVFAIL for the name.
func failOverload() failure {
	return failure{dns.RcodeRefused, dns.ExtendedErrorCodeOther, "too many queries in flight"}
}

// failTooLong is for what no query is as long as. One with a signature may be:
// its key is not ours to judge by.
func failTooLong(octets int) failure {
	return failure{dns.RcodeRefused, dns.ExtendedErrorCodeOther, fmt.Sprintf("a query of %d octets is too long", octets)}
}

// failTransfer is REFUSED, not NOTIMP: a transfer is many messages and is
// meant for the zone's own servers (RFC 5936 section 2.2.1), so passing it on
// is declined as a matter of policy.
func failTransfer() failure {
	return failure{dns.RcodeRefused, dns.ExtendedErrorCodeNotSupported, "zone transfers are not forwarded"}
}

// option returns the Extended DNS Error option, RFC 8914 section 2.
func (f failure) option() []byte {
	if f.text == "" {
		return nil
	}
	text := "k2s-dnsbpf: " + f.text
	if len(text) > maxExtraText {
		text = text[:maxExtraText]
	}
	opt := make([]byte, 0, 6+len(text))
	opt = binary.BigEndian.AppendUint16(opt, dns.EDNS0EDE)
	opt = binary.BigEndian.AppendUint16(opt, uint16(2+len(text)))
	opt = binary.BigEndian.AppendUint16(opt, f.code)
	return append(opt, text...)
}
