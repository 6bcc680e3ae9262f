package e2e

import (
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestDetachGrace: a program that has read resolv.conf just before a detach asks 127.0.0.1 a moment after it. It has to
// get its answer for some time yet, and then a refusal: silence would cost it a timeout.
func TestDetachGrace(t *testing.T) {
	h := raiseAlone(t, lab.Options{})
	h.attach()
	query := pack(t, 7, lab.WWW, dns.TypeA)
	var (
		mu               sync.Mutex
		silent, refused  int
		restored, answer time.Time // when the file was seen restored; when the last query that got an answer was sent
		readers, asker   sync.WaitGroup
	)
	stop := make(chan struct{})
	asker.Go(func() {
		// All on one thread of the node, for the pace.
		if err := h.Host().Do(func() error {
			for pace := time.NewTicker(time.Millisecond); ; {
				select {
				case <-stop:
					pace.Stop()
					return nil
				case <-pace.C:
				}
				if content, err := os.ReadFile("/etc/resolv.conf"); restored.IsZero() && err == nil && string(content) == lab.HostResolvConf {
					restored = time.Now()
				}
				conn, err := net.Dial("udp", hostDNS.String())
				if err != nil {
					return err
				}
				sent := time.Now()
				if _, err := conn.Write(query); err != nil {
					return err
				}
				readers.Go(func() {
					defer conn.Close()
					_ = conn.SetReadDeadline(sent.Add(patience / 3))
					_, err := conn.Read(make([]byte, 512))
					mu.Lock()
					defer mu.Unlock()
					switch {
					case err == nil && sent.After(answer):
						answer = sent
					case errors.Is(err, syscall.ECONNREFUSED):
						refused++
					case err != nil:
						silent++
					}
				})
			}
		}); err != nil {
			t.Error(err)
		}
	})
	out := h.run("detach", "--linger", "0")
	if out.code != 0 || !strings.Contains(out.stdout, "detached") {
		t.Errorf("detach: %v", out)
	}
	eventually(t, "the port is closed", func() error {
		mu.Lock()
		defer mu.Unlock()
		if refused == 0 {
			return errors.New("no refusal yet")
		}
		return nil
	})
	close(stop)
	asker.Wait()
	readers.Wait()
	grace := answer.Sub(restored)
	t.Logf("detach took %s; queries were answered for %s after the restoration; %d got no answer, %d a refusal", out.took, grace, silent, refused)
	// What arrives between the last read from a socket and its end is lost without a word: some on a calm machine, and on
	// a busy one what comes while the daemon waits for its turn.
	const unavoidable = 50
	if silent > unavoidable {
		t.Errorf("%d queries, one sent each millisecond, got neither an answer nor a refusal", silent)
	}
	if grace <= 0 {
		t.Error("no query was answered after the restoration")
	}
}
