package e2e

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// The promises of docs/security.md that no other test is about.

// nobodyID is a user and a group without rights.
const nobodyID = 65534

// callAs sends a request to the control socket as a user, and returns the status and the body of the reply.
func (h *host) callAs(uid int, method, path, body string) (int, string) {
	h.t.Helper()
	var conn net.Conn
	if err := h.Host().Do(func() (err error) {
		// Of this thread alone, which ends with this function: the kernel notes who connects.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			return errno
		}
		conn, err = net.Dial("unix", "/run/k2s-dnsbpf/control.sock")
		return err
	}); err != nil {
		h.t.Fatal(err)
	}
	defer conn.Close()
	request, err := http.NewRequestWithContext(h.t.Context(), method, "http://daemon"+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	if err := errors.Join(conn.SetDeadline(time.Now().Add(patience)), request.Write(conn)); err != nil {
		h.t.Fatal(err)
	}
	reply, err := http.ReadResponse(bufio.NewReader(conn), request)
	if err != nil {
		h.t.Fatal(err)
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(reply.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return reply.StatusCode, string(text)
}

// TestOrdersAreRoots: everybody may look, and only root gives orders; who asks is what the kernel says.
func TestOrdersAreRoots(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	for _, order := range []struct{ method, path, body string }{
		{http.MethodPost, "/detach", `{"linger":0}`},
		{http.MethodPost, "/reload", `{"topology":"native-linux","upstreams":["192.0.2.66:53"]}`},
	} {
		if code, body := h.callAs(nobodyID, order.method, order.path, order.body); code != http.StatusForbidden {
			t.Errorf("%s of nobody: %d %s", order.path, code, body)
		}
	}
	if code, body := h.callAs(nobodyID, http.MethodGet, "/status", ""); code != http.StatusOK || !strings.Contains(body, `"attached":true`) {
		t.Errorf("status for nobody: %d %s", code, body)
	}
	nobody := []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", h.binary}
	for _, command := range [][]string{attachArgs(), {"detach"}, {"restore"}} {
		r := commandEnv(t, h.Host(), nil, append(nobody, command...)...)
		if r.code != 1 || !strings.Contains(r.stderr, "run it as root") {
			t.Errorf("as nobody: %v", r)
		}
	}
	h.healthy()

	// What it leaves is closed to all but root, as far as it tells of more than status does.
	err := h.Host().Do(func() error {
		for _, path := range []string{"/var/lib/k2s-dnsbpf/journal.json", "/run/k2s-dnsbpf/daemon.log", "/run/k2s-dnsbpf/lock"} {
			info, err := os.Stat(path)
			if err != nil {
				return err
			}
			if info.Mode().Perm()&0o007 != 0 || info.Sys().(*syscall.Stat_t).Gid != 0 {
				t.Errorf("%s has the mode %s", path, info.Mode())
			}
		}
		for _, dir := range []string{"/sys/fs/bpf/k2s-dnsbpf", "/run/k2s-dnsbpf", "/var/lib/k2s-dnsbpf"} {
			err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err != nil {
					return err
				}
				info, err := d.Info()
				if err != nil {
					return err
				}
				owner := info.Sys().(*syscall.Stat_t).Uid
				if isSocket := info.Mode().Type() == fs.ModeSocket; owner != 0 || info.Mode().Perm()&0o022 != 0 && !isSocket {
					t.Errorf("%s is open to others: %s, owner %d", path, info.Mode(), owner)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/sys/fs/bpf/k2s-dnsbpf/maps/dns_zones", "/sys/fs/bpf/k2s-dnsbpf/maps/dns_config"} {
		if r := command(t, h.Host(), "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bpftool", "map", "dump", "pinned", path); r.code == 0 {
			t.Errorf("nobody reads a map: %v", r)
		}
	}
}

// TestKubernetesSecretsStayInTheKubeconfig: no credential is in what the program writes, logs or says, whatever the level.
func TestKubernetesSecretsStayInTheKubeconfig(t *testing.T) {
	h := raise(t, lab.Options{})
	c := cluster.Start(t, h.Lab, cluster.Options{})
	noError(t, c.CreateDNS(t.Context()))
	file := reader(t, c)
	const tokenFile = cluster.Dir + "/" + readerName + ".token"
	token, err := h.Host().ReadFile(tokenFile)
	noError(t, err)
	h.attach([]string{"--kubeconfig", file, "--log-level", "debug"})
	h.healthy()
	said := make(map[string]string)
	for _, args := range [][]string{{"status", "-o", "json"}, {"doctor", "-o", "json"}, {"check", lab.Backend, "-o", "json"}} {
		r := h.run(args...)
		said[args[0]] = r.stdout + r.stderr
	}
	noError(t, h.Host().Do(func() error {
		for _, dir := range []string{"/run/k2s-dnsbpf", "/var/lib/k2s-dnsbpf", "/etc"} {
			err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err != nil || !d.Type().IsRegular() || path == file {
					return err
				}
				text, err := os.ReadFile(path)
				said[path] = string(text)
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	if !strings.Contains(said["/run/k2s-dnsbpf/daemon.log"], "DEBUG") && !strings.Contains(said["/run/k2s-dnsbpf/daemon.log"], "debug") {
		t.Error("the log has nothing of the level debug")
	}
	for where, text := range said {
		if strings.Contains(text, string(token)) {
			t.Errorf("the token is in %s", where)
		}
	}
}

// TestResolvConfOfEachKind: whatever is in its place, an attach says what it is, in time, and changes nothing; those who
// only look go on.
func TestResolvConfOfEachKind(t *testing.T) {
	h := raise(t, lab.Options{})
	must(t, h.Host(), "mv", "/etc/resolv.conf", "/etc/saved")
	for _, c := range []struct{ name, script, says string }{
		{"FIFO", "mkfifo /etc/resolv.conf", ""},
		{"link to a FIFO", "mkfifo /run/fifo; ln -s /run/fifo /etc/resolv.conf", ""},
		{"directory", "mkdir /etc/resolv.conf", ""},
		{"device", "mknod /etc/resolv.conf c 1 5", ""},
		{"link to a device", "ln -s /dev/zero /etc/resolv.conf", ""},
		{"socket", "", ""},
		{"links in a circle", "ln -s b /etc/resolv.conf; ln -s resolv.conf /etc/b", "/etc/resolv.conf"},
		{"10 MB", "head -c 10485760 /dev/zero | tr '\\0' '#' >/etc/resolv.conf", "too large"},
		{"NUL", `printf 'nameserver \0 192.0.2.53\n' >/etc/resolv.conf`, "no usable upstream"},
		{"empty", ": >/etc/resolv.conf", "no usable upstream"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := h.in(t)
			must(t, h.Host(), "sh", "-ec", c.script)
			if c.script == "" {
				noError(t, h.Host().Do(func() error {
					listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: "/etc/resolv.conf", Net: "unix"})
					if err != nil {
						return err
					}
					listener.SetUnlinkOnClose(false)
					return listener.Close()
				}))
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			before := h.snapshot()
			out, err := h.Host().Output(ctx, h.binary, attachArgs()...)
			if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "/etc/resolv.conf") {
				t.Errorf("attach: %s: %v", out, err)
			}
			if r := h.run("status"); r.code != 3 || !strings.Contains(r.stdout, "not attached") {
				t.Errorf("%v", r)
			}
			if r := h.run("doctor"); r.code != 0 && r.code != 3 {
				t.Errorf("%v", r)
			}
			if r := h.run("detach"); r.code != 0 {
				t.Errorf("%v", r)
			}
			if diff := lab.Diff(before, h.snapshot()); diff != "" {
				t.Errorf("the host is not as before:\n%s", diff)
			}
			must(t, h.Host(), "rm", "-rf", "/etc/resolv.conf", "/etc/b", "/run/fifo")
		})
	}
	must(t, h.Host(), "mv", "/etc/saved", "/etc/resolv.conf")
	h.attach()
	h.works()
}
