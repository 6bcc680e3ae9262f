package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// memory is how many octets the processes hold, and how many their BPF maps. A map is counted once, and not as resident
// where a process has it mapped.
func memory(pids []int) (resident, maps int, err error) {
	seen := make(map[string]bool)
	for _, pid := range pids {
		n, err := residentOctets(pid)
		if err != nil {
			return 0, 0, err
		}
		resident += n
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
		if err != nil {
			return 0, 0, err
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil { // closed meanwhile
				continue
			}
			fields := labelled(string(content))
			if id := fields["map_id"]; id != "" && !seen[id] {
				seen[id] = true
				n, err := strconv.Atoi(fields["memlock"])
				if err != nil {
					return 0, 0, fmt.Errorf("read the size of BPF map %s: %w", id, err)
				}
				maps += n
			}
		}
	}
	return resident, maps, nil
}

func residentOctets(pid int) (sum int, err error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		return 0, err
	}
	// A mapping is a line "from-to rwxp offset device inode name" and lines "Label: value", of which Rss is one.
	ofMap := false
	for line := range strings.Lines(string(content)) {
		words := strings.Fields(line)
		switch {
		case len(words) > 0 && !strings.HasSuffix(words[0], ":"):
			ofMap = strings.HasSuffix(line, "bpf-map\n")
		case len(words) > 1 && words[0] == "Rss:" && !ofMap:
			n, err := strconv.Atoi(words[1])
			if err != nil {
				return 0, fmt.Errorf("read the memory of process %d: %w", pid, err)
			}
			sum += n << 10
		}
	}
	return sum, nil
}

// labelled are lines of the form "label: value".
func labelled(text string) map[string]string {
	fields := make(map[string]string)
	for line := range strings.Lines(text) {
		if label, value, ok := strings.Cut(line, ":"); ok {
			fields[label] = strings.TrimSpace(value)
		}
	}
	return fields
}
