package discovery

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// patience bounds what a test waits for; it is not a pause.
const patience = 20 * time.Second

// serverKubeconfig writes a kubeconfig for a TLS test server and returns its path.
func serverKubeconfig(t *testing.T, server string, ca *x509.Certificate) string {
	t.Helper()
	authority := ""
	if ca != nil {
		authority = ", certificate-authority-data: " + base64.StdEncoding.EncodeToString(
			pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw}))
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	writeFile(t, path, fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {server: %q%s}\n"+
		"users:\n- name: u\n  user: {token: secret-token}\ncontexts:\n- name: x\n  context: {cluster: c, user: u}\ncurrent-context: x\n", server, authority))
	return path
}

// quietServer is an httptest server that keeps its complaints to itself.
func quietServer(t *testing.T, h http.HandlerFunc, start func(*httptest.Server)) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.EnableHTTP2 = true // as an apiserver
	start(s)
	t.Cleanup(s.Close)
	return s
}

// watchFor runs a Watcher for a kubeconfig. warned gets the first warning.
func watchFor(t *testing.T, kubeconfig string, d timeouts) (w *Watcher, warned <-chan string, stop func()) {
	t.Helper()
	first := make(chan string, 1)
	logger := zap.New(warnCore{zapcore.NewNopCore(), first})
	w, err := newFromKubeconfig(Options{
		Kubeconfig: kubeconfig, Env: noEnv, Logger: logger, NoCorefile: true, NoServiceCIDRs: true, NoPodCIDRs: true,
	}, d)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			t.Error("Run did not return")
		}
	})
	t.Cleanup(stop)
	return w, first, stop
}

// warnCore passes the first warning on, as an event to wait for.
type warnCore struct {
	zapcore.Core
	first chan<- string
}

func (c warnCore) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }
func (c warnCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c warnCore) Write(e zapcore.Entry, _ []zapcore.Field) error {
	select {
	case c.first <- e.Message:
	default:
	}
	return nil
}

func TestTransportErrors(t *testing.T) {
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(metav1.Status{
				TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
				Code: int32(code), Reason: reasonOf(code), Message: "as the\napiserver says",
			})
		}
	}
	startTLS := (*httptest.Server).StartTLS
	trusted := func(s *httptest.Server) (string, *x509.Certificate) { return s.URL, s.Certificate() }
	other := func(*httptest.Server) (string, *x509.Certificate) { return closedURL(t), nil }

	tests := []struct {
		name    string
		handler http.HandlerFunc
		start   func(*httptest.Server)
		use     func(*httptest.Server) (string, *x509.Certificate)
		is      error
		parts   []string
	}{
		{"refused", nil, startTLS, other, ErrUnreachable, []string{"unreachable: connection refused", "--dns-endpoint"}},
		{"401", status(401), startTLS, trusted, ErrUnauthorized, []string{"401", "renew the kubeconfig's credentials"}},
		{"403", status(403), startTLS, trusted, ErrForbidden, []string{"as the apiserver says", "RBAC"}},
		{"404", status(404), startTLS, trusted, nil, []string{"404", "kube-apiserver"}},
		{"429", status(429), startTLS, trusted, ErrUnreachable, []string{"overloaded"}},
		{"500", status(500), startTLS, trusted, ErrUnreachable, []string{"not well (500)"}},
		{"unknown authority", status(200), startTLS, func(s *httptest.Server) (string, *x509.Certificate) { return s.URL, nil },
			ErrCertificate, []string{"unknown authority", "certificate-authority"}},
		{"another name", status(200), startTLS, func(s *httptest.Server) (string, *x509.Certificate) {
			return strings.Replace(s.URL, "127.0.0.1", "127.0.0.2", 1), s.Certificate()
		}, ErrCertificate, []string{"127.0.0.2", "certificate-authority"}},
		{"plain HTTP", status(200), (*httptest.Server).Start, func(s *httptest.Server) (string, *x509.Certificate) {
			return strings.Replace(s.URL, "http:", "https:", 1), nil
		}, ErrCertificate, []string{"plain HTTP"}},
		{"closes the connection", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, startTLS, trusted,
			ErrUnreachable, []string{"it breaks the request off", "--dns-endpoint"}},
		{"not an apiserver", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, "<html>\nwelcome</html>")
		}, startTLS, trusted, nil, []string{"the request fails", "kubeconfig"}},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			srv := quietServer(t, tc.handler, func(s *httptest.Server) {
				if tc.name == "another name" {
					l, err := net.Listen("tcp", "0.0.0.0:0")
					if err != nil {
						t.Fatal(err)
					}
					s.Listener.Close()
					s.Listener = l
				}
				tc.start(s)
				s.URL = strings.Replace(s.URL, "[::]", "127.0.0.1", 1)
			})
			url, ca := tc.use(srv)
			kubeconfig := serverKubeconfig(t, url, ca)
			w, warned, stop := watchFor(t, kubeconfig, defaultTimeouts)
			defer stop()

			// As soon as the error has come up, the caller's time is over.
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			go func() {
				select {
				case <-warned:
				case <-ctx.Done():
				}
				cancel()
			}()
			s, err := w.WaitForSync(ctx)
			if err == nil {
				t.Fatalf("synced: %v", s)
			}
			checkLine(t, err, append(tc.parts, "kube-system/kube-dns", url, kubeconfig)...)
			if tc.is != nil && !errors.Is(err, tc.is) {
				t.Errorf("error %v is not %v", err, tc.is)
			}
			if strings.Contains(err.Error(), "secret-token") {
				t.Error("the token is in the error")
			}
			if w.LastError() == nil {
				t.Error("no last error")
			}
			if _, ok := w.Current(); ok {
				t.Error("a snapshot from nowhere")
			}
		})
	}
}

func reasonOf(code int) metav1.StatusReason {
	switch code {
	case 401:
		return metav1.StatusReasonUnauthorized
	case 403:
		return metav1.StatusReasonForbidden
	case 404:
		return metav1.StatusReasonNotFound
	case 429:
		return metav1.StatusReasonTooManyRequests
	}
	return metav1.StatusReasonInternalError
}

// closedURL is the address of a port that nobody listens on.
func closedURL(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "https://" + l.Addr().String()
}

// TestSlowApiserver: it takes the request and never answers.
func TestSlowApiserver(t *testing.T) {
	asked := make(chan struct{}, 16)
	hold := make(chan struct{})
	srv := quietServer(t, func(_ http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		select {
		case <-hold:
		case <-r.Context().Done():
		}
	}, (*httptest.Server).StartTLS)
	defer close(hold)
	w, _, stop := watchFor(t, serverKubeconfig(t, srv.URL, srv.Certificate()), defaultTimeouts)
	defer stop()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	_, err := w.WaitForSync(ctx)
	if !errors.Is(err, ErrUnreachable) || !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	checkLine(t, err, "has not answered yet", "--wait", srv.URL)
	start := time.Now()
	stop()
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("stopping amid a request took %v", d)
	}
}

// TestDeadlines: no request outlives its deadline, whatever the server does.
func TestDeadlines(t *testing.T) {
	tests := []struct {
		name    string
		answers func(r *http.Request) bool // lists, or watches, are answered
		t       timeouts
		reason  string
	}{
		{"list", func(*http.Request) bool { return false }, timeouts{list: 50 * time.Millisecond, open: time.Minute, renew: time.Hour}, "does not answer in time"},
		{"opening of a watch", func(r *http.Request) bool { return r.URL.Query().Get("watch") == "" }, timeouts{list: time.Minute, open: 50 * time.Millisecond, renew: time.Hour}, "does not answer in time"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			api := newAPI(t)
			srv := quietServer(t, func(w http.ResponseWriter, r *http.Request) {
				if tc.answers(r) {
					api.ServeHTTP(w, r)
					return
				}
				<-r.Context().Done() // ends when the client gives up
			}, (*httptest.Server).StartTLS)
			w, warned, stop := watchFor(t, serverKubeconfig(t, srv.URL, srv.Certificate()), tc.t)
			defer stop()
			select {
			case <-warned:
			case <-time.After(patience):
				t.Fatal("no deadline")
			}
			p := w.LastError()
			if !errors.Is(p, ErrUnreachable) || !errors.Is(p, context.DeadlineExceeded) || !strings.Contains(p.Error(), tc.reason) {
				t.Errorf("last error %v, want one with %q", p, tc.reason)
			}
		})
	}
}

// api is a hand-driven apiserver for the two resources: JSON lists and watches.
type api struct {
	t *testing.T

	mu      sync.Mutex
	token   string
	version int
	objects map[string][]runtime.Object       // by resource
	watches map[chan metav1.WatchEvent]string // open ones, and their resource
	opened  chan string                       // the resource of each watch that opens
}

func newAPI(t *testing.T) *api {
	return &api{
		t: t, version: 1, token: "secret-token",
		objects: map[string][]runtime.Object{
			resourceServices: {kubeDNS("172.21.0.10")},
			resourceSlices:   {slice("a", ready("172.20.0.2"))},
		},
		watches: map[chan metav1.WatchEvent]string{},
		opened:  make(chan string, 64),
	}
}

// ServeHTTP implements http.Handler.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	token := a.token
	a.mu.Unlock()
	if token != "" && r.Header.Get("Authorization") != "Bearer "+token {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	var list any
	a.mu.Lock()
	meta := metav1.ListMeta{ResourceVersion: fmt.Sprint(a.version)}
	resource := resourceServices
	switch q := r.URL.Query(); r.URL.Path {
	case "/api/v1/namespaces/kube-system/services":
		if q.Get("fieldSelector") != "metadata.name=kube-dns" {
			a.t.Errorf("services asked with %v", q)
		}
		l := corev1.ServiceList{TypeMeta: metav1.TypeMeta{Kind: "ServiceList", APIVersion: "v1"}, ListMeta: meta}
		for _, o := range a.objects[resourceServices] {
			l.Items = append(l.Items, *o.(*corev1.Service))
		}
		list = l
	case "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices":
		if q.Get("labelSelector") != "kubernetes.io/service-name=kube-dns" {
			a.t.Errorf("endpointslices asked with %v", q)
		}
		resource = resourceSlices
		l := discoveryv1.EndpointSliceList{TypeMeta: metav1.TypeMeta{Kind: "EndpointSliceList", APIVersion: "discovery.k8s.io/v1"}, ListMeta: meta}
		for _, o := range a.objects[resourceSlices] {
			l.Items = append(l.Items, *o.(*discoveryv1.EndpointSlice))
		}
		list = l
	default:
		a.t.Errorf("asked for %s", r.URL)
	}
	if r.URL.Query().Get("watch") == "" {
		a.mu.Unlock()
		_ = json.NewEncoder(w).Encode(list)
		return
	}
	events := make(chan metav1.WatchEvent, 16)
	// As an apiserver does: a watch from a version that is yet to come hears of nothing until then.
	if from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion")); from <= a.version {
		a.watches[events] = resource
	}
	a.mu.Unlock()
	w.(http.Flusher).Flush()
	a.opened <- resource
	for {
		select {
		case e, ok := <-events:
			if !ok {
				return
			}
			_ = json.NewEncoder(w).Encode(e)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			a.mu.Lock()
			delete(a.watches, events)
			a.mu.Unlock()
			return
		}
	}
}

// modify replaces the slices and tells the open watches.
func (a *api) modify(s *discoveryv1.EndpointSlice) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	s.TypeMeta = metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"}
	s.ResourceVersion = fmt.Sprint(a.version)
	a.objects[resourceSlices] = []runtime.Object{s}
	for w, resource := range a.watches {
		if resource == resourceSlices {
			w <- metav1.WatchEvent{Type: "MODIFIED", Object: runtime.RawExtension{Object: s}}
		}
	}
}

// TestOverTheWire follows a server over real TLS and HTTP/2, through its loss.
func TestOverTheWire(t *testing.T) {
	api := newAPI(t)
	srv := quietServer(t, api.ServeHTTP, (*httptest.Server).StartTLS)
	w, _, stop := watchFor(t, serverKubeconfig(t, srv.URL, srv.Certificate()), defaultTimeouts)
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := w.WaitForSync(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want(t, s, false, "172.20.0.2:53")
	<-w.Snapshots()

	for opened := ""; opened != resourceSlices; {
		select {
		case opened = <-api.opened:
		case <-ctx.Done():
			t.Fatal("slices are not watched")
		}
	}
	api.modify(slice("a", ready("172.20.0.3")))
	want(t, receive(ctx, t, w), false, "172.20.0.3:53")

	srv.Listener.Close() // first, or the client is back before it closes
	srv.CloseClientConnections()
	s = receive(ctx, t, w)
	want(t, s, true, "172.20.0.3:53")
	if !errors.Is(w.LastError(), ErrUnreachable) {
		t.Errorf("last error %v", w.LastError())
	}
}

// endWatches ends all watches, as an apiserver does after some minutes.
func (a *api) endWatches() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for w := range a.watches {
		close(w)
		delete(a.watches, w)
	}
}

// restore puts another state in place, at any version, and tells nobody.
func (a *api) restore(version int, s *discoveryv1.EndpointSlice) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version = version
	s.TypeMeta = metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"}
	s.ResourceVersion = fmt.Sprint(version)
	a.objects[resourceSlices] = []runtime.Object{s}
}

// TestRestoredCluster: after a restore of etcd, with which versions go back or go on from another past, the endpoints are
// those of the restored state, and changes of that are followed.
func TestRestoredCluster(t *testing.T) {
	for name, version := range map[string]int{"an older version": 50, "the same version": 102, "a newer version": 500} {
		t.Run(name, func(t *testing.T) {
			api := newAPI(t)
			api.version = 100
			srv := quietServer(t, api.ServeHTTP, (*httptest.Server).StartTLS)
			w, _, stop := watchFor(t, serverKubeconfig(t, srv.URL, srv.Certificate()), defaultTimeouts)
			defer stop()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			want(t, receive(ctx, t, w), false, "172.20.0.2:53")
			watched := func() {
				t.Helper()
				for left := 2; left > 0; left-- {
					select {
					case <-api.opened:
					case <-ctx.Done():
						t.Fatal("no watch")
					}
				}
			}
			watched()
			api.modify(slice("a", ready("172.20.0.3")))
			api.modify(slice("a", ready("172.20.0.4")))
			for s := receive(ctx, t, w); addresses(s)[0] != "172.20.0.4:53"; s = receive(ctx, t, w) {
			}
			api.restore(version, slice("a", ready("172.20.0.9")))
			api.endWatches()
			want(t, receive(ctx, t, w), false, "172.20.0.9:53")
			watched()
			api.modify(slice("b", ready("172.20.0.10")))
			for s := receive(ctx, t, w); !slices.Contains(addresses(s), "172.20.0.10:53"); s = receive(ctx, t, w) {
			}
		})
	}
}

// TestRestoredOnce: what a restore leaves as it is brings no event, and is not taken for another restore at each watch after.
func TestRestoredOnce(t *testing.T) {
	api := newAPI(t)
	api.version = 100
	srv := quietServer(t, api.ServeHTTP, (*httptest.Server).StartTLS)
	w, warned, stop := watchFor(t, serverKubeconfig(t, srv.URL, srv.Certificate()), defaultTimeouts)
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	want(t, receive(ctx, t, w), false, "172.20.0.2:53")
	opened := func(what string) {
		t.Helper()
		for left := map[string]bool{resourceServices: true, resourceSlices: true}; len(left) > 0; {
			select {
			case resource := <-api.opened:
				delete(left, resource)
			case <-ctx.Done():
				t.Fatal("no watch", what)
			}
		}
	}
	opened("at first")
	api.mu.Lock()
	api.version = 50
	api.mu.Unlock()
	for i, wantWarning := range []string{"the cluster's data went back, as after a restore of etcd: everything is read again", ""} {
		time.Sleep(1100 * time.Millisecond) // after a watch of less than a second client-go lists anew by itself
		api.endWatches()
		opened("after the restore")
		got := ""
		select {
		case got = <-warned:
		default:
		}
		if got != wantWarning {
			t.Errorf("end %d of the watches: warning %q, want %q", i, got, wantWarning)
		}
	}
}

func receive(ctx context.Context, t *testing.T, w *Watcher) Snapshot {
	t.Helper()
	select {
	case s := <-w.Snapshots():
		return s
	case <-ctx.Done():
		t.Fatalf("no snapshot; last error %v", w.LastError())
		return Snapshot{}
	}
}

func TestDiagnose(t *testing.T) {
	opErr := func(err error) error {
		return &net.OpError{Op: "dial", Net: "tcp", Source: &net.TCPAddr{Port: 45678}, Addr: &net.TCPAddr{Port: 6443}, Err: err}
	}
	tests := []struct {
		name string
		err  error
		is   error
		why  string
	}{
		{"name", opErr(&net.DNSError{Err: "no such host", Name: "api.example.org"}), ErrUnreachable, "its name api.example.org can't be resolved: no such host"},
		{"route", opErr(syscall.EHOSTUNREACH), ErrUnreachable, "no route to host"},
		{"connect timeout", opErr(syscall.ETIMEDOUT), ErrUnreachable, "connection timed out"},
		{"deadline", fmt.Errorf("failed to list: %w", context.DeadlineExceeded), ErrUnreachable, "does not answer in time"},
		{"server refuses our certificate", &net.OpError{Op: "remote error", Err: errors.New("tls: bad certificate")}, ErrCertificate, "refuses our side: tls: bad certificate"},
		{"expired", x509.CertificateInvalidError{Reason: x509.Expired, Cert: &x509.Certificate{NotAfter: time.Now().Add(-time.Hour)}, Detail: "current time 2026-12-01T00:00:00Z is after"},
			ErrCertificate, "TLS with the apiserver fails: its certificate has expired, or this host's clock is ahead;"},
		{"not valid yet", fmt.Errorf("%w", &tls.CertificateVerificationError{Err: x509.CertificateInvalidError{Reason: x509.Expired, Cert: &x509.Certificate{NotBefore: time.Now().Add(time.Hour)}}}),
			ErrCertificate, "not valid yet: this host's clock is behind"},
		{"unknown, on several lines", errors.New("a\n\tb"), nil, "the request fails: a b"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			p := diagnose(tc.err)
			checkLine(t, p, tc.why)
			if tc.is != nil && !errors.Is(p, tc.is) {
				t.Errorf("%v is not %v", p, tc.is)
			}
			if !errors.Is(p, tc.err) {
				t.Error("the original is lost")
			}
			if strings.Contains(p.Error(), "45678") {
				t.Errorf("%q holds a port of ours, so it would differ each time", p)
			}
			if diagnose(fmt.Errorf("again: %w", p)) != p {
				t.Error("diagnosed twice")
			}
		})
	}
}

// TestWatchThatEndsAtOnce: lists are answered, but the connection is closed on
// each watch. client-go makes an empty watch of that, which must not count as an
// apiserver that tells us of changes.
func TestWatchThatEndsAtOnce(t *testing.T) {
	api := newAPI(t)
	srv := quietServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") != "" {
			panic(http.ErrAbortHandler)
		}
		api.ServeHTTP(w, r)
	}, func(s *httptest.Server) {
		s.EnableHTTP2 = false // an EOF, not a stream error
		s.StartTLS()
	})
	w, _, stop := watchFor(t, serverKubeconfig(t, srv.URL, srv.Certificate()), defaultTimeouts)
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience) // client-go tries ten times, a second apart
	defer cancel()
	s := receive(ctx, t, w)
	if !s.Stale { // the first one may come before the watch is tried
		s = receive(ctx, t, w)
	}
	want(t, s, true, "172.20.0.2:53")
	if !errors.Is(w.LastError(), ErrUnreachable) || !strings.Contains(s.Reason, "does not open a watch") {
		t.Errorf("reason %q, last error %v", s.Reason, w.LastError())
	}
}
