package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestKubernetesBadEndpoints: whatever one address of a slice is, the others are followed, before and after, and status says what is
// left out. None of them may have a query go where no cluster name belongs.
func TestKubernetesBadEndpoints(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	h.attach(discovered, ranges)
	h.follows(patience, lab.CoreDNS0v4, lab.CoreDNS1v4)
	outside := queries(t, h.outside()...)
	good := []string{lab.CoreDNS1v4}
	for _, bad := range []string{
		lab.KubeSwitch4, lab.External0, "172.20.255.255", // an own address, an upstream server, a broadcast address
		"0.0.0.1", "240.0.0.1", "255.255.255.255", // which no apiserver refuses
	} {
		setEndpoints(t, c, bad, lab.CoreDNS0v4)
		h.follows(patience, lab.CoreDNS0v4)
		eventually(t, "status says that "+bad+" is left out", func() error {
			if out := h.run("status").stdout; !strings.Contains(out, "endpoint "+bad) || !strings.Contains(out, "is left out") {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
		for range 4 {
			resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		}
		setEndpoints(t, c, good...)
		h.follows(patience, good...)
	}
	if problems := h.status().Problems; slices.ContainsFunc(problems, func(p string) bool { return strings.Contains(p, "set routes") }) {
		t.Errorf("problems %q", problems)
	}
	if n := queries(t, h.outside()...) - outside; n != 0 {
		t.Errorf("the external servers saw %d queries", n)
	}
	h.healthy()
}
