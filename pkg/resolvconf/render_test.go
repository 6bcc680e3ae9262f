package resolvconf

import (
	"bytes"
	"flag"
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got)\n%s", path, diff)
	}
}

const base = `# Some network manager
nameserver 192.0.2.1
domain first.example
search corp.example lab.example
options ndots:5 timeout:1 attempts:3 rotate edns0
options trust-ad no-reload single-request use-vc
sortlist 130.155.160.0/255.255.240.0 130.155.0.0
`

func TestRenderGolden(t *testing.T) {
	r := rendering{
		path: "/etc/resolv.conf", undo: byHand{"/etc/" + ParkedName, "mv -f /etc/" + ParkedName + " /etc/resolv.conf"}, attachID: "4jvk2bq7", version: "0.1.0",
		nameservers: addrs("127.0.0.1", "::1"), base: Parse([]byte(base)),
	}
	text, err := r.render()
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/takeover.golden", text)

	r.undo, r.base = byHand{command: "rm -f /etc/resolv.conf"}, File{}
	text, err = r.render()
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/created.golden", text)
}

func TestRenderRefuses(t *testing.T) {
	for _, list := range [][]netip.Addr{nil, addrs("1.1.1.1", "1.1.1.2", "1.1.1.3", "1.1.1.4"), addrs("0.0.0.0"), {{}}} {
		if text, err := (rendering{path: "/etc/resolv.conf", nameservers: list}).render(); err == nil {
			t.Errorf("%v: no error, but\n%s", list, text)
		}
	}
}

func TestSealed(t *testing.T) {
	text := seal([]byte(headerLine + "\nnameserver 127.0.0.1\n"))
	if !sealed(text) {
		t.Fatal("not recognised")
	}
	for i := range text {
		bad := bytes.Clone(text)
		bad[i] ^= 1
		if sealed(bad) {
			t.Fatalf("still recognised with byte %d changed", i)
		}
	}
	for _, s := range []string{"", headerLine, headerLine + "\n" + sumPrefix + "\n"} {
		if sealed([]byte(s)) {
			t.Errorf("%q is recognised", s)
		}
	}
}
