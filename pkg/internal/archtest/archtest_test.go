// Package archtest holds the module to its import table: which room may know which, and which library.
package archtest

import (
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

// leaves are for every room.
var leaves = []string{"pkg/internal/safefile", "pkg/internal/say"}

// rooms says which packages of ours, besides leaves, each package may import. Rooms below the daemon know only leaves; the daemon joins
// them.
var rooms = map[string][]string{
	"cmd/k2s-dnsbpf":           {"pkg/config", "pkg/daemon", "pkg/diagnose", "pkg/status"},
	"pkg/config":               {},
	"pkg/daemon":               {"pkg/config", "pkg/datapath", "pkg/diagnose", "pkg/discovery", "pkg/forwarder", "pkg/host", "pkg/netdev", "pkg/plan", "pkg/resolvconf", "pkg/state", "pkg/status"},
	"pkg/datapath":             {},
	"pkg/diagnose":             {"pkg/config", "pkg/status"},
	"pkg/discovery":            {},
	"pkg/forwarder":            {},
	"pkg/host":                 {"pkg/config", "pkg/datapath", "pkg/discovery", "pkg/netdev", "pkg/plan", "pkg/resolvconf", "pkg/state", "pkg/status"},
	"pkg/internal/archtest":    {},
	"pkg/internal/pktgen":      {},
	"pkg/internal/safefile":    {},
	"pkg/internal/say":         {},
	"pkg/netdev":               {},
	"pkg/plan":                 {"pkg/config", "pkg/discovery", "pkg/status"},
	"pkg/resolvconf":           {"pkg/state", "pkg/state/hostfs"},
	"pkg/state":                {"pkg/state/hostfs"},
	"pkg/state/hostfs":         {},
	"pkg/state/hostfs/faultfs": {"pkg/state/hostfs"},
	"pkg/status":               {},
}

// owners says which packages alone may import a library, by the prefix of its path.
var owners = map[string][]string{
	"github.com/cilium/ebpf":         {"pkg/datapath"},
	"github.com/vishvananda/netlink": {"pkg/netdev"},
	"k8s.io/":                        {"pkg/discovery"},
	"github.com/coredns/":            {"pkg/discovery"},
	"github.com/miekg/dns":           {"pkg/forwarder", "pkg/daemon", "pkg/diagnose", "pkg/internal/pktgen"},
	"github.com/spf13/":              {"cmd/k2s-dnsbpf"},
}

func TestImportTable(t *testing.T) {
	root := filepath.Join("..", "..", "..")
	seen := make(map[string]bool)
	for _, top := range []string{"cmd", "pkg"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			dir, err := filepath.Rel(root, filepath.Dir(path))
			if err != nil {
				return err
			}
			seen[dir] = true
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
			if err != nil {
				return err
			}
			for _, spec := range file.Imports {
				imported, err := strconv.Unquote(spec.Path.Value)
				if err != nil {
					return err
				}
				check(t, dir, path, imported)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for room := range rooms {
		if !seen[room] && room != "pkg/internal/archtest" {
			t.Errorf("the import table has a row for %s, which does not exist", room)
		}
	}
}

func check(t *testing.T, dir, path, imported string) {
	t.Helper()
	if ours, ok := strings.CutPrefix(imported, module); ok {
		allowed, known := rooms[dir]
		if !known {
			t.Errorf("%s: package %s has no row in the import table", path, dir)
		} else if !slices.Contains(allowed, ours) && !slices.Contains(leaves, ours) {
			t.Errorf("%s: %s must not import %s", path, dir, ours)
		}
		return
	}
	for library, allowed := range owners {
		if strings.HasPrefix(imported, library) && !slices.Contains(allowed, dir) {
			t.Errorf("%s: only %s may import %s", path, strings.Join(allowed, " and "), imported)
		}
	}
}
