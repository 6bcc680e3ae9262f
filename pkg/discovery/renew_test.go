package discovery

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// renewals are timeouts with which a kubeconfig is read again soon, or only when we are refused.
func renewals(soon bool) timeouts {
	t := defaultTimeouts
	t.renew = time.Hour
	if soon {
		t.renew = 20 * time.Millisecond
	}
	return t
}

// issuer signs certificates of a test.
type issuer struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newIssuer(t *testing.T) issuer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return issuer{t, cert, key}
}

// client returns a certificate and its key in PEM.
func (a issuer) client(name string) (cert, key []byte) {
	a.t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, a.cert, &private.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	bare, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		a.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: bare})
}

// kubeconfigOf is one for a TLS server.
func kubeconfigOf(srv *httptest.Server, user string) string {
	ca := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}))
	return strings.Replace(kubeconfigFor(srv.URL, user), "}", ", certificate-authority-data: "+ca+"}", 1)
}

// replace puts a file in another's place, as careful programs do.
func replace(t *testing.T, path, content string) {
	t.Helper()
	writeFile(t, path+".new", content)
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// TestRenewedCredentials: what a kubeconfig holds, and the files that it names, is read again; at once if the apiserver
// refuses what we have.
func TestRenewedCredentials(t *testing.T) {
	for name, soon := range map[string]bool{"when refused": false, "now and then": true} {
		for _, where := range []string{"token", "token file"} {
			t.Run(where+" "+name, func(t *testing.T) {
				api := newAPI(t)
				srv := quietServer(t, api.ServeHTTP, (*httptest.Server).StartTLS)
				file := filepath.Join(t.TempDir(), "kubeconfig")
				write := func(token string) {
					if where == "token" {
						replace(t, file, kubeconfigOf(srv, "{token: "+token+"}"))
						return
					}
					replace(t, file+".token", token+"\n")
				}
				writeFile(t, file, kubeconfigOf(srv, "{tokenFile: kubeconfig.token}"))
				write("secret-token")
				w, _, stop := watchFor(t, file, renewals(soon))
				defer stop()
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				want(t, receive(ctx, t, w), false, "172.20.0.2:53")
				if w.Outdated() {
					t.Error("outdated from the start")
				}
				if soon {
					write("another")
					for w.Outdated() {
						if ctx.Err() != nil {
							t.Fatal("the new token is not taken")
						}
						time.Sleep(time.Millisecond)
					}
				}
				api.mu.Lock()
				api.token = "another"
				api.mu.Unlock()
				if !soon {
					api.endWatches()
					if s := receive(ctx, t, w); !s.Stale || !strings.Contains(s.Reason, "401") {
						t.Errorf("stale %v: %s", s.Stale, s.Reason)
					}
					write("another")
				}
				api.modify(slice("a", ready("172.20.0.9")))
				for s := receive(ctx, t, w); s.Stale || !slices.Equal(addresses(s), []string{"172.20.0.9:53"}); s = receive(ctx, t, w) {
				}
			})
		}
	}
}

// TestRenewedClientCertificate: in the kubeconfig, or on disk beside it.
func TestRenewedClientCertificate(t *testing.T) {
	for _, inFile := range []bool{false, true} {
		t.Run(fmt.Sprintf("on disk %v", inFile), func(t *testing.T) {
			old, renewed := newIssuer(t), newIssuer(t)
			trust := func(a issuer) *x509.CertPool {
				pool := x509.NewCertPool()
				pool.AddCert(a.cert)
				return pool
			}
			api := newAPI(t)
			api.token = ""
			pools := make(chan *x509.CertPool, 1)
			pools <- trust(old)
			srv := quietServer(t, api.ServeHTTP, func(s *httptest.Server) {
				s.TLS = &tls.Config{}
				s.StartTLS()
				base := s.TLS.Clone()
				s.TLS.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
					pool := <-pools
					pools <- pool
					c := base.Clone()
					c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, pool
					return c, nil
				}
			})
			file := filepath.Join(t.TempDir(), "kubeconfig")
			write := func(a issuer) {
				cert, key := a.client("host")
				if inFile {
					replace(t, file+".key", string(key))
					replace(t, file+".crt", string(cert))
					writeFile(t, file, kubeconfigOf(srv, "{client-certificate: kubeconfig.crt, client-key: kubeconfig.key}"))
					return
				}
				replace(t, file, kubeconfigOf(srv, fmt.Sprintf("{client-certificate-data: %s, client-key-data: %s}",
					base64.StdEncoding.EncodeToString(cert), base64.StdEncoding.EncodeToString(key))))
			}
			write(old)
			w, warned, stop := watchFor(t, file, renewals(false))
			defer stop()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			want(t, receive(ctx, t, w), false, "172.20.0.2:53")
			<-pools
			pools <- trust(renewed)
			srv.CloseClientConnections()
			select {
			case <-warned:
			case <-ctx.Done():
				t.Fatal("not refused")
			}
			write(renewed)
			api.modify(slice("a", ready("172.20.0.9")))
			for s := receive(ctx, t, w); s.Stale || !slices.Equal(addresses(s), []string{"172.20.0.9:53"}); s = receive(ctx, t, w) {
			}
		})
	}
}

// TestAnotherCluster: a cluster that was installed anew has another address and another authority.
func TestAnotherCluster(t *testing.T) {
	first, second := newAPI(t), newAPI(t)
	second.modify(slice("a", ready("172.20.0.9")))
	one := quietServer(t, first.ServeHTTP, (*httptest.Server).StartTLS)
	other := quietServer(t, second.ServeHTTP, (*httptest.Server).StartTLS)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	writeFile(t, file, kubeconfigOf(one, "{token: secret-token}"))
	w, _, stop := watchFor(t, file, renewals(true))
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	want(t, receive(ctx, t, w), false, "172.20.0.2:53")

	replace(t, file, brokenConfig)
	s := receive(ctx, t, w)
	want(t, s, false, "172.20.0.2:53")
	if len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "the old one stays in use") || !w.Outdated() {
		t.Errorf("problems %q of a broken kubeconfig", s.Problems)
	}
	replace(t, file, kubeconfigOf(other, "{token: secret-token}"))
	for s = receive(ctx, t, w); !slices.Equal(addresses(s), []string{"172.20.0.9:53"}); s = receive(ctx, t, w) {
	}
	if len(s.Problems) > 0 || s.Stale || w.Outdated() {
		t.Errorf("problems %q, stale %v", s.Problems, s.Stale)
	}

	// One that does not answer: what is known stays, and is no longer confirmed.
	gone := quietServer(t, second.ServeHTTP, (*httptest.Server).StartTLS)
	gone.Close()
	replace(t, file, kubeconfigOf(gone, "{token: secret-token}"))
	for s = receive(ctx, t, w); !s.Stale; s = receive(ctx, t, w) {
	}
	want(t, s, true, "172.20.0.9:53")
}
