//go:build unix

package discovery

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestOddKubeconfigs: none of them keeps us waiting or fills memory.
func TestOddKubeconfigs(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	large := filepath.Join(dir, "large")
	writeFile(t, large, strings.Repeat("#\n", maxKubeconfig))
	naming := filepath.Join(dir, "naming")
	for path, want := range map[string]string{fifo: "a FIFO", "/dev/zero": "a character device", large: "too large", dir: "is a directory"} {
		if _, _, err := FindKubeconfig(Options{Kubeconfig: path, Env: noEnv}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", path, err, want)
		}
		writeFile(t, naming, kubeconfigFor("https://192.0.2.1:6443", "{tokenFile: "+path+"}"))
		if _, _, err := FindKubeconfig(Options{Kubeconfig: naming, Env: noEnv}); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "tokenFile") {
			t.Errorf("names %s: error %v, want %q", path, err, want)
		}
	}
}
