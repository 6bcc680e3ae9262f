package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// heldByOthers returns the numbers of the BPF links, or of the programs, that other living processes hold: daemons with other
// directories than ours, which would put them back. It looks through all processes for what they have open
// (Documentation/filesystems/proc.rst, fdinfo).
func heldByOthers(kind held) map[uint32]bool {
	ids := make(map[uint32]bool)
	own := fmt.Sprintf("/proc/%d/", os.Getpid())
	files, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, path := range files {
		target, err := os.Readlink(path)
		if err != nil || strings.HasPrefix(path, own) || !slices.Contains(kind.targets, target) {
			continue
		}
		if id, ok := idOf(strings.Replace(path, "/fd/", "/fdinfo/", 1), kind.key); ok {
			ids[id] = true
		}
	}
	return ids
}

// held is a kind of BPF object, by what the links of its descriptors lead to and the line of fdinfo that has its number.
type held struct {
	targets []string
	key     string
}

var (
	heldLinks    = held{[]string{"anon_inode:bpf_link", "anon_inode:bpf-link"}, "link_id:"} // the kernel has spelled it in both ways
	heldPrograms = held{[]string{"anon_inode:bpf-prog"}, "prog_id:"}
)

// withoutOwner leaves out the programs whose links another process holds.
func withoutOwner(programs []datapath.AttachedProgram) []datapath.AttachedProgram {
	if len(programs) == 0 {
		return nil
	}
	links := heldByOthers(heldLinks)
	return slices.DeleteFunc(programs, func(p datapath.AttachedProgram) bool { return links[p.LinkID] })
}

// maxInfo bounds what is read of a descriptor, in octets.
const maxInfo = 4096

func idOf(fdinfo, key string) (id uint32, ok bool) {
	info, err := safefile.ReadFile(context.Background(), fdinfo, maxInfo)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(info)) {
		if text, found := strings.CutPrefix(line, key); found {
			n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32)
			return uint32(n), err == nil
		}
	}
	return 0, false
}
