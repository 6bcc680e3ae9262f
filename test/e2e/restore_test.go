package e2e

import (
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// originals are the shapes that a host's resolver configuration has.
var originals = []struct{ name, script string }{
	{"file", ""},
	{"file with an odd mode and owner", "chmod 0640 /etc/resolv.conf; chown 1:2 /etc/resolv.conf; touch -d 2001-02-03T04:05:06.789 /etc/resolv.conf"},
	{"absolute link", "mkdir /run/site; mv /etc/resolv.conf /run/site/resolv.conf; ln -s /run/site/resolv.conf /etc/resolv.conf; touch -hd 2001-02-03T04:05:06 /etc/resolv.conf"},
	{"relative link", "mkdir /run/site; mv /etc/resolv.conf /run/site/resolv.conf; ln -s ../run/site/resolv.conf /etc/resolv.conf"},
	{"link to a link", "mkdir /etc/site; mv /etc/resolv.conf /etc/site/a; ln -s a /etc/site/b; ln -s site/b /etc/resolv.conf"},
}

// stamp is what Snapshot does not say of a link: when it was made. The inode tells a restored file from a copy.
func (h *host) stamp(path string) (mtime string, inode uint64) {
	h.t.Helper()
	err := h.Host().Do(func() error {
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		mtime, inode = info.ModTime().UTC().Format("15:04:05.000000000"), info.Sys().(*syscall.Stat_t).Ino
		return nil
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return mtime, inode
}

// works asks for a name in the cluster and one outside as the programs of the host do.
func (h *host) works() {
	h.t.Helper()
	for _, name := range []string{lab.Backend, lab.WWW} {
		must(h.t, h.Host(), "getent", "ahostsv4", name)
	}
}

// TestEverythingIsPutBack: after a detach nothing of the attach is left, whatever happened in between.
func TestEverythingIsPutBack(t *testing.T) {
	t.Parallel()
	again := attachArgs()
	for _, original := range originals {
		t.Run(original.name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			// Somebody else's program, settings and pins: they are none of ours to remove.
			must(t, h.Host(), "sh", "-ec", original.script+"\nmkdir /sys/fs/bpf/other; echo keep >/var/lib/other; tc qdisc add dev cni0 clsact")
			if err := h.Host().SetSysctl("net.ipv4.conf.lo.accept_local", "1"); err != nil {
				t.Fatal(err)
			}
			before := h.snapshot()
			mtime, inode := h.stamp("/etc/resolv.conf")
			back := func(how string) {
				t.Helper()
				h.unchanged(before)
				if m, i := h.stamp("/etc/resolv.conf"); m != mtime || i != inode {
					t.Errorf("%s: resolv.conf was made anew: changed %s, inode %d; was %s, %d", how, m, i, mtime, inode)
				}
				if t.Failed() {
					t.Fatalf("after %s", how)
				}
			}

			h.attach()
			h.works()
			h.detach()
			back("attach, detach")

			h.attach()
			h.kill()
			h.detach()
			back("attach, SIGKILL, detach")

			h.attach()
			h.kill()
			if r := h.run(again...); r.code != 0 {
				t.Fatal(r)
			}
			h.healthy()
			h.works()
			h.detach()
			back("attach, SIGKILL, attach, detach")

			h.attach()
			h.killBoth()
			if r := h.run("restore"); r.code != 0 || !strings.Contains(r.stdout, "/etc/resolv.conf: restored") {
				t.Errorf("restore beside a dead daemon: %v", r)
			}
			if m, i := h.stamp("/etc/resolv.conf"); m != mtime || i != inode {
				t.Errorf("restore made resolv.conf anew")
			}
			must(t, h.Host(), "getent", "ahostsv4", lab.WWW)
			if r := h.run("restore"); r.code != 0 {
				t.Errorf("second restore: %v", r)
			}
			h.detach()
			back("attach, SIGKILL, restore, detach")

			h.attach()
			pid := h.healthy().PID
			h.signal("STOP", pid)
			h.detach()
			back("attach, SIGSTOP, detach")

			h.attach()
			h.signal("TERM", h.healthy().PID)
			eventually(t, "the daemon has ended", func() error {
				return h.Host().Do(func() error {
					if _, err := os.Stat("/run/k2s-dnsbpf"); err == nil {
						return fs.ErrExist
					}
					return nil
				})
			})
			back("attach, SIGTERM")
		})
	}
}

// TestForeground: a unit or a container runs the daemon itself.
func TestForeground(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	for _, name := range []string{"INT", "TERM"} {
		cmd := h.Host().Command(t.Context(), h.binary, attachArgs("--foreground")...)
		cmd.Dir, cmd.Env = "/", environment
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var pid int
		eventually(t, "it is attached", func() error {
			r := h.status()
			if pid = r.PID; !r.Healthy {
				return fs.ErrNotExist
			}
			return nil
		})
		h.works()
		h.signal(name, pid)
		if err := cmd.Wait(); err != nil {
			t.Errorf("SIG%s: want exit 0: %v", name, err)
		}
		h.unchanged(before)
	}
}

// TestResolverNone leaves the file alone.
func TestResolverNone(t *testing.T) {
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach(endpoints, ranges, []string{"--resolver", "none"})
	content, err := h.Host().ReadFile("/etc/resolv.conf")
	if err != nil || string(content) != lab.HostResolvConf {
		t.Errorf("the file was touched: %v: %s", err, content)
	}
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
	h.healthy()
	h.detach()
	h.unchanged(before)
}

// TestMissingResolvConf: without a file, given upstreams do; and after the detach there is none again.
func TestMissingResolvConf(t *testing.T) {
	h := raise(t, lab.Options{})
	must(t, h.Host(), "rm", "/etc/resolv.conf")
	before := h.snapshot()
	h.attach(endpoints, ranges, []string{"--upstream", lab.External0})
	h.works()
	h.kill()
	h.detach()
	h.unchanged(before)
}

// TestDamagedJournal: with the record of the changes lost, a detach still finds the resolver file and the programs.
func TestDamagedJournal(t *testing.T) {
	h := raise(t, lab.Options{})
	_, inode := h.stamp("/etc/resolv.conf")
	h.attach()
	h.killBoth() // or the guardian would have restored the file before
	must(t, h.Host(), "sh", "-ec", "for f in /var/lib/k2s-dnsbpf/journal*; do echo damaged >$f; done")
	r := h.run("detach")
	if r.code != 0 || !strings.Contains(r.stdout, "restored") || !strings.Contains(r.stdout, "programs detached") {
		t.Errorf("detach: %v", r)
	}
	if _, now := h.stamp("/etc/resolv.conf"); now != inode {
		t.Error("resolv.conf was made anew")
	}
	if left := must(t, h.Host(), "sh", "-c", "ls -d /sys/fs/bpf/k2s-dnsbpf 2>/dev/null || echo none"); left != "none\n" {
		t.Errorf("pins are left: %s", left)
	}
	must(t, h.Host(), "getent", "ahostsv4", lab.WWW)
	h.attach()
	h.works()
	h.detach()
}

// TestDetachRefused: what forbids to put the file back is named at once, and nothing is changed: the host goes on to
// resolve. A detach beside a dead daemon says the same.
func TestDetachRefused(t *testing.T) {
	h := raise(t, lab.Options{})
	must(t, h.Host(), "mkdir", "-p", "/run/mount") // mount makes it, and leaves it
	before := h.snapshot()
	for _, test := range []struct{ forbid, allow, says string }{
		{"chattr +i /etc/resolv.conf", "chattr -i /etc/resolv.conf", "chattr -i /etc/resolv.conf"},
		{"chattr +a /etc/resolv.conf", "chattr -a /etc/resolv.conf", "chattr -a /etc/resolv.conf"},
		{"chattr +i /etc", "chattr -i /etc", "chattr -i /etc"},
		{"mount --bind /etc/resolv.conf /etc/resolv.conf", "umount /etc/resolv.conf", "unmount it"},
	} {
		t.Run(test.forbid, func(t *testing.T) {
			h := h.in(t)
			allow := func() { must(t, h.Host(), "sh", "-c", test.allow) }
			refused := func() {
				t.Helper()
				must(t, h.Host(), "sh", "-c", test.forbid)
				r := h.run("detach", "--linger", "0")
				if r.code != 1 || !strings.Contains(r.stderr, test.says) || strings.Contains(r.stderr, "does not end") {
					t.Errorf("%v", r)
				}
			}
			h.attach()
			refused()
			h.works()
			allow()
			h.ours()
			h.killBoth()
			refused()
			allow()
			h.detach()
			h.unchanged(before)
		})
	}
}
