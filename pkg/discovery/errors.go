package discovery

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// Errors that a caller can act on; match them with errors.Is.
var (
	// ErrNoCluster: no kubeconfig was found and we are not in a pod.
	ErrNoCluster = errors.New("no Kubernetes cluster found")

	// ErrServiceNotFound: the apiserver answers, but has no such Service.
	ErrServiceNotFound = errors.New("no such Service")

	// ErrNoEndpoints: there is nobody to ask.
	ErrNoEndpoints = errors.New("no endpoint that may be asked")

	// ErrUnreachable: the apiserver does not answer.
	ErrUnreachable = errors.New("apiserver unreachable")

	// ErrUnauthorized: the apiserver does not accept our credentials.
	ErrUnauthorized = errors.New("credentials refused")

	// ErrForbidden: the apiserver knows us, but we may not read what we need.
	ErrForbidden = errors.New("not allowed")

	// ErrCertificate: the apiserver's certificate, or ours, is not accepted.
	ErrCertificate = errors.New("certificate not accepted")
)

const remedyUnreachable = "check that it runs and the kubeconfig's server address, or name a CoreDNS with --dns-endpoint"

// problem is an error of the apiserver or on the way to it, told in one line.
type problem struct {
	kind   error  // one of the sentinels, or nil
	why    string // the cause; of two that are the same (see [problem.same]) the first is told
	remedy string
	err    error // as client-go gave it
}

// Error says the cause and the remedy.
func (p *problem) Error() string { return p.why + "; " + p.remedy }

// Unwrap lets errors.Is and errors.As see both the kind and the original.
func (p *problem) Unwrap() []error {
	if p.kind == nil {
		return []error{p.err}
	}
	return []error{p.kind, p.err}
}

// diagnose explains an error of a request. Its text is the same for the same
// cause, so that it can be compared: no ports of ours, no times.
func diagnose(err error) *problem {
	if p, ok := errors.AsType[*problem](err); ok {
		return p
	}
	p := &problem{err: err}
	switch {
	case apierrors.IsUnauthorized(err):
		p.kind = ErrUnauthorized
		p.why = "the apiserver refuses our credentials (401 Unauthorized)"
		p.remedy = "renew the kubeconfig's credentials or name another kubeconfig with --kubeconfig"
	case apierrors.IsForbidden(err):
		p.kind = ErrForbidden
		p.why = "the apiserver forbids the request: " + statusMessage(err)
		p.remedy = "allow list and watch on the Service and on endpointslices in its namespace: apply the RBAC manifest (scripts/rbac.yaml)"
	case apierrors.IsNotFound(err):
		p.why = "what answers does not know the resource (404): " + statusMessage(err)
		p.remedy = "check that the kubeconfig's server is a kube-apiserver of version 1.21 or later"
	case apierrors.IsTooManyRequests(err):
		p.kind = ErrUnreachable
		p.why = "the apiserver is overloaded (429 Too Many Requests)"
		p.remedy = "wait, or name a CoreDNS with --dns-endpoint"
	case apiStatus(err) >= 500:
		p.kind = ErrUnreachable
		p.why = fmt.Sprintf("the apiserver is not well (%d): %s", apiStatus(err), statusMessage(err))
		p.remedy = "look at the apiserver's log, or name a CoreDNS with --dns-endpoint"
	case certificateReason(err) != "":
		p.kind = ErrCertificate
		p.why = "TLS with the apiserver fails: " + certificateReason(err)
		p.remedy = "check server and certificate-authority in the kubeconfig, and this host's clock"
	case networkReason(err) != "":
		p.kind = ErrUnreachable
		p.why = "the apiserver is unreachable: " + networkReason(err)
		p.remedy = remedyUnreachable
	default:
		p.why = "the request fails: " + innermost(err)
		p.remedy = "check the kubeconfig, or name a CoreDNS with --dns-endpoint"
	}
	return p
}

// apiStatus returns the HTTP status of an answer, 0 if there was none.
func apiStatus(err error) int32 {
	var s apierrors.APIStatus
	if errors.As(err, &s) {
		return s.Status().Code
	}
	return 0
}

func statusMessage(err error) string {
	var s apierrors.APIStatus
	if errors.As(err, &s) {
		return oneLine(errors.New(s.Status().Message)).Error()
	}
	return innermost(err)
}

// certificateReason is empty if err is not about TLS.
func certificateReason(err error) string {
	if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok && e.Reason == x509.Expired {
		return validity(e.Cert)
	}
	if e, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return oneLine(e.Err).Error()
	}
	if e, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return e.Error()
	}
	if e, ok := errors.AsType[x509.HostnameError](err); ok {
		return oneLine(e).Error()
	}
	if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
		return e.Error()
	}
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "remote error" {
		return "the server refuses our side: " + e.Err.Error()
	}
	if e, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return e.Msg + " (does the server speak plain HTTP?)"
	}
	// net/http replaces the record header error by one without a type.
	if msg := innermost(err); strings.HasSuffix(msg, "server gave HTTP response to HTTPS client") {
		return "the server speaks plain HTTP"
	}
	return ""
}

// validity says why a certificate is not valid now. x509's own text has the present time, another one at each try.
func validity(c *x509.Certificate) string {
	switch {
	case c == nil:
		return "its certificate has expired or is not valid yet"
	case time.Now().Before(c.NotBefore):
		return "its certificate is not valid yet: this host's clock is behind, or its own is ahead"
	default:
		return "its certificate has expired, or this host's clock is ahead"
	}
}

// steady is a text without what may be another one at each try: words with a digit in them, as times, ports, counts and
// IDs have.
func steady(text string) string {
	word := func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("-_.:+", r)
	}
	words := strings.FieldsFunc(text, word)
	for i, w := range words {
		if strings.ContainsFunc(w, unicode.IsDigit) {
			words[i] = "#"
		}
	}
	return strings.Join(words, " ")
}

// same reports whether two problems are one, but for what changes from try to try.
func (p *problem) same(o *problem) bool {
	return errors.Is(p.kind, o.kind) && apiStatus(p.err) == apiStatus(o.err) && steady(p.why) == steady(o.why)
}

// networkReason is empty if err is not about reaching the server.
func networkReason(err error) string {
	if e, ok := errors.AsType[*net.DNSError](err); ok {
		return fmt.Sprintf("its name %s can't be resolved: %s", e.Name, e.Err)
	}
	// Before the timeouts: some errno are timeouts too, and say more.
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) || utilnet.IsTimeout(err) {
		return "it does not answer in time"
	}
	if utilnet.IsProbableEOF(err) || utilnet.IsHTTP2ConnectionLost(err) {
		return "it closes the connection"
	}
	// net/http keeps these types of HTTP/2 to itself, and puts stream numbers
	// into their texts.
	for _, part := range []string{"stream error: stream ID", "http2: server sent GOAWAY"} {
		if strings.Contains(err.Error(), part) {
			return "it breaks the request off"
		}
	}
	return ""
}

// innermost returns the text of err without what net/http and net put around it
// (method, URL, our own port), on one line.
func innermost(err error) string {
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err
	}
	if e, ok := errors.AsType[*net.OpError](err); ok {
		err = e.Err
	}
	return oneLine(err).Error()
}

// lineError is an error whose text has been put on one line.
type lineError struct {
	text string
	err  error
}

func (e *lineError) Error() string { return e.text }
func (e *lineError) Unwrap() error { return e.err }

// oneLine keeps err as it is but for line breaks and runs of blanks in its text, and
// what a terminal would not show but obey: servers and files have their say in it.
func oneLine(err error) error {
	text := printable(strings.Join(strings.Fields(err.Error()), " "))
	if text == err.Error() {
		return err
	}
	return &lineError{text, err}
}

// printable escapes what is not, as Go source does.
func printable(text string) string {
	if !strings.ContainsFunc(text, isControl) && utf8.ValidString(text) {
		return text
	}
	var b strings.Builder
	for _, r := range text {
		if isControl(r) {
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
			continue
		}
		b.WriteRune(r) // invalid UTF-8 becomes the replacement character
	}
	return b.String()
}

func isControl(r rune) bool { return !unicode.IsPrint(r) }

// few lists the first of many names.
func few(names []string) string {
	const most = 5
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
