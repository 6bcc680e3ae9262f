package host

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// withoutOwner leaves out the programs whose links a living process holds: a daemon's with other directories than ours, which
// would put them back. It looks through all processes for what they hold (Documentation/filesystems/proc.rst, fdinfo).
func withoutOwner(programs []datapath.AttachedProgram) (left []datapath.AttachedProgram) {
	if len(programs) == 0 {
		return nil
	}
	held := make(map[uint32]bool)
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, path := range links {
		// The kernel has spelled it in both ways.
		if target, err := os.Readlink(path); err != nil || target != "anon_inode:bpf_link" && target != "anon_inode:bpf-link" {
			continue
		}
		if id, ok := linkOf(strings.Replace(path, "/fd/", "/fdinfo/", 1)); ok {
			held[id] = true
		}
	}
	for _, p := range programs {
		if !held[p.LinkID] {
			left = append(left, p)
		}
	}
	return left
}

// maxInfo bounds what is read of a descriptor, in octets.
const maxInfo = 4096

func linkOf(fdinfo string) (id uint32, ok bool) {
	info, err := safefile.ReadFile(context.Background(), fdinfo, maxInfo)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(info)) {
		if text, found := strings.CutPrefix(line, "link_id:"); found {
			n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32)
			return uint32(n), err == nil
		}
	}
	return 0, false
}
