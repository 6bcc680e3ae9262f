package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestImage does by hand what the Dockerfile has an engine do, which is not here: builds from what is copied, and attaches
// from a root directory of what is copied, with the mounts and the capabilities that its comment names.
func TestImage(t *testing.T) {
	const top = "../.."
	content, err := os.ReadFile(filepath.Join(top, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	build, final, found := strings.Cut(string(content), "FROM scratch")
	if !found {
		t.Fatal("no second stage")
	}
	all := func(pattern, text string) (matches [][]string) {
		matches = regexp.MustCompile("(?m)"+pattern).FindAllStringSubmatch(text, -1)
		if len(matches) == 0 {
			t.Fatalf("no %s in\n%s", pattern, text)
		}
		return matches
	}
	shell := func(dir, script string) {
		t.Helper()
		cmd := exec.Command("sh", "-ec", script)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
	}

	// The files that .dockerignore leaves are copied; COPY of each stage takes from those.
	root, source, context := t.TempDir(), t.TempDir(), t.TempDir()
	for _, name := range all(`^!(\S+)`, read(t, filepath.Join(top, ".dockerignore"))) {
		shell(top, fmt.Sprintf("cp -rp --parents %s %s", name[1], context))
	}
	shell(context, `find . \( -name '*_test.go' -o -name testdata \) -prune -exec rm -rf {} +`)
	for _, line := range all(`^COPY ([^-].*) (\S+)$`, build) {
		to := line[2]
		if to == "./" {
			to = "."
		}
		shell(context, fmt.Sprintf("cp -rpT %s %s/%s 2>/dev/null || cp -rp %s %s/%s", line[1], source, to, line[1], source, to))
	}
	run := all(`^RUN (CGO_ENABLED.*) -o (\S+) (\S+)$`, build)[0]
	shell(source, fmt.Sprintf("VERSION=image %s -buildvcs=false -o %s%s %s", run[1], source, run[2], run[3]))
	for _, line := range all(`^COPY (--from=build )?(\S+) (\S+)$`, final) {
		from := context + "/" + line[2]
		if line[1] != "" {
			from = source + line[2]
		}
		shell("/", fmt.Sprintf("mkdir -p %[2]s/$(dirname %[3]s) && cp -rp %[1]s %[2]s%[3]s", from, root, line[3]))
	}

	h := raise(t, lab.Options{})
	// What an engine gives besides: sysfs, and the host's resolver file as a copy.
	mounts := []string{fmt.Sprintf("mkdir -p %[1]s/sys %[1]s/etc; cp /etc/resolv.conf %[1]s/etc; mount --rbind /sys %[1]s/sys; mount -o remount,bind,ro %[1]s/sys", root)}
	var capabilities []string
	for _, volume := range all(`-v ([^:\s]+):([^:\s]+)(:ro)?`, build) {
		mounts = append(mounts, fmt.Sprintf("mkdir -p %[1]s %[3]s%[2]s; mount --bind %[1]s %[3]s%[2]s", volume[1], volume[2], root))
		if volume[3] != "" {
			mounts = append(mounts, fmt.Sprintf("mount -o remount,bind,ro %s%s", root, volume[2]))
		}
	}
	for _, capability := range all(`--cap-add=(\S+)`, build) {
		capabilities = append(capabilities, "+"+strings.ToLower(capability[1]))
	}
	args := strings.Fields(all(`IMAGE (attach .*)`, build)[0][1])
	args = append(args[:len(args)-1], append(endpoints, ranges...)...) // in place of the kubeconfig
	entry := all(`^ENTRYPOINT \["(\S+)"\]`, final)[0][1]
	// sys_chroot is for the way in only.
	script := strings.Join(append(mounts,
		fmt.Sprintf("mkdir -p %[1]s/proc; mount -t proc proc %[1]s/proc; mount -o bind,ro %[1]s/proc/sys %[1]s/proc/sys", root),
		fmt.Sprintf("exec setpriv --no-new-privs --bounding-set=-all,%s,+sys_chroot chroot %s %s %s", strings.Join(capabilities, ","), root, entry, strings.Join(args, " ")),
	), "\n")
	r := command(t, h.Host(), "unshare", "-m", "sh", "-ec", script)
	if r.code != 1 || !strings.Contains(r.stderr, "route_localnet") || !strings.Contains(r.stderr, "read-only") {
		t.Errorf("without the host's settings: %v", r)
	}
	set := all(`sysctl -w (\S+=1) (\S+=1)`, build)[0]
	must(t, h.Host(), "sysctl", "-w", set[1], set[2])
	before := h.snapshot()
	log := filepath.Join(root, "log")
	h.background("unshare", "-m", "sh", "-ec", "exec 2>"+log+"\n"+script)
	eventually(t, "it is attached", func() error {
		if r := h.status(); !r.Healthy || r.PID == 0 {
			return fmt.Errorf("%+v: %s", r, read(t, log))
		}
		return nil
	})
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
	h.signal("TERM", h.answered().PID)
	eventually(t, "it has ended", func() error {
		if r := h.status(); r.Attached || len(r.Problems) > 0 {
			return fmt.Errorf("%+v: %s", r, read(t, log))
		}
		return nil
	})
	h.unchanged(before)
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
