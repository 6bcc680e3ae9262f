package discovery

import (
	"errors"
	"fmt"
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

func zonesAt(t testing.TB, c *corefile, stubs bool, ports ...uint16) servedZones {
	t.Helper()
	z, err := c.zones(ports, stubs)
	if err != nil {
		t.Fatal(err)
	}
	return z
}

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
		{"file and forward", "own.example {\n hosts {\n 10.0.0.1 a.own.example\n fallthrough\n }\n forward . 10.0.0.1\n}", "", "own.example", "some names of own.example"},
		{"kubernetes takes the block's zones", "Cluster.Local. k2s.test {\n kubernetes\n}", "cluster.local k2s.test", "", ""},
		{"kubernetes in the root block without zones", ".:53 {\n kubernetes\n forward . /etc/resolv.conf\n}", "", "", "the root zone"},
		{"plugin's zone is in the block's", "example {\n kubernetes k2s.example other.test\n}", "k2s.example", "", ""},
		{"block's zone is in the plugin's", "svc.cluster.local {\n kubernetes cluster.local\n}", "svc.cluster.local", "", ""},
		{"not beyond label boundaries", "xcluster.local {\n kubernetes cluster.local\n}", "", "", ""},
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
		}`, "a.test b.test clusterset.local d.test e.test f.test g.test h.test i.test j.test k.test", "", ""},
		{"hosts of the root block", ".:53 {\n hosts {\n 10.0.0.1 a.test\n fallthrough\n }\n kubernetes cluster.local\n}", "cluster.local", "", ""},
		{"rewrite into the cluster", "k2s.test {\n rewrite name suffix .k2s.test .svc.cluster.local\n kubernetes cluster.local\n}", "k2s.test", "", ""},
		{"gateways", ".:53 {\n k8s_gateway gw.test\n kubernetes cluster.local\n forward . 10.0.0.1\n}", "cluster.local gw.test", "", ""},
		{"line ends of Windows", ".:53 {\r\n kubernetes k2s.internal in-addr.arpa {\r\n  fallthrough in-addr.arpa\r\n }\r\n}\r\n", "k2s.internal", "", ""},
		{"unknown plugin", "gslb.test {\n gslb\n}", "gslb.test", "", ""},
		{"unknown plugin that may only filter", "a.test {\n blocklist x\n forward . 10.0.0.1\n}", "", "a.test", ""},
		{"a filter by template", "corp.example {\n template IN AAAA corp.example {\n rcode NOERROR\n }\n forward . 10.0.0.1\n}", "", "corp.example", ""},
		{"a template of one type", "corp.example {\n template IN A {\n answer \"{{ .Name }} 60 IN A 10.0.0.1\"\n }\n}", "", "", ""},
		{"a template that says no", "corp.example {\n template ANY ANY {\n rcode NXDOMAIN\n }\n}", "", "", ""},
		{"a template of every type", "corp.example {\n template ANY ANY {\n answer \"{{ .Name }} 60 IN TXT x\"\n }\n}", "corp.example", "", ""},
		{"a template that falls through", "corp.example {\n template ANY ANY {\n match a\n answer \"x\"\n fallthrough\n }\n forward . 10.0.0.1\n}", "", "corp.example", "some names of corp.example"},
		{"falls through to the host's own", "corp.example {\n file db {\n fallthrough\n }\n forward . /etc/resolv.conf\n}", "corp.example", "", ""},
		{"falls through to nobody", "corp.example {\n file db {\n fallthrough\n }\n}", "corp.example", "", ""},
		{"falls through for another zone", ".:53 {\n file db a.test b.test {\n fallthrough b.test\n }\n forward . 10.0.0.1\n}", "a.test", "", "some names of b.test"},
		{"falls through below", "a.test {\n file db {\n fallthrough sub.a.test\n }\n forward . 10.0.0.1\n}", "", "a.test", "some names of a.test"},
		{"forwards another zone", ".:53 {\n file db a.test {\n fallthrough\n }\n forward b.test 10.0.0.1\n}", "a.test", "", ""},
		{"forwards all but it", ".:53 {\n file db a.test {\n fallthrough\n }\n forward . 10.0.0.1 {\n except a.test\n }\n}", "a.test", "", ""},
		{"rewrite and forward", "corp.example {\n rewrite name suffix .corp.example .svc.cluster.local\n forward . 10.0.0.1\n}", "", "corp.example", ""},
		{"rewrite, the cluster, and forward", "corp.example {\n rewrite name suffix .corp.example .svc.cluster.local\n kubernetes cluster.local\n forward . 10.0.0.1\n}", "", "corp.example", ""},
		{"acl and forward", "corp.example {\n acl {\n block net 10.0.0.0/8\n }\n forward . 10.0.0.1\n}", "", "corp.example", ""},
		{"view", "corp.example {\n view inside {\n expr incidr(client_ip(), '10.0.0.0/8')\n }\n file db\n}", "", "", "to some clients only"},
		{"the cluster's fallthrough", ".:53 {\n kubernetes k2s.internal {\n fallthrough\n }\n forward . 10.0.0.1\n}", "k2s.internal", "", ""},
		{"the root zone beside", ".:53 {\n kubernetes cluster.local .\n}", "cluster.local", "", "the root zone"},
		{"a port of the environment", ".:{$PORT} {\n kubernetes k2s.internal\n}", "k2s.internal", "", ""},
		{"a zone and a port of the environment", "k2s.internal:{$PORT} {\n kubernetes\n}", "k2s.internal", "", ""},
		{"ports of plugins' zones", ".:53 {\n kubernetes dns://Cluster.Local:53 172.21.0.0/16\n}", "cluster.local 21.172.in-addr.arpa", "", ""},
		{"nothing answers", "a.test {\n errors\n log\n}", "", "", ""},
		{"snippet", "(mine) {\n kubernetes cluster.local\n}\n. {\n import mine\n errors\n}\nb.test {\n file db\n}", "cluster.local b.test", "", ""},
		{"snippet in a snippet", "(a) {\n file db\n}\n(b) {\n errors\n import a\n}\nx.test {\n import b\n}", "x.test", "", ""},
		{"snippet on the line of the brace", "(a) {\n file db\n}\nx.test { import a\n}", "x.test", "", ""},
		{"snippet of keys", "(k) {\n a.test {\n file db\n }\n}\nimport k\n", "a.test", "", ""},
		{"imported files", kubeadmCorefile + "import /etc/coredns/custom/*.server", "cluster.local", "", "imports /etc/coredns/custom/*.server"},
		{"imported file in a block", ".:53 {\n import custom/*.override\n kubernetes cluster.local\n}", "cluster.local", "", "imports custom/*.override"},
		{"variable", ".:53 {\n kubernetes {$DOMAIN} cluster.local\n}", "cluster.local", "", "zone {$DOMAIN} is known to CoreDNS only"},
		{"variable of another system", "{%DOMAIN%}:53 a.test {\n file db\n}", "a.test", "", "zone {%DOMAIN%}:53 is known"},
		{"variable elsewhere", ".:53 {\n kubernetes cluster.local {\n endpoint {$API}\n }\n forward . {$UPSTREAM}\n}", "cluster.local", "", ""},
		{"odd name", `.:53 {` + "\n" + ` kubernetes cluster.local a..b` + "\n}", "cluster.local", "", `"a..b" is not a name`},
		{"comments and quotes", "# cluster.example\n\".:53\" { # x\n kubernetes \"cluster.local\" # c.test\n log . \"a # b\"\n}", "cluster.local", "", ""},
		{"twice", ".:53 {\n kubernetes cluster.local\n kubernetes k2s.test cluster.local\n}", "cluster.local k2s.test", "", ""},
		{"import as an argument", ".:53 {\n kubernetes cluster.local\n log import\n}", "cluster.local", "", ""},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("DOMAIN", "of-this-process.test")
			c, err := parseCorefile(tc.corefile, corefilePath, container{})
			if err != nil {
				t.Fatal(err)
			}
			z := zonesAt(t, c, false, 53, 1053)
			got, notes := z.names(), z.notes
			if d := cmp.Diff(strings.Fields(tc.want), got); d != "" && len(got)+len(tc.want) > 0 {
				t.Errorf("zones -want +got:\n%s", d)
			}
			all := zonesAt(t, c, true, 53, 1053).names()
			if d := cmp.Diff(distinct(append(strings.Fields(tc.want), strings.Fields(tc.stubs)...)), all); d != "" && len(all)+len(tc.want)+len(tc.stubs) > 0 {
				t.Errorf("zones with stub zones -want +got:\n%s", d)
			}
			if text := strings.Join(notes, "|"); (tc.note == "") != (text == "") || !strings.Contains(text, tc.note) || strings.Contains(text, masked) {
				t.Errorf("notes %q, want one with %q", text, tc.note)
			}
		})
	}
}

// TestStockCorefiles: the zones of distributions as they come.
func TestStockCorefiles(t *testing.T) {
	const kubernetes = ` kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
`
	tests := []struct{ name, corefile, want string }{
		{"kubeadm", kubeadmCorefile, "cluster.local"},
		{"EKS", ".:53 {\n errors\n health {\n lameduck 5s\n }\n ready\n" + kubernetes + " prometheus :9153\n forward . /etc/resolv.conf\n cache 30\n loop\n reload\n loadbalance\n}\n", "cluster.local"},
		{"K3s", ".:53 {\n errors\n health\n ready\n" + kubernetes + ` hosts /etc/coredns/NodeHosts {
      ttl 60
      reload 15s
      fallthrough
    }
    prometheus :9153
    cache 30
    loop
    reload
    loadbalance
    import /etc/coredns/custom/*.override
    forward . /etc/resolv.conf
}
import /etc/coredns/custom/*.server
`, "cluster.local"},
		{"RKE2", ".:53 {\n errors\n health {\n lameduck 10s\n }\n ready\n kubernetes   cluster.local  cluster.local in-addr.arpa ip6.arpa {\n pods insecure\n fallthrough in-addr.arpa ip6.arpa\n ttl 30\n }\n prometheus   0.0.0.0:9153\n forward   . /etc/resolv.conf\n cache   30\n loop\n reload\n loadbalance\n}\n", "cluster.local"},
		{"AKS", ".:53 {\n errors\n ready\n health {\n lameduck 5s\n }\n" + kubernetes + ` prometheus :9153
    forward . /etc/resolv.conf
    cache 30
    loop
    reload
    loadbalance
    import custom/*.override
    template ANY ANY internal.cloudapp.net {
      match "^(?:[^.]+\\.){4,}internal\\.cloudapp\\.net\\.$"
      rcode NXDOMAIN
      fallthrough
    }
    template ANY ANY reddog.microsoft.com {
      rcode NXDOMAIN
    }
}
import custom/*.server
`, "cluster.local"},
		{"stub domains as GKE has them", kubeadmCorefile + "acme.local:53 {\n errors\n cache 30\n forward . 192.0.2.4\n}\n", "cluster.local"},
		{"MicroK8s", ".:53 {\n errors\n health {\n lameduck 5s\n }\n ready\n log . {\n class error\n }\n" + kubernetes + " prometheus :9153\n forward . 8.8.8.8 8.8.4.4\n cache 30\n loop\n reload\n loadbalance\n}\n", "cluster.local"},
		{"OpenShift", `corp.example:5353 {
    prometheus 127.0.0.1:9153
    forward . 192.0.2.1 {
        policy random
    }
    errors
    bufsize 1232
}
.:5353 {
    bufsize 1232
    errors
    log . {
        class error
    }
    health {
        lameduck 20s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
    }
    prometheus 127.0.0.1:9153
    forward . /etc/resolv.conf {
        policy sequential
    }
    cache 900 {
        denial 9984 30
    }
    reload
}
hostname.bind:5353 {
    chaos
}
`, "cluster.local"},
		{"K2s", `.:53 {
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough
        ttl 30
    }
    etcd cluster.local {
        path /skydns
        endpoint https://172.19.1.100:2379
        tls CERT KEY CA
        fallthrough
    }
    forward . 172.20.0.1
}
`, "cluster.local"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			c, err := parseCorefile(tc.corefile, corefilePath, container{})
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(zonesAt(t, c, false, 53, 5353).names(), " "); got != tc.want {
				t.Errorf("zones %q, want %q", got, tc.want)
			}
		})
	}
}

// TestZonesAsCoreDNSReadsThem: what CoreDNS makes of them, and nothing that is no name.
func TestZonesAsCoreDNSReadsThem(t *testing.T) {
	for text, want := range map[string]string{
		"cluster.local":                "cluster.local",
		"cluster.local:53":             "cluster.local",
		"cluster.local.:1053":          "cluster.local",
		"dns://cluster.local":          "cluster.local",
		"dns://CLUSTER.Local.:53":      "cluster.local",
		"tls://cluster.local":          "cluster.local",
		"172.21.0.0/16":                "21.172.in-addr.arpa",
		"dns://172.21.0.0/16:53":       "21.172.in-addr.arpa",
		"172.21.0.1/15":                "20.172.in-addr.arpa 21.172.in-addr.arpa",
		"fd00:21::/32":                 "1.2.0.0.0.0.d.f.ip6.arpa",
		"fd00:21::/32:53":              "1.2.0.0.0.0.d.f.ip6.arpa",
		"0/25.2.0.192.in-addr.arpa":    "0/25.2.0.192.in-addr.arpa",
		"_tcp.corp-1.example":          "_tcp.corp-1.example",
		"cluster.local:dns":            "",
		"cluster.local:":               "",
		"cluster.local:53:54":          "",
		"cluster.local,k2s.internal":   "",
		"a..b":                         "",
		"*.corp.example":               "",
		"10.0.0.1":                     "",
		"[::1]":                        "",
		"::1":                          "",
		"/etc/coredns/zones":           "",
		"corp.example/x":               "",
		"http://corp.example/x":        "",
		strings.Repeat("a", 64) + ".x": "",
		"{$A}.local":                   "",
	} {
		got, err := zonesOf(mask(text))
		if strings.Join(got, " ") != want || (err == nil) != (want != "") {
			t.Errorf("%s is %q, %v, want %q", text, got, err, want)
		}
	}
}

// TestManyNotes: they are bounded, and show what they quote.
func TestManyNotes(t *testing.T) {
	var b strings.Builder
	b.WriteString(". {\n kubernetes cluster.local")
	for i := range 5000 {
		fmt.Fprintf(&b, " a..%d\x1b[31m", i)
	}
	c, err := parseCorefile(b.String()+"\n}\nimport /\x1b]0;x\a\n", corefilePath, container{})
	if err != nil {
		t.Fatal(err)
	}
	z := zonesAt(t, c, false, 53)
	if len(z.notes) != maxNotes+1 || !strings.Contains(z.notes[maxNotes], "4985 more notes") {
		t.Errorf("%d notes, the last is %q", len(z.notes), z.notes[len(z.notes)-1])
	}
	if text := strings.Join(z.notes, ""); strings.ContainsAny(text, "\x1b\a") {
		t.Errorf("escape sequences in %q", text)
	}
}

// TestCorefileBudget: what would cost much is refused at little cost, by steps, not by time.
func TestCorefileBudget(t *testing.T) {
	nested := "(a0) {\n}\n"
	for i := 1; i <= 9; i++ {
		nested += fmt.Sprintf("(a%d) {\n%s}\n", i, strings.Repeat(fmt.Sprintf(" import a%d\n", i-1), 40))
	}
	many := func(n int, form string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, form, i)
		}
		return b.String()
	}
	for name, text := range map[string]string{
		"empty snippets in each other":  nested + ". {\n import a9\n}\n",
		"20,000 zones":                  ". {\n kubernetes" + many(20_000, " z%d.test") + "\n}\n",
		"20,000 server blocks":          many(20_000, "z%d.test {\n file db\n}\n"),
		"keys by zones":                 many(3000, "k%d.test ") + "{\n file db" + many(3000, " z%d.test") + "\n}\n",
		"ranges":                        ". {\n kubernetes" + strings.Repeat(" 10.0.0.0/9", 2000) + "\n}\n",
		"zones by fallthrough":          ". {\n file db" + many(1000, " z%d.test") + " {\n fallthrough" + many(1000, " y%d.test") + "\n }\n forward . 192.0.2.1\n}\n",
		"two megabytes":                 ". {\n" + strings.Repeat("#\n", 1<<20) + "}\n",
		"a megabyte in a hundred files": ". {\n import custom/*\n}\n",
	} {
		t.Run(name, func(t *testing.T) {
			in := container{files: map[string]string{}, dirs: map[string]struct{}{}}
			for i := range 100 {
				in.files[fmt.Sprint("/etc/coredns/custom/", i)] = strings.Repeat("# a line\n", 2000)
			}
			c, err := parseCorefile(text, corefilePath, in)
			if err == nil {
				_, err = c.zones([]uint16{53}, true)
			}
			if !errors.Is(err, errCorefileTooLarge) {
				t.Errorf("error %v", err)
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
		"import of two":       {"(a) {\n errors\n}\n. {\n import a b.test\n}", "line 5: import takes one argument"},
		"snippet not closed":  {"(a) {\n errors\n", "line 1: snippet (a) has no end"},
		"snippet of itself":   {"(a) {\n import a\n}\n. {\n import a\n}", "it is too large"},
		"snippets in a ring":  {"(a) {\n import b\n}\n(b) {\n import a\n}\n. {\n import a\n}", "it is too large"},
		"snippets that swell": {bomb + ". {\n import sl\n}", "it is too large"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseCorefile(c.text, corefilePath, container{})
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
		c, err := parseCorefile(text, corefilePath, container{})
		if err != nil {
			continue
		}
		if zones := zonesAt(t, c, true, 53).names(); strings.Contains(strings.Join(zones, " "), "secret") {
			t.Errorf("%q: the file was read: %v", text, zones)
		}
	}
}

// FuzzCorefile: whatever the text, there is an error or there are zones that can be
// steered, none of them wide, and they are the same each time.
func FuzzCorefile(f *testing.F) {
	f.Add(kubeadmCorefile)
	f.Add("(a) {\n import b\n}\n10.0.0.0/9:53 {\n import a\n file db x.test {\n}\n}\nimport /etc/*")
	f.Add(". {\n import custom/*.server\n}\n(x) {\n import x\n}\n")
	f.Add("\"a b\" {$X} {\n template IN A \"{{\" {\n}\n}")
	f.Fuzz(func(t *testing.T, text string) {
		in := container{files: map[string]string{"/etc/coredns/custom/a.server": text}, dirs: map[string]struct{}{"/etc/coredns/custom": {}}}
		c, err := parseCorefile(text, corefilePath, in)
		if (err == nil) == (c == nil) {
			t.Fatalf("error %v beside %v", err, c)
		}
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("error of several lines: %q", err)
			}
			return
		}
		z, err := c.zones([]uint16{53}, true)
		if err != nil {
			return
		}
		zones, notes := z.names(), z.notes
		if len(zones) > maxCorefileZones || len(notes) > maxNotes+1 {
			t.Errorf("%d zones, %d notes", len(zones), len(notes))
		}
		again := zonesAt(t, c, true, 53).names()
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
