package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// heldByOthers returns the numbers of the BPF links, or of the programs, that other living processes hold: daemons with other
// directories than ours, which would put them back. It looks through all processes for what they have open
// (Documentation/filesystems/proc.rst, fdinfo), and fails if it may not look into one that lives.
func heldByOthers(kind held) (map[uint32]bool, error) {
	ids := make(map[uint32]bool)
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, process := range processes {
		if process == fmt.Sprintf("/proc/%d", os.Getpid()) {
			continue
		}
		if err := addHeld(ids, process, kind); err != nil && !gone(err) {
			return nil, fmt.Errorf("see who holds the programs: %w", err)
		}
	}
	return ids, nil
}

func addHeld(ids map[uint32]bool, process string, kind held) error {
	files, err := os.ReadDir(filepath.Join(process, "fd"))
	if err != nil {
		return err
	}
	for _, file := range files {
		target, err := os.Readlink(filepath.Join(process, "fd", file.Name()))
		if err == nil && slices.Contains(kind.targets, target) {
			var id uint32
			if id, err = idOf(filepath.Join(process, "fdinfo", file.Name()), kind.key); err == nil {
				ids[id] = true
			}
		}
		if err != nil && !gone(err) {
			return err
		}
	}
	return nil
}

// gone tells the errors for a process that ends, or a file that it closes.
func gone(err error) bool { return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) }

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
func withoutOwner(programs []datapath.AttachedProgram) ([]datapath.AttachedProgram, error) {
	if len(programs) == 0 {
		return nil, nil
	}
	links, err := heldByOthers(heldLinks)
	return slices.DeleteFunc(programs, func(p datapath.AttachedProgram) bool { return links[p.LinkID] }), err
}

// maxInfo bounds what is read of a descriptor, in octets.
const maxInfo = 4096

func idOf(fdinfo, key string) (uint32, error) {
	info, err := safefile.ReadFile(context.Background(), fdinfo, maxInfo)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(info)) {
		if text, found := strings.CutPrefix(line, key); found {
			n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32)
			return uint32(n), err
		}
	}
	return 0, fmt.Errorf("%s: no line %s", fdinfo, key)
}
