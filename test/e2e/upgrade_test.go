package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// newer returns the program built as another version, "newer", once for all tests.
func newer(t *testing.T) (binary string) {
	t.Helper()
	binary, err := buildNewer()
	if err != nil {
		t.Fatal(err)
	}
	return binary
}

var buildNewer = sync.OnceValues(func() (binary string, err error) {
	binary, err = filepath.Abs(filepath.Join("..", "..", "bin", "k2s-dnsbpf-newer"))
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=newer", "-o", binary, "./cmd/k2s-dnsbpf")
	build.Dir = filepath.Join("..", "..")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return binary, nil
})

// TestUpgrade: an attach by another version takes the place of the daemon, and back again, and no query is lost.
func TestUpgrade(t *testing.T) {
	newer := newer(t)
	for name, args := range map[string][]string{"takeover": nil, "without BPF": {"--no-bpf"}} {
		t.Run(name, func(t *testing.T) {
			h := raiseAlone(t, lab.Options{})
			before := h.snapshot()
			h.attach(endpoints, ranges, args)
			pid := h.healthy().PID
			loads := []*load{
				startLoad(t, h.Host(), hostDNS, lab.Backend, lab.Backend4, 2*time.Millisecond),
				startLoad(t, h.Host(), hostDNS, lab.WWW, lab.WWW4, 5*time.Millisecond),
				startLoad(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4, 2*time.Millisecond),
			}
			loads[0].more(t, 50)
			for _, binary := range []string{newer, h.binary} {
				if r := command(t, h.Host(), binary, "status"); !strings.Contains(r.stdout, "VERSION") {
					t.Errorf("status does not tell of two versions: %v", r)
				}
				must(t, h.Host(), append([]string{binary}, attachArgs(args...)...)...)
				now := h.healthy().PID
				if now == pid {
					t.Errorf("process %d is still the daemon", pid)
				}
				h.ended(pid)
				pid = now
				if r := command(t, h.Host(), binary, "status"); r.code != 0 || strings.Contains(r.stdout, "VERSION") {
					t.Errorf("%v", r)
				}
				for _, l := range loads {
					l.more(t, 50)
				}
				h.works()
			}
			for i, l := range loads {
				sent, lost, failed := l.finish()
				if len(lost) > 0 || failed > 0 {
					t.Errorf("load %d: %d of %d lost, %d failed", i, len(lost), sent, failed)
				}
			}
			h.detach()
			h.unchanged(before)
		})
	}
}

// TestUpgradeFails: where the successor can't attach the old daemon stays, or comes back.
func TestUpgradeFails(t *testing.T) {
	newer := newer(t)
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	h.healthy()
	r := command(t, h.Host(), newer, "attach", "--dns-endpoint", "198.51.100.77", "--wait", "2s")
	if r.code != 1 || !strings.Contains(r.stderr, "self-test") {
		t.Errorf("%v", r)
	}
	eventually(t, "the old one is back", func() error {
		if r := h.run("status"); r.code != 0 {
			return context.DeadlineExceeded
		}
		return nil
	})
	h.works()
	h.detach()
	h.unchanged(before)
}

// TestUpgradeOfService: a daemon that a service manager runs starts its successor itself, from the program that a package has put in
// the place of its own, and tells the manager; no query is lost.
func TestUpgradeOfService(t *testing.T) {
	newer := newer(t)
	h := raiseAlone(t, lab.Options{})
	_, unit := unitFile(t, "k2s-dnsbpf.service")
	before := h.snapshot()
	told := h.serviceManager()
	// A link to a directory of each version, as alternatives and Nix have it.
	const program = "/run/store/k2s-dnsbpf"
	sh(t, h.Host(), "mkdir -p /run/store/1 /run/store/2; cp "+h.binary+" /run/store/1/; cp "+newer+" /run/store/2/k2s-dnsbpf; ln -s 1/k2s-dnsbpf "+program)
	argv := slices.Concat([]string{"--no-new-privs", "--bounding-set", unitCapabilities(t, unit), program, "attach", "--foreground"}, endpoints, ranges)
	service := h.started(func(cmd *lab.Cmd) { cmd.Env = append(slices.Clone(cmd.Env), "NOTIFY_SOCKET=/run/notify") }, append([]string{"setpriv"}, argv...)...)
	told("READY=1")
	pid := h.healthy().PID
	loads := []*load{
		startLoad(t, h.Host(), hostDNS, lab.Backend, lab.Backend4, 2*time.Millisecond),
		startLoad(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4, 2*time.Millisecond),
	}
	loads[0].more(t, 50)

	// The package is not there yet: whoever attaches is told so, and the service goes on as it was.
	if r := command(t, h.Host(), append([]string{newer}, attachArgs()...)...); r.code != 1 || !strings.Contains(r.stderr, "install this one in its place") {
		t.Errorf("%v", r)
	}
	told("READY=1", "MAINPID=")
	again := h.healthy().PID
	sh(t, h.Host(), "ln -sfn 2/k2s-dnsbpf "+program)
	must(t, h.Host(), append([]string{program}, attachArgs()...)...)
	now := h.healthy()
	if now.PID == pid || now.PID == again {
		t.Errorf("the daemon is process %d as it was", now.PID)
	}
	if r := command(t, h.Host(), newer, "status"); r.code != 0 || strings.Contains(r.stdout, "VERSION") {
		t.Errorf("it is of another version: %v", r)
	}
	told("READY=1", fmt.Sprintf("MAINPID=%d", now.PID))
	if err := service.Wait(); err != nil {
		t.Error(err)
	}
	h.ended(pid, again)
	h.works()
	for i, l := range loads {
		l.more(t, 50)
		if sent, lost, failed := l.finish(); len(lost) > 0 || failed > 0 {
			t.Errorf("load %d: %d of %d lost, %d failed", i, len(lost), sent, failed)
		}
	}
	h.detach()
	sh(t, h.Host(), "rm -r /run/store /run/notify")
	h.unchanged(before)
}
