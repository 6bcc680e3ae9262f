// Command gotest runs `go test` with the given arguments, shows what failed and what was skipped, and ends with the ten
// slowest tests. Where the environment has no K2S_SEED it gives the tests one, so that they all take theirs from it.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			os.Exit(max(1, exit.ExitCode()))
		}
		os.Exit(1)
	}
}

func run(args []string) error {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	seed := os.Getenv("K2S_SEED")
	if seed == "" {
		seed = strconv.Itoa(rand.IntN(1_000_000))
	}
	cmd.Env = append(os.Environ(), "K2S_SEED="+seed)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	// Ctrl-C is for go test, which is in the same group; what it says of its end is still to be shown. Not ignored: that
	// would be inherited.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGINT)
	if err := cmd.Start(); err != nil {
		return err
	}
	s := newSummary(os.Stdout)
	s.read(out)
	err = cmd.Wait()
	s.end()
	fmt.Printf("samples of this run: K2S_SEED=%s\n", seed)
	return err
}

// event is one line of `go test -json`, see `go doc test2json`.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64 // seconds
}

type name struct{ pkg, test string }

// String leaves out what all packages have in common.
func (n name) String() string {
	return strings.TrimPrefix(n.pkg, "github.com/k2s-dnsbpf/k2s-dnsbpf/") + " " + n.test
}

type summary struct {
	w       io.Writer
	output  map[name]*strings.Builder // of tests, and with an empty test of packages, that have not ended
	seconds map[name]float64
	paused  map[name]bool
	skips   []string
}

func newSummary(w io.Writer) *summary {
	return &summary{w: w, output: make(map[name]*strings.Builder), seconds: make(map[name]float64), paused: make(map[name]bool)}
}

// read reads events until there are no more.
func (s *summary) read(r io.Reader) {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		var e event
		switch {
		case json.Unmarshal([]byte(line), &e) == nil:
			s.add(e)
		case line != "": // a build's complaint, for example
			fmt.Fprint(s.w, line)
		}
		if err != nil {
			return
		}
	}
}

func (s *summary) add(e event) {
	n := name{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		fmt.Fprint(s.w, e.Output)
	case "pause", "cont":
		s.paused[n] = e.Action == "pause"
	case "output":
		if s.output[n] == nil {
			s.output[n] = new(strings.Builder)
		}
		s.output[n].WriteString(e.Output)
	case "pass", "fail", "skip":
		s.ended(n, e)
	}
}

func (s *summary) ended(n name, e event) {
	said := ""
	if b := s.output[n]; b != nil {
		said = b.String()
	}
	delete(s.output, n)
	switch {
	case n.test == "": // a package: "ok", or what it said last
		fmt.Fprint(s.w, strings.TrimPrefix(said, "PASS\n"))
		return
	case e.Action == "fail":
		fmt.Fprintf(s.w, "\n%s failed:\n%s", n, said)
	case e.Action == "skip":
		s.skips = append(s.skips, fmt.Sprintf("%s:\n%s", n, said))
	}
	s.seconds[n] = e.Elapsed
}

// end tells of tests that never ended, as after a panic or a time limit, of those that were skipped, and of the slowest.
func (s *summary) end() {
	for n, said := range s.output {
		if s.paused[n] {
			continue
		}
		fmt.Fprintf(s.w, "\n%s did not end:\n%s", n, said)
	}
	if len(s.skips) > 0 {
		fmt.Fprintf(s.w, "\nskipped:\n%s", strings.Join(s.skips, ""))
	}
	var slow []name
	for n, seconds := range s.seconds {
		// A test's time has that of its subtests in it, except of those that run in parallel.
		if i := strings.LastIndexByte(n.test, '/'); i < 0 || seconds > s.seconds[name{n.pkg, n.test[:i]}] {
			slow = append(slow, n)
		}
	}
	slices.SortFunc(slow, func(a, b name) int { return cmp.Compare(s.seconds[b], s.seconds[a]) })
	fmt.Fprintf(s.w, "\nthe slowest of %d tests:\n", len(slow))
	for _, n := range slow[:min(10, len(slow))] {
		fmt.Fprintf(s.w, "%8.2f s  %s\n", s.seconds[n], n)
	}
}
