package discovery

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// kubeadmCorefile is what kubeadm installs.
const kubeadmCorefile = `.:53 {
    errors
    health {
       lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus :9153
    forward . /etc/resolv.conf {
       max_concurrent 1000
    }
    cache 30 {
       disable success cluster.local
       disable denial cluster.local
    }
    loop
    reload
    loadbalance
}
`

func TestCorefileZones(t *testing.T) {
	tests := []struct {
		name     string
		corefile string
		want     string // zones, separated by blanks
		stubs    string // further zones with stub zones
		note     string // part of the one note, empty for none
	}{
		{"kubeadm", kubeadmCorefile, "cluster.local", "", ""},
		{"one line without braces", ".\nkubernetes cluster.local", "cluster.local", "", ""},
		{"stub zone", kubeadmCorefile + "corp.example:53 {\n forward . 10.0.0.1\n cache\n}", "cluster.local", "corp.example", ""},
		{"file", kubeadmCorefile + "own.example {\n file db.own\n}", "cluster.local own.example", "", ""},
		{"the cluster's domain first", "own.example {\n file db.own\n}\n" + kubeadmCorefile, "cluster.local own.example", "", ""},
		{"file and forward", "own.example {\n hosts {\n 10.0.0.1 a.own.example\n fallthrough\n }\n forward . 10.0.0.1\n}", "own.example", "own.example", ""},
		{"kubernetes takes the block's zones", "Cluster.Local. k2s.test {\n kubernetes\n}", "cluster.local k2s.test", "", ""},
		{"kubernetes in the root block without zones", ".:53 {\n kubernetes\n forward . /etc/resolv.conf\n}", "", "", ""},
		{"plugin's zone is in the block's", "example {\n kubernetes k2s.example other.test\n}", "k2s.example", "", ""},
		{"block's zone is in the plugin's", "svc.cluster.local {\n kubernetes cluster.local\n}", "svc.cluster.local", "", ""},
		{"not beyond label boundaries", "xcluster.local {\n kubernetes cluster.local\n}", "xcluster.local", "", ""},
		{"several keys", "a.test, b.test c.test {\n file db\n}", "a.test b.test c.test", "", ""},
		{"ports", "a.test:53 b.test:5353 c.test:1053 d.test {\n file db\n}", "a.test c.test d.test", "", ""},
		{"schemes", "dns://a.test tls://b.test https://c.test:53 grpc://d.test quic://e.test {\n file db\n}", "a.test", "", ""},
		{"range as key", "10.1.0.0/16 {\n kubernetes\n}", "1.10.in-addr.arpa", "", ""},
		{"range with port and scheme", "dns://10.1.2.0/24:53 {\n kubernetes\n}", "2.1.10.in-addr.arpa", "", ""},
		{"range of IPv6", "2001:db8::/32 {\n file db\n}", "8.b.d.0.1.0.0.2.ip6.arpa", "", ""},
		{"ranges of kubernetes", ".:53 {\n kubernetes cluster.local 10.96.0.0/15 fd00:10::/31\n}",
			"cluster.local 96.10.in-addr.arpa 97.10.in-addr.arpa 0.1.0.0.0.0.d.f.ip6.arpa 1.1.0.0.0.0.d.f.ip6.arpa", "", ""},
		{"narrow reverse zones", ".:53 {\n kubernetes cluster.local 10.in-addr.arpa ip6.arpa\n}", "cluster.local 10.in-addr.arpa", "", ""},
		{"all addresses", "0.0.0.0/0 ::/0 arpa {\n kubernetes\n}", "", "", ""},
		{"zones of other plugins", `.:53 {
			file /db a.test
			hosts /hosts b.test
			template IN A c.test {
				answer "{{ .Name }} 60 IN A 10.0.0.1"
			}
			auto d.test
			secondary e.test {
				transfer from 10.0.0.1
			}
			etcd f.test
			k8s_external g.test
			route53 h.test.:Z1 i.test.:Z2
			azure group:j.test
			clouddns k.test.:project:zone
			multicluster clusterset.local
			forward . 10.0.0.1
		}`, "a.test b.test c.test clusterset.local d.test e.test f.test g.test h.test i.test j.test k.test", "", ""},
		{"hosts of the root block", ".:53 {\n hosts {\n 10.0.0.1 a.test\n fallthrough\n }\n kubernetes cluster.local\n}", "cluster.local", "", ""},
		{"rewrite into the cluster", "k2s.test {\n rewrite name suffix .k2s.test .svc.cluster.local\n kubernetes cluster.local\n}", "k2s.test", "", ""},
		{"unknown plugin", "gslb.test {\n gslb\n}", "gslb.test", "", ""},
		{"unknown plugin that may only filter", "a.test {\n blocklist x\n forward . 10.0.0.1\n}", "", "a.test", ""},
		{"nothing answers", "a.test {\n errors\n log\n}", "", "", ""},
		{"snippet", "(mine) {\n kubernetes cluster.local\n}\n. {\n import mine\n errors\n}\nb.test {\n file db\n}", "cluster.local b.test", "", ""},
		{"snippet in a snippet", "(a) {\n file db\n}\n(b) {\n errors\n import a\n}\nx.test {\n import b\n}", "x.test", "", ""},
		{"snippet on the line of the brace", "(a) {\n file db\n}\nx.test { import a\n}", "x.test", "", ""},
		{"snippet of keys", "(k) {\n a.test {\n file db\n }\n}\nimport k\n", "a.test", "", ""},
		{"imported files", kubeadmCorefile + "import /etc/coredns/custom/*.server", "cluster.local", "", "imports /etc/coredns/custom/*.server"},
		{"imported file in a block", ".:53 {\n import custom/*.override\n kubernetes cluster.local\n}", "cluster.local", "", "imports custom/*.override"},
		{"variable", ".:53 {\n kubernetes {$DOMAIN} cluster.local\n}", "cluster.local", "", "zone {$DOMAIN} is known to CoreDNS only"},
		{"variable of another system", "{%DOMAIN%}:53 a.test {\n file db\n}", "a.test", "", "zone {%DOMAIN%} is known"},
		{"variable elsewhere", ".:53 {\n kubernetes cluster.local {\n endpoint {$API}\n }\n forward . {$UPSTREAM}\n}", "cluster.local", "", ""},
		{"odd name", `.:53 {` + "\n" + ` kubernetes cluster.local a..b` + "\n}", "cluster.local", "", `"a..b" is no name`},
		{"comments and quotes", "# cluster.example\n\".:53\" { # x\n kubernetes \"cluster.local\" # c.test\n log . \"a # b\"\n}", "cluster.local", "", ""},
		{"twice", ".:53 {\n kubernetes cluster.local\n kubernetes k2s.test cluster.local\n}", "cluster.local k2s.test", "", ""},
		{"import as an argument", ".:53 {\n kubernetes cluster.local\n log import\n}", "cluster.local", "", ""},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("DOMAIN", "of-this-process.test")
			c, err := parseCorefile(tc.corefile)
			if err != nil {
				t.Fatal(err)
			}
			got, notes := c.zones([]uint16{53, 1053}, false)
			if d := cmp.Diff(strings.Fields(tc.want), got); d != "" && len(got)+len(tc.want) > 0 {
				t.Errorf("zones -want +got:\n%s", d)
			}
			all, _ := c.zones([]uint16{53, 1053}, true)
			if d := cmp.Diff(unique(append(strings.Fields(tc.want), strings.Fields(tc.stubs)...)), all); d != "" && len(all)+len(tc.want)+len(tc.stubs) > 0 {
				t.Errorf("zones with stub zones -want +got:\n%s", d)
			}
			if text := strings.Join(notes, "|"); (tc.note == "") != (text == "") || !strings.Contains(text, tc.note) || strings.Contains(text, masked) {
				t.Errorf("notes %q, want one with %q", text, tc.note)
			}
		})
	}
}

func TestCorefileErrors(t *testing.T) {
	bomb := "(s0) {\n log\n}\n"
	for i := 1; i < 12; i++ {
		line := " import s" + string(rune('a'+i-1)) + "\n"
		if i == 1 {
			line = " import s0\n"
		}
		bomb += "(s" + string(rune('a'+i)) + ") {\n" + strings.Repeat(line, 10) + "}\n"
	}
	for name, c := range map[string]struct{ text, want string }{
		"empty":               {"", "no server block"},
		"comment only":        {"# nothing\n", "no server block"},
		"not closed":          {".:53 {\n errors\n kubernetes cluster.local {\n", "Corefile:"},
		"line of the fault":   {"# one\n\n.:53 {\n errors\n log }\n", ":5"},
		"snippet not closed":  {"(a) {\n errors\n", "line 1: snippet (a) has no end"},
		"snippet of itself":   {"(a) {\n import a\n}\n. {\n import a\n}", "import each other"},
		"snippets in a ring":  {"(a) {\n import b\n}\n(b) {\n import a\n}\n. {\n import a\n}", "import each other"},
		"snippets that swell": {bomb + ". {\n import sl\n}", "import each other"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseCorefile(c.text)
			if err == nil {
				t.Fatalf("no error, but %+v", got)
			}
			checkLine(t, err, c.want)
		})
	}
}

// TestCorefileReadsNoFiles: what a Corefile imports is in CoreDNS's container, and
// must not be taken from this host.
func TestCorefileReadsNoFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte("secret.test {\n file db\n}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		"import " + path,
		"\"import\" " + path,
		"a.test {\n file db\n}\nimport " + path,
		"a.test {\n file db\n import " + path + "\n}",
		"a.test {\n file db {\n import " + path + "\n }\n}",
		"a.test { import " + path + "\n file db\n}",
		"(x) {\n import " + path + "\n}\nimport x",
		"import " + path + "\n(" + path + ") {\n a.test {\n file db\n }\n}",
		"a.test {\n log (" + path + ")\n import " + path + "\n file db\n}",
	} {
		c, err := parseCorefile(text)
		if err != nil {
			continue
		}
		if zones, _ := c.zones([]uint16{53}, true); strings.Contains(strings.Join(zones, " "), "secret") {
			t.Errorf("%q: the file was read: %v", text, zones)
		}
	}
}

// FuzzCorefile: whatever the text, there is an error or there are zones that can be
// steered, none of them wide, and they are the same each time.
func FuzzCorefile(f *testing.F) {
	f.Add(kubeadmCorefile)
	f.Add("(a) {\n import b\n}\n10.0.0.0/9:53 {\n import a\n file db x.test {\n}\n}\nimport /etc/*")
	f.Add("\"a b\" {$X} {\n template IN A \"{{\" {\n}\n}")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseCorefile(text)
		if (err == nil) == (c == nil) {
			t.Fatalf("error %v beside %v", err, c)
		}
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("error of several lines: %q", err)
			}
			return
		}
		zones, notes := c.zones([]uint16{53}, true)
		again, _ := c.zones([]uint16{53}, true)
		if d := cmp.Diff(zones, again); d != "" {
			t.Errorf("not the same twice:\n%s", d)
		}
		for _, z := range zones {
			if tooWide(z) || !isZoneName(z) {
				t.Errorf("zone %q", z)
			}
		}
		for _, n := range notes {
			if strings.Contains(n, masked) && !strings.Contains(text, masked) {
				t.Errorf("note %q", n)
			}
		}
	})
}
