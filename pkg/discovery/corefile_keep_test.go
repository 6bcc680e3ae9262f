package discovery

import (
	"strings"
	"testing"
)

// TestKeeping: what of a zone may be kept, by real Corefiles.
func TestKeeping(t *testing.T) {
	const kubernetes = "kubernetes cluster.local in-addr.arpa ip6.arpa {\n pods insecure\n fallthrough in-addr.arpa ip6.arpa\n}\n"
	block := func(keys string, lines ...string) string { return keys + " {\n" + strings.Join(lines, "\n") + "\n}\n" }
	for name, test := range map[string]struct {
		corefile  string
		zone      string // cluster.local
		uncached  string // is in the reason
		unvouched bool
	}{
		"kubeadm":                      {corefile: kubeadmCorefile},
		"kubeadm, an address":          {corefile: kubeadmCorefile, zone: "10.in-addr.arpa"},
		"K2s: etcd":                    {corefile: block(".:53", "errors", kubernetes, "etcd cluster.local {\n path /skydns\n endpoint http://localhost:2379\n fallthrough\n}", "forward . 172.19.1.1", "cache 30"), unvouched: true},
		"etcd of another zone":         {corefile: block(".:53", kubernetes, "etcd k2s.test {\n fallthrough\n}", "forward . 1.1.1.1")},
		"k3s: hosts":                   {corefile: block(".:53", "errors", kubernetes, "hosts /etc/coredns/NodeHosts {\n fallthrough\n}", "forward . /etc/resolv.conf"), unvouched: true},
		"OpenShift: bufsize":           {corefile: block(".:5353", "bufsize 1232", "errors", "log . {\n class error\n}", kubernetes, "forward . /etc/resolv.conf {\n policy sequential\n}", "cache 900 {\n denial 9984 30\n}", "reload")},
		"NodeLocal":                    {corefile: block("cluster.local:53", "errors", "cache {\n success 9984 30\n denial 9984 5\n}", "reload", "loop", "bind 169.254.20.10", "forward . 10.96.0.10 {\n force_tcp\n}", "prometheus :9253", "health 169.254.20.10:8080")},
		"another cluster":              {corefile: block(".:53", "kubernetes cluster.local {\n endpoint https://192.0.2.1\n}"), unvouched: true},
		"another kubeconfig":           {corefile: block(".:53", "kubernetes cluster.local {\n kubeconfig /etc/other\n}"), unvouched: true},
		"turns":                        {corefile: block(".:53", kubernetes, "loadbalance round_robin")},
		"weights":                      {corefile: block(".:53", kubernetes, "loadbalance weighted /etc/weights"), uncached: "loadbalance"},
		"preferred addresses":          {corefile: block(".:53", kubernetes, "loadbalance round_robin {\n prefer 10.0.0.0/8\n}"), uncached: "loadbalance"},
		"a zone of the environment":    {corefile: block("{$DOMAIN}:53", "acl {\n block\n}", "kubernetes") + block(".:53", kubernetes), uncached: "acl"},
		"labels":                       {corefile: block(".:53", "kubernetes cluster.local {\n labels environment in (a)\n}"), unvouched: true},
		"labels of namespaces":         {corefile: block(".:53", "kubernetes cluster.local {\n namespace_labels a=b\n}"), unvouched: true},
		"cache with keepttl":           {corefile: block(".:53", kubernetes, "cache 30 {\n keepttl\n}"), unvouched: true},
		"acl":                          {corefile: block(".:53", "acl {\n block type A net 10.0.0.0/8\n}", kubernetes), uncached: "acl"},
		"acl of another block":         {corefile: block("other.test", "acl {\n block\n}", "whoami") + block(".:53", kubernetes)},
		"acl of a zone below":          {corefile: block("a.cluster.local", "acl {\n block\n}", "hosts") + block(".:53", kubernetes), uncached: "acl"},
		"view beside the common block": {corefile: block(".:53", "view inner {\n expr incidr(client_ip(), '10.0.0.0/8')\n}", kubernetes) + block(".:53", kubernetes), uncached: "view"},
		"autopath":                     {corefile: block(".:53", "autopath @kubernetes", kubernetes), uncached: "autopath"},
		"dns64":                        {corefile: block(".:53", "dns64", kubernetes), uncached: "dns64"},
		"geoip":                        {corefile: block(".:53", "geoip /db", "metadata", kubernetes), uncached: "geoip"},
		"rewrite name":                 {corefile: block(".:53", "rewrite name exact a.cluster.local b.default.svc.cluster.local", kubernetes), unvouched: true},
		"rewrite edns0":                {corefile: block(".:53", "rewrite edns0 local set 0xffee {client_ip}", kubernetes), uncached: "rewrite"},
		"rewrite of part of a name":    {corefile: block(".:53", "rewrite name regex (.*)\\.cluster\\.local {1}.svc.cluster.local", kubernetes), unvouched: true},
		"rewrite by metadata":          {corefile: block(".:53", "rewrite name a.cluster.local {geoip/city}.cluster.local", kubernetes), uncached: "rewrite"},
		"template":                     {corefile: block(".:53", "template IN ANY cluster.local {\n answer \"{{ .Name }} 60 IN A 10.0.0.1\"\n fallthrough\n}", kubernetes), uncached: "template"},
		"template with plain words":    {corefile: block(".:53", "template IN HINFO . {\n rcode NXDOMAIN\n}", kubernetes), unvouched: true},
		"a plugin that nobody knows":   {corefile: block(".:53", "frobnicate", kubernetes), uncached: "frobnicate"},
		"an import":                    {corefile: "import /etc/coredns/custom/*.server\n" + block(".:53", kubernetes), uncached: "import"},
		"beside such a zone":           {corefile: block("{$DOMAIN}:53", "kubernetes") + block(".:53", "acl {\n block\n}", kubernetes), uncached: "acl"},
		"another port of such a zone":  {corefile: block("{$DOMAIN}:5300", "acl {\n block\n}", "kubernetes") + block(".:53", kubernetes)},
		"several clusters":             {corefile: block(".:53", "kubernetes cluster.local clusterset.local {\n multicluster clusterset.local\n}"), unvouched: true},
		"dynamic updates":              {corefile: block("cluster.local:53", "dynupdate {\n file db\n}"), unvouched: true},
		"updates of another zone":      {corefile: block(".:53", kubernetes, "dynupdate k2s.test {\n file db\n}")},
		"nobody answers":               {corefile: block("other.test", "hosts"), unvouched: true},
		"another port":                 {corefile: block(".:5300", "acl {\n block\n}") + block(".:53", kubernetes)},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := parseCorefile(test.corefile, corefilePath, container{})
			if err != nil {
				t.Fatal(err)
			}
			zone := test.zone
			if zone == "" {
				zone = "cluster.local"
			}
			port := uint16(53)
			if strings.Contains(name, "OpenShift") {
				port = 5353
			}
			uncached, unvouched := c.keeping(zone, []uint16{port})
			if test.uncached == "" && uncached != "" || !strings.Contains(uncached, test.uncached) {
				t.Errorf("not kept: %q, want %q", uncached, test.uncached)
			}
			if want := test.unvouched || test.uncached != ""; unvouched != want {
				t.Errorf("unvouched: %v, want %v", unvouched, want)
			}
		})
	}
}
