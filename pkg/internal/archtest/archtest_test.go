// Package archtest holds the module to its import table, which is the only one: which room may know which, who may use which
// library, and what is there on which operating system.
package archtest

import (
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/k2s-dnsbpf/k2s-dnsbpf/"

// root is the module's directory.
var root = filepath.Join("..", "..", "..")

// leaves are for every room.
var leaves = []string{"pkg/answers/ready", "pkg/internal/errno", "pkg/internal/peer", "pkg/internal/privilege", "pkg/internal/safefile", "pkg/internal/say"}

// rooms says which packages of ours, besides leaves, each package may import, on whichever operating system. Rooms below the daemon know
// only leaves; the daemon joins them. Packages of the test module need no row if they import none of ours.
var rooms = map[string][]string{
	"cmd/k2s-dnsbpf":             {"pkg/client", "pkg/config", "pkg/control", "pkg/daemon", "pkg/diagnose", "pkg/guardian", "pkg/host", "pkg/rundir", "pkg/status"},
	"pkg/answers":                {"pkg/answers/coherence", "pkg/cluster", "pkg/status"},
	"pkg/answers/coherence":      {"pkg/cluster"},
	"pkg/answers/ready":          {},
	"pkg/client":                 {"pkg/config", "pkg/control", "pkg/datapath", "pkg/diagnose", "pkg/discovery", "pkg/forwarder", "pkg/guardian", "pkg/handover", "pkg/host", "pkg/netdev", "pkg/plan", "pkg/resolvconf", "pkg/rundir", "pkg/state", "pkg/status"},
	"pkg/cluster":                {},
	"pkg/config":                 {},
	"pkg/control":                {"pkg/config", "pkg/rundir", "pkg/state", "pkg/status"},
	"pkg/daemon":                 {"pkg/answers", "pkg/answers/coherence", "pkg/cluster", "pkg/config", "pkg/control", "pkg/datapath", "pkg/diagnose", "pkg/discovery", "pkg/forwarder", "pkg/guardian", "pkg/handover", "pkg/host", "pkg/netdev", "pkg/plan", "pkg/resolvconf", "pkg/rundir", "pkg/state", "pkg/status"},
	"pkg/datapath":               {},
	"pkg/diagnose":               {"pkg/config", "pkg/status"},
	"pkg/discovery":              {"pkg/cluster"},
	"pkg/forwarder":              {},
	"pkg/guardian":               {"pkg/config", "pkg/rundir", "pkg/state", "pkg/status"},
	"pkg/handover":               {"pkg/config", "pkg/forwarder", "pkg/rundir", "pkg/state", "pkg/status"}, // the forwarder's sockets are what is handed over
	"pkg/host":                   {"pkg/cluster", "pkg/config", "pkg/datapath", "pkg/netdev", "pkg/plan", "pkg/resolvconf", "pkg/rundir", "pkg/state", "pkg/status"},
	"pkg/internal/archtest":      {},
	"pkg/internal/errno":         {},
	"pkg/internal/peer":          {},
	"pkg/internal/peer/peertest": {},
	"pkg/internal/pktgen":        {},
	"pkg/internal/privilege":     {},
	"pkg/internal/safefile":      {},
	"pkg/internal/sample":        {},
	"pkg/internal/say":           {},
	"pkg/netdev":                 {},
	"pkg/plan":                   {"pkg/cluster", "pkg/config", "pkg/status"},
	"pkg/resolvconf":             {"pkg/state", "pkg/state/hostfs"},
	"pkg/rundir":                 {"pkg/config", "pkg/state"},
	"pkg/state":                  {"pkg/state/hostfs"},
	"pkg/state/hostfs":           {},
	"pkg/state/hostfs/faultfs":   {"pkg/state/hostfs"},
	"pkg/status":                 {},

	"test/bench":      {"test/lab"},
	"test/cluster":    {"test/lab"},
	"test/cmd/labctl": {"test/lab"},
	"test/coherence":  {"pkg/answers/coherence", "pkg/cluster", "pkg/discovery", "test/cluster", "test/lab"},
	"test/e2e":        {"test/cluster", "test/lab"},
	"test/kernel":     {"test/lab"},
}

// testLeaves are for the tests of every room.
var testLeaves = []string{"pkg/internal/peer/peertest", "pkg/internal/sample"}

// testRooms says what tests alone may import besides.
var testRooms = map[string][]string{
	"pkg/discovery":  {"pkg/answers/coherence"}, // what is kept of a cluster, together
	"pkg/datapath":   {"pkg/internal/pktgen", "pkg/netdev"},
	"pkg/resolvconf": {"pkg/state/hostfs/faultfs"},
	"pkg/state":      {"pkg/state/hostfs/faultfs"},
}

// linuxOnly are the rooms that are empty on other operating systems. All others have something in them on each of systems, and import none
// of these there.
var linuxOnly = []string{"pkg/client", "pkg/daemon", "pkg/datapath", "pkg/guardian", "pkg/handover", "pkg/host", "pkg/internal/peer", "pkg/internal/peer/peertest", "pkg/internal/privilege", "pkg/netdev"}

var systems = []string{"darwin", "linux", "windows"}

// pure are the rooms that are the same on every system: they neither do I/O nor look at a clock.
var pure = []string{"pkg/answers/coherence", "pkg/answers/ready", "pkg/cluster", "pkg/internal/say", "pkg/plan"}

// impure are imports, by their prefix, that a pure room does without, and clocks are what it does not call.
var (
	impure = []string{"net", "os", "syscall", "golang.org/x/sys"}
	values = []string{"net/netip", "net/url"} // no more than values, so not impure
	clocks = []string{"After", "AfterFunc", "NewTicker", "NewTimer", "Now", "Since", "Sleep", "Tick", "Until"}
)

// owners says which packages alone may import a library, by the prefix of its path. One that has no row may not be used at all.
var owners = map[string][]string{
	"github.com/cilium/ebpf":         {"pkg/datapath"},
	"github.com/coredns/caddy":       {"pkg/discovery"},
	"github.com/maypok86/otter/v2":   {"pkg/forwarder"},
	"github.com/miekg/dns":           {"pkg/answers/ready", "pkg/client", "pkg/daemon", "pkg/diagnose", "pkg/forwarder", "pkg/internal/pktgen"},
	"github.com/spf13/":              {"cmd/k2s-dnsbpf"},
	"github.com/vishvananda/netlink": {"pkg/netdev"},
	"go.uber.org/zap":                everyone,
	"go.yaml.in/yaml":                {"pkg/config", "pkg/diagnose", "pkg/status"},
	"golang.org/x/net/publicsuffix":  {"pkg/daemon", "pkg/plan"},
	"golang.org/x/sys/":              everyone,
	"k8s.io/":                        {"pkg/discovery"},
}

// testOwners says which packages may import a library in their tests besides.
var testOwners = map[string][]string{
	"github.com/cilium/ebpf":         {"pkg/netdev"}, // a filter to attach has to be some program
	"github.com/google/go-cmp":       everyone,
	"github.com/miekg/dns":           {"pkg/answers", "pkg/datapath"},
	"github.com/vishvananda/netlink": everyone,
	"go.uber.org/goleak":             everyone,
	"go.yaml.in/yaml":                everyone,
}

// everyone may import it.
var everyone = []string{"*"}

func TestImportTable(t *testing.T) {
	seen := make(map[string]bool)
	for _, file := range sources(t, "cmd", "pkg", "test") {
		seen[file.dir] = true
		if _, ok := rooms[file.dir]; !ok && !file.inTestModule() {
			t.Errorf("%s has no row in the import table", file.dir)
		}
		for _, spec := range file.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			file.check(t, imported)
		}
	}
	for room := range rooms {
		if !seen[room] {
			t.Errorf("the import table has a row for %s, which does not exist", room)
		}
	}
}

// source is a Go file of the module or of its test module.
type source struct {
	*ast.File
	path, dir string // below the module's root
	test      bool
}

func sources(t *testing.T, tops ...string) (files []source) {
	t.Helper()
	for _, top := range tops {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && entry.Name() == "kube": // Kubernetes itself, a module of its own
				return filepath.SkipDir
			case entry.IsDir() || !strings.HasSuffix(path, ".go"):
				return nil
			}
			parsed, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
			if err != nil {
				return err
			}
			dir, err := filepath.Rel(root, filepath.Dir(path))
			files = append(files, source{parsed, path, filepath.ToSlash(dir), strings.HasSuffix(path, "_test.go")})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

func (s source) check(t *testing.T, imported string) {
	t.Helper()
	if ours, ok := strings.CutPrefix(imported, module); ok {
		if !slices.Contains(s.mayKnow(), ours) {
			t.Errorf("%s: the import table does not let %s import %s", s.path, s.dir, ours)
		}
		return
	}
	first, _, _ := strings.Cut(imported, "/")
	if s.inTestModule() || !strings.Contains(first, ".") { // the standard library
		return
	}
	allowed := owning(owners, imported)
	if s.test {
		allowed = slices.Concat(allowed, owning(testOwners, imported))
	}
	if !slices.Contains(allowed, s.dir) && !slices.Contains(allowed, everyone[0]) {
		t.Errorf("%s: the import table lets %q import %s, not %s", s.path, allowed, imported, s.dir)
	}
}

func (s source) inTestModule() bool { return strings.HasPrefix(s.dir, "test/") }

// mayKnow returns the packages of ours that a file may import.
func (s source) mayKnow() []string {
	known := append([]string{s.dir}, rooms[s.dir]...) // itself: a test from outside
	if !s.inTestModule() {
		known = append(known, leaves...)
	}
	if s.test {
		known = slices.Concat(known, testLeaves, testRooms[s.dir])
	}
	return known
}

func owning(table map[string][]string, imported string) (packages []string) {
	for library, owner := range table {
		if strings.HasPrefix(imported, library) {
			packages = append(packages, owner...)
		}
	}
	return packages
}

// A room that is not Linux's alone has something in it on every system, and reaches no room there that is empty.
func TestSystems(t *testing.T) {
	for room := range rooms {
		if strings.HasPrefix(room, "test/") || room == "pkg/internal/archtest" {
			continue
		}
		var files [][]string
		for _, system := range systems {
			built := on(t, system, room)
			files = append(files, built.GoFiles)
			if got, want := declares(t, built), system == "linux" || !slices.Contains(linuxOnly, room); got != want {
				t.Errorf("%s on %s: has content: %v, want %v: see linuxOnly", room, system, got, want)
			}
			for _, imported := range built.Imports {
				if ours, ok := strings.CutPrefix(imported, module); ok && system != "linux" && slices.Contains(linuxOnly, ours) {
					t.Errorf("%s imports %s on %s, where it is empty", room, ours, system)
				}
			}
		}
		if slices.Contains(pure, room) && (!slices.Equal(files[0], files[1]) || !slices.Equal(files[1], files[2])) {
			t.Errorf("%s is not made of the same files everywhere: %q", room, files)
		}
	}
}

func TestPure(t *testing.T) {
	for _, room := range pure {
		built := on(t, "linux", room)
		for _, imported := range built.Imports {
			does := slices.ContainsFunc(impure, func(prefix string) bool { return imported == prefix || strings.HasPrefix(imported, prefix+"/") })
			if does && !slices.Contains(values, imported) {
				t.Errorf("%s imports %s: it is to do no I/O", room, imported)
			}
		}
		for _, name := range built.GoFiles {
			ast.Inspect(parse(t, filepath.Join(built.Dir, name)), func(node ast.Node) bool {
				selector, ok := node.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if library, ok := selector.X.(*ast.Ident); ok && library.Name == "time" && slices.Contains(clocks, selector.Sel.Name) {
					t.Errorf("%s/%s calls time.%s: it is to look at no clock", room, name, selector.Sel.Name)
				}
				return true
			})
		}
	}
}

func parse(t *testing.T, path string) *ast.File {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

// on returns what is built of a package on a system.
func on(t *testing.T, system, room string) *build.Package {
	t.Helper()
	c := build.Default
	c.GOOS, c.GOARCH, c.CgoEnabled = system, "amd64", false
	built, err := c.ImportDir(filepath.Join(root, room), 0)
	if err != nil {
		t.Errorf("%s on %s: %v", room, system, err)
	}
	return built
}

// declares reports whether there is more in a package than its documentation.
func declares(t *testing.T, built *build.Package) bool {
	t.Helper()
	for _, name := range built.GoFiles {
		if slices.ContainsFunc(parse(t, filepath.Join(built.Dir, name)).Decls, func(d ast.Decl) bool {
			general, ok := d.(*ast.GenDecl)
			return !ok || general.Tok != token.IMPORT
		}) {
			return true
		}
	}
	return false
}
