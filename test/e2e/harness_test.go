package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// patience bounds every wait for something that should come soon; only a failing test needs all of it.
const patience = 30 * time.Second

var (
	hostDNS   = netip.MustParseAddrPort("127.0.0.1:53")
	hostDNS6  = netip.MustParseAddrPort("[::1]:53")
	switchDNS = netip.MustParseAddrPort(lab.KubeSwitch4 + ":53")
)

// Usual settings of an attach in the lab.
var (
	// Without a cache: most tests are about what is steered, and ask the same again and again.
	endpoints  = []string{"--dns-endpoint", lab.CoreDNS0v4, "--dns-endpoint", lab.CoreDNS1v4, "--no-cache"}
	endpoints6 = []string{"--dns-endpoint", lab.CoreDNS0v6, "--dns-endpoint", lab.CoreDNS1v6, "--no-cache"}
	cached     = []string{"--no-cache=false"}
	ranges     = []string{"--service-cidr", lab.ServiceRange4, "--pod-cidr", "172.20.0.0/16"}
	ranges6    = []string{"--service-cidr", lab.ServiceRange6, "--pod-cidr", lab.PodRange6}
)

// host is host0 of a lab and the program under test on it.
type host struct {
	*lab.Lab
	t      *testing.T
	binary string
}

// raise raises a lab for a test that runs beside others: a lab is a world of its own.
func raise(t *testing.T, options lab.Options) *host {
	t.Helper()
	t.Parallel()
	return raiseAlone(t, options)
}

// raiseAlone is raise for a test that needs the machine for itself, since it loads it or counts what must not be lost.
func raiseAlone(t *testing.T, options lab.Options) *host {
	t.Helper()
	binary, err := lab.Binary()
	if err != nil {
		t.Fatal(err)
	}
	h := &host{Lab: lab.Start(t, options), t: t, binary: binary}
	t.Cleanup(h.noRace)
	return h
}

// noRace fails the test if the program has reported a data race, which it looks for as `make test-long` builds it.
func (h *host) noRace() {
	out := command(h.t, h.Host(), "sh", "-c", "cat "+raceLog+".*")
	if out.code == 0 {
		h.t.Errorf("data races: %s", out.stdout)
	}
}

// share is how many of the cases of a long test are run: all, or one in K2S_SAMPLE where CI has less time.
func share(t *testing.T, cases int) int {
	t.Helper()
	text := os.Getenv("K2S_SAMPLE")
	if text == "" {
		return cases
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("K2S_SAMPLE is %q: want a number from 1", text)
	}
	return max(1, cases/n)
}

// in is the same host for a subtest.
func (h *host) in(t *testing.T) *host { return &host{Lab: h.Lab, t: t, binary: h.binary} }

// result is what a command left.
type result struct {
	argv           []string
	stdout, stderr string
	code           int
	took           time.Duration
}

func (r result) String() string {
	return fmt.Sprintf("%s: exit %d after %s\nstdout: %s\nstderr: %s",
		strings.Join(r.argv, " "), r.code, r.took.Round(time.Millisecond), r.stdout, r.stderr)
}

// raceLog is where a program with the race detector writes, followed by a dot and its process.
const raceLog = "/run/lab/race"

// environment of all commands: what this machine's user has set, a kubeconfig above all, must not decide a test.
var environment = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8", "GORACE=atexit_sleep_ms=0 log_path=" + raceLog}

// command runs a command in a node to its end, whatever that is.
func command(t *testing.T, node *lab.Node, argv ...string) result {
	t.Helper()
	return commandEnv(t, node, nil, argv...)
}

func commandEnv(t *testing.T, node *lab.Node, env []string, argv ...string) result {
	t.Helper()
	// Not the test's context: clean-up functions run commands too.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := node.Command(ctx, argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Env = append(append([]string(nil), environment...), env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	begin := time.Now()
	err := cmd.Run()
	r := result{argv: argv, stdout: stdout.String(), stderr: stderr.String(), took: time.Since(begin)}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && ctx.Err() == nil:
		r.code = exit.ExitCode()
	case err != nil:
		t.Fatalf("%v: %v", r, err)
	}
	return r
}

// must runs a command in a node that has to succeed, and returns its standard output.
func must(t *testing.T, node *lab.Node, argv ...string) string {
	t.Helper()
	r := command(t, node, argv...)
	if r.code != 0 {
		t.Fatal(r)
	}
	return r.stdout
}

// run runs the program on host0.
func (h *host) run(args ...string) result {
	h.t.Helper()
	return command(h.t, h.Host(), append([]string{h.binary}, args...)...)
}

// attach attaches host0 to both CoreDNS, or as the arguments say.
func (h *host) attach(args ...[]string) {
	h.t.Helper()
	if len(args) == 0 {
		args = [][]string{endpoints, ranges}
	}
	argv := []string{"attach"}
	for _, a := range args {
		argv = append(argv, a...)
	}
	if !slices.Contains(argv, cached[0]) {
		argv = append(argv, "--no-cache")
	}
	if r := h.run(argv...); r.code != 0 {
		h.t.Fatal(r)
	}
}

func (h *host) detach() {
	h.t.Helper()
	if r := h.run("detach", "--linger", "0"); r.code != 0 {
		h.t.Fatal(r)
	}
}

// report is the part of `status -o json` that tests look at. It is written down here a second time on purpose: the
// names are a contract.
type report struct {
	Attached bool     `json:"attached"`
	Healthy  bool     `json:"healthy"`
	PID      int      `json:"pid"`
	Problems []string `json:"problems"`
	Guardian struct {
		PID      int        `json:"pid"`
		Restarts int        `json:"restarts"`
		Restored *time.Time `json:"restored"`
	} `json:"guardian"`
	Resolver struct {
		State     string   `json:"state"`
		File      string   `json:"file"`
		Upstreams []string `json:"upstreams"`
		Search    []string `json:"search"`
		SteeredAt []string `json:"steered_at"`
	} `json:"resolver"`
	Zones []struct {
		Name string `json:"name"`
	} `json:"zones"`
	Forwarder struct {
		Listen   []string `json:"listen"`
		Queries  uint64   `json:"queries"`
		Failures uint64   `json:"failures"`
	} `json:"forwarder"`
	Counters map[string]struct {
		Steered  uint64 `json:"steered"`
		Answered uint64 `json:"answered"`
		Passed   uint64 `json:"passed"`
	} `json:"counters"`
	Reasons  map[string]map[string]uint64 `json:"reasons"`
	Datapath struct {
		Events []struct {
			What   string `json:"what"`
			Action string `json:"action"`
			Count  int    `json:"count"`
		} `json:"events"`
	} `json:"datapath"`
	Lingering *struct {
		PID    int       `json:"pid"`
		Until  time.Time `json:"until"`
		Listen []string  `json:"listen"`
	} `json:"lingering"`
}

// packets is how many packets of queries the kernel has judged in a scope.
func (r report) packets(scope string) (sum uint64) {
	for reason, n := range r.Reasons[scope] {
		if reason == "steered" || strings.HasPrefix(reason, "passed_") || strings.HasPrefix(reason, "refused_") || strings.HasPrefix(reason, "error_") {
			sum += n
		}
	}
	return sum
}

func (h *host) status() report {
	h.t.Helper()
	var r report
	out := h.run("status", "-o", "json")
	if err := json.Unmarshal([]byte(out.stdout), &r); err != nil {
		h.t.Fatalf("%v: %v", out, err)
	}
	return r
}

// answered is the report of a daemon that lives. On a busy machine that may need more than the second that status gives it.
func (h *host) answered() report {
	h.t.Helper()
	r := h.status()
	for end := time.Now().Add(patience); len(r.Problems) == 1 && strings.HasPrefix(r.Problems[0], "the daemon does not answer within") && time.Now().Before(end); {
		r = h.status()
	}
	return r
}

// healthy is the report of an attached host that must be well.
func (h *host) healthy() report {
	h.t.Helper()
	r := h.answered()
	if !r.Attached || !r.Healthy || r.PID == 0 {
		h.t.Fatalf("not attached and healthy: %+v", r)
	}
	return r
}

// signal sends a signal, by name, to processes of host0. After STOP all their threads stand still, or are gone.
func (h *host) signal(name string, pids ...int) {
	h.t.Helper()
	list := strings.Trim(fmt.Sprint(pids), "[]")
	must(h.t, h.Host(), "sh", "-c", "kill -"+name+" "+list)
	if name != "STOP" {
		return
	}
	eventually(h.t, "the processes "+list+" have stopped", func() error {
		states := command(h.t, h.Host(), "ps", "-L", "-o", "state=", "-p", list).stdout
		if strings.Trim(states, "TZ\n") != "" {
			return fmt.Errorf("their threads are %q", states)
		}
		return nil
	})
}

// kill ends the daemon as the kernel's memory killer would, and waits until it is gone, and its guardian too: that one
// has put the resolver file back then.
func (h *host) kill() {
	h.t.Helper()
	r := h.answered()
	if r.PID == 0 {
		h.t.Fatalf("no daemon to kill: %+v", r)
	}
	h.signal("KILL", r.PID)
	h.ended(r.PID, r.Guardian.PID)
}

// killBoth ends the daemon and its guardian at once, so that neither can do anything about it.
func (h *host) killBoth() {
	h.t.Helper()
	r := h.answered()
	if r.PID == 0 || r.Guardian.PID == 0 {
		h.t.Fatalf("no daemon or no guardian to kill: %+v", r)
	}
	must(h.t, h.Host(), "sh", "-c", fmt.Sprintf("kill -STOP %[1]d %[2]d; kill -KILL %[1]d %[2]d", r.PID, r.Guardian.PID))
	h.ended(r.PID, r.Guardian.PID)
}

// ended waits until processes of host0 are gone. A process 0 is none.
func (h *host) ended(pids ...int) {
	h.t.Helper()
	eventually(h.t, fmt.Sprintf("the processes %v are gone", pids), func() error {
		return h.Host().Do(func() error {
			for _, pid := range pids {
				switch _, err := os.Stat("/proc/" + strconv.Itoa(pid)); {
				case err == nil:
					return fmt.Errorf("%d is there", pid)
				case !errors.Is(err, fs.ErrNotExist):
					return err
				}
			}
			return nil
		})
	})
}

// snapshot of host0, see lab.Node.Snapshot.
func (h *host) snapshot() string {
	h.t.Helper()
	s, err := h.Host().Snapshot(context.Background())
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

// kubeletFile stays after a detach, for pods that were started with it; so does the directory that it is in.
const kubeletFile = "/var/lib/k2s-dnsbpf/kubelet-resolv.conf"

// unchanged fails the test if host0 is not as before. What an attach that succeeded leaves on purpose is no change.
func (h *host) unchanged(before string) {
	h.t.Helper()
	h.unchangedBut(before, kubeletFile, "/var/lib/k2s-dnsbpf")
}

// unchangedBut is unchanged with the files that may be new.
func (h *host) unchangedBut(before string, allowed ...string) {
	h.t.Helper()
	var diff strings.Builder
lines:
	for line := range strings.Lines(lab.Diff(before, h.snapshot())) {
		for _, path := range allowed {
			if strings.HasPrefix(line, "+ host0 | file | "+path+" ") {
				continue lines
			}
		}
		diff.WriteString(line)
	}
	if diff.Len() > 0 {
		h.t.Errorf("the host is not as before:\n%s", &diff)
	}
}

// eventually waits until check says that something has come about which nobody announces.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	eventuallyIn(t, patience, what, check)
}

func eventuallyIn(t *testing.T, limit time.Duration, what string, check func() error) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	// Ever longer: most checks run a program, and tests that wait must not take the processors from those that work.
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-time.After(pause):
		case <-deadline.C:
			t.Fatalf("waited %s until %s: %v", limit, what, err)
		}
	}
}

// listenUDP opens a socket of a node. It is not connected: a connected one would hide replies from elsewhere.
func listenUDP(node *lab.Node, address string) (*net.UDPConn, error) {
	var conn *net.UDPConn
	err := node.Do(func() error {
		local, err := net.ResolveUDPAddr("udp", address)
		if err != nil {
			return err
		}
		conn, err = net.ListenUDP("udp", local)
		return err
	})
	return conn, err
}

// ask sends one datagram from a socket of its own and returns the reply, nil if none came in time. A reply from any
// other address than the one that was asked is an error.
func ask(from *lab.Node, server netip.AddrPort, payload []byte, wait time.Duration) ([]byte, error) {
	local := "0.0.0.0"
	if server.Addr().Is6() {
		local = "::"
	}
	return askAs(from, local, server, payload, wait)
}

// queries is how many queries servers have seen.
func queries(t *testing.T, servers ...*lab.Server) (sum uint64) {
	t.Helper()
	for _, s := range servers {
		n, err := s.Queries(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}

func (h *host) outside() []*lab.Server { return []*lab.Server{h.External(0), h.External(1)} }

func (h *host) cluster() []*lab.Server { return []*lab.Server{h.CoreDNS(0), h.CoreDNS(1)} }
