package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// sandboxVariable has this program put a sandbox around another one, in place of running tests.
const sandboxVariable = "K2S_E2E_SANDBOX"

// sandbox is what of a unit's limits the kernel applies by seccomp(2), as systemd does.
type sandbox struct {
	Calls    []uint32 // that are allowed
	Families []uint32 // of socket(2)
}

func init() {
	text := os.Getenv(sandboxVariable)
	if text == "" {
		return
	}
	var s sandbox
	err := json.Unmarshal([]byte(text), &s)
	if err == nil {
		os.Unsetenv(sandboxVariable)
		err = s.enter()
	}
	if err == nil {
		err = syscall.Exec(os.Args[1], os.Args[1:], os.Environ())
	}
	fmt.Fprintln(os.Stderr, "sandbox:", err)
	os.Exit(125)
}

// enter applies the limits to all threads of this process and what they execute.
func (s sandbox) enter() error {
	const deny = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	give := func(what uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: what} }
	// A jump over the next instruction unless it is equal.
	unless := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: k}
	}
	filter := []unix.SockFilter{load(0)} // seccomp_data.nr
	for _, call := range s.Calls {
		if call != unix.SYS_SOCKET {
			filter = append(filter, unless(call), give(unix.SECCOMP_RET_ALLOW))
		}
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: unix.SYS_SOCKET}, give(deny), load(16)) // args[0]
	for _, family := range s.Families {
		filter = append(filter, unless(family), give(unix.SECCOMP_RET_ALLOW))
	}
	filter = append(filter, give(unix.SECCOMP_RET_ERRNO|uint32(unix.EAFNOSUPPORT)))
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	return nil
}

// all returns a unit's values of a key that it may have more than once.
func all(unit, key string) (values []string) {
	for _, match := range regexp.MustCompile("(?m)^"+key+"=(.*)$").FindAllStringSubmatch(unit, -1) {
		values = append(values, match[1])
	}
	return values
}

// sandboxOf reads a unit's limits. Sets of system calls are those of this machine's systemd.
func sandboxOf(t *testing.T, unit string) (s sandbox) {
	t.Helper()
	list := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys")
	dir, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	table := read(t, filepath.Join(strings.TrimSpace(string(dir)), "unix", "zsysnum_linux_amd64.go"))
	numbers := make(map[string]uint32)
	for _, match := range regexp.MustCompile(`SYS_(\w+)\s+= (\d+)`).FindAllStringSubmatch(table, -1) {
		number, _ := strconv.ParseUint(match[2], 10, 32)
		numbers[strings.ToLower(match[1])] = uint32(number)
	}
	var expand func(name string) []string
	expand = func(name string) (names []string) {
		if !strings.HasPrefix(name, "@") {
			return []string{name}
		}
		out, err := exec.Command("systemd-analyze", "syscall-filter", name).Output()
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(string(out), "\n")[1:] {
			if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
				names = append(names, expand(line)...)
			}
		}
		return names
	}
	allowed := make(map[string]bool)
	for _, value := range all(unit, "SystemCallFilter") {
		value, without := strings.CutPrefix(value, "~")
		for _, name := range strings.Fields(value) {
			for _, call := range expand(name) {
				allowed[call] = !without
			}
		}
	}
	for name := range allowed {
		if number, known := numbers[name]; known && allowed[name] {
			s.Calls = append(s.Calls, number)
		}
	}
	families := map[string]uint32{"AF_UNIX": unix.AF_UNIX, "AF_INET": unix.AF_INET, "AF_INET6": unix.AF_INET6, "AF_NETLINK": unix.AF_NETLINK}
	for _, name := range strings.Fields(setting(t, unit, "RestrictAddressFamilies")) {
		s.Families = append(s.Families, families[name])
	}
	slices.Sort(s.Calls)
	if len(s.Calls) < 100 || len(s.Families) == 0 {
		t.Fatalf("%+v of\n%s", s, unit)
	}
	return s
}

// TestUnitsSandboxed runs the units' commands under the limits that they set, from attach to restore.
func TestUnitsSandboxed(t *testing.T) {
	h := raise(t, lab.Options{})
	h.install()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := func(unit, key string, more ...string) []string {
		limits, err := json.Marshal(sandboxOf(t, unit))
		if err != nil {
			t.Fatal(err)
		}
		var capabilities []string
		for _, name := range strings.Fields(setting(t, unit, "CapabilityBoundingSet")) {
			capabilities = append(capabilities, "+"+strings.ToLower(strings.TrimPrefix(name, "CAP_")))
		}
		return []string{"sh", "-c", fmt.Sprintf("umask %s; %s='%s' exec setpriv --no-new-privs --bounding-set=-all,%s %s %s %s", setting(t, unit, "UMask"),
			sandboxVariable, limits, strings.Join(capabilities, ","), self, setting(t, unit, key), strings.Join(more, " "))}
	}
	_, daemon := unitFile(t, "k2s-dnsbpf.service")
	_, boot := unitFile(t, "k2s-dnsbpf-restore.service")
	h.background(command(daemon, "ExecStart", attachArgs()[1:]...)...)
	h.ours()
	h.works()
	r := h.healthy()
	if score := strings.TrimSpace(must(t, h.Host(), "cat", fmt.Sprintf("/proc/%d/status", r.PID))); !strings.Contains(score, "Seccomp:\t2") {
		t.Errorf("no sandbox: %s", score)
	}
	if r := must(t, h.Host(), "setpriv", "--reuid=65534", "--clear-groups", h.binary, "status"); !strings.Contains(r, "attached") {
		t.Errorf("a user's status: %s", r)
	}
	// Who rewrites the file, and with what, is seen and undone.
	must(t, h.Host(), "sh", "-ec", "echo nameserver 192.0.2.54 >/etc/new; mv /etc/new /etc/resolv.conf")
	if events := h.retaken(siteSecond, 1).Resolver.Events; !strings.Contains(fmt.Sprint(events), "process ") {
		t.Errorf("by whom? %+v", events)
	}
	for _, argv := range [][]string{command(daemon, "ExecStopPost"), command(boot, "ExecStart")} {
		r := h.healthy()
		must(t, h.Host(), "sh", "-c", fmt.Sprintf("kill -STOP %[1]d %[2]d; kill -KILL %[1]d %[2]d", r.PID, r.Guardian.PID))
		if out := must(t, h.Host(), argv...); !strings.Contains(out, "restored") {
			t.Errorf("%v: %s", argv, out)
		}
		h.attach()
	}
	h.detach()
	if got := h.read(resolvConf); got != theirs {
		t.Errorf("left %q", got)
	}
}
