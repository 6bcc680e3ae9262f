//go:build linux

package guardian

import (
	"reflect"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

// TestGuardianArguments: what a guardian guards is what its daemon has.
func TestGuardianArguments(t *testing.T) {
	c := config.Default()
	c.ResolvConf, c.StateDir, c.RunDir, c.LogLevel = "/a/resolv.conf", "/b", "/c d", "debug"
	args := args(c)
	if args[0] != Command {
		t.Errorf("the command is %q", args[0])
	}
	got, err := Parse(args[1:])
	if err != nil || !reflect.DeepEqual(got, c) {
		t.Errorf("%v became %+v %v", args, got, err)
	}
	for _, bad := range [][]string{{"--nope"}, {"--state-dir", "relative"}, {"--run-dir"}} {
		if _, err := Parse(bad); err == nil {
			t.Errorf("%v is taken", bad)
		}
	}
}
