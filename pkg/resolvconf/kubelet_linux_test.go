package resolvconf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs/faultfs"
)

func TestPublishKubelet(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lib", KubeletFile)
	p := Publish{Path: path, Own: addrs("127.0.0.1", "172.19.1.1"), Base: Parse([]byte(base)),
		Upstreams: addrs("127.0.0.1", "127.0.0.53", "127.0.0.2", "172.19.1.1", "fe80::1%eth0", "::1", "10.0.0.1", "10.0.0.1", "2001:db8::1", "10.0.0.2", "10.0.0.3")}
	got, err := PublishKubelet(p)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(addrs("10.0.0.1", "2001:db8::1", "10.0.0.2"), got.Nameservers, compareAddr); diff != "" || !got.Changed {
		t.Errorf("changed %v\n%s", got.Changed, diff)
	}
	if len(got.Dropped) != 8 {
		t.Errorf("dropped %v", got.Dropped)
	}
	text := readFile(t, path)
	golden(t, "testdata/kubelet.golden", []byte(text))

	before := stat(t, path)
	if got, err = PublishKubelet(p); err != nil || got.Changed || !stat(t, path).SameFile(before) {
		t.Errorf("equal content was written again: %+v, %v", got, err)
	}
	p.Upstreams = addrs("127.0.0.1")
	if got, err = PublishKubelet(p); err != nil || !got.KeptOld || readFile(t, path) != text {
		t.Errorf("the last good file must stay: %+v, %v", got, err)
	}
	p.Path += ".other"
	if _, err = PublishKubelet(p); !errors.Is(err, ErrNothingToPublish) {
		t.Errorf("%v, want ErrNothingToPublish", err)
	}
	if _, err := os.Stat(p.Path); err == nil {
		t.Error("an empty file was published")
	}
}

func TestPublishKubeletSearchLimits(t *testing.T) {
	names := make([]string, 40)
	for i := range names {
		names[i] = fmt.Sprintf("n%d.example", i)
	}
	p := Publish{Base: File{Search: names}}
	text, dropped := p.render(nil)
	if got := Parse(text).Search; len(got) != 32 || len(dropped) != 8 {
		t.Errorf("%d names, %d dropped", len(got), len(dropped))
	}
	p.Base.Search = []string{strings.Repeat("a", 1024), strings.Repeat("b", 1023), "c"}
	text, dropped = p.render(nil)
	if got := Parse(text).Search; len(got) != 2 || len(dropped) != 1 {
		t.Errorf("%d names, %d dropped", len(got), len(dropped))
	}
}

// TestPublishKubeletFaults: whatever fails, the file is the old one or the new.
func TestPublishKubeletFaults(t *testing.T) {
	points := 0
	for _, mode := range []faultfs.Mode{faultfs.Once, faultfs.After, faultfs.Forever, faultfs.Short, faultfs.KillBefore, faultfs.KillAfter} {
		for at := 1; ; at++ {
			path := filepath.Join(t.TempDir(), KubeletFile)
			if _, err := PublishKubelet(Publish{Path: path, Upstreams: addrs("10.0.0.1")}); err != nil {
				t.Fatal(err)
			}
			old := readFile(t, path)
			ffs := &faultfs.FS{Under: hostfs.OS(), Mode: mode, At: at, Err: syscall.ENOSPC, NoSync: true}
			var err error
			killed := kill(func() { _, err = PublishKubelet(Publish{Path: path, FS: ffs, Upstreams: addrs("10.0.0.2")}) })
			if at > len(ffs.Calls()) {
				break
			}
			points++
			if ffs.Dirty()[path] {
				t.Fatalf("%v at %d: published without a sync", mode, at)
			}
			got := readFile(t, path)
			if got != old && got != strings.Replace(old, "10.0.0.1", "10.0.0.2", 1) {
				t.Fatalf("%v at %d (%s): %q", mode, at, ffs.Calls()[at-1], got)
			}
			if !killed && err == nil && got == old {
				t.Fatalf("%v at %d (%s): reported as done", mode, at, ffs.Calls()[at-1])
			}
			if _, err := PublishKubelet(Publish{Path: path, Upstreams: addrs("10.0.0.3")}); err != nil {
				t.Fatalf("%v at %d: the next publish: %v", mode, at, err)
			}
			if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
				t.Fatalf("%v at %d: left %v", mode, at, left)
			}
		}
	}
	t.Logf("kubelet file: %d points covered", points)
}
