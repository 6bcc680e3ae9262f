package config

import (
	"cmp"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the documents that are made from the table")

// values has a value for each setting that is not its default, as a flag and as a file have it.
var values = map[string]struct{ flag, file string }{
	"topology":   {}, // there is one
	"kubeconfig": {"/k", "/k"}, "dnsEndpoints": {"10.0.0.1", "[10.0.0.1]"}, "dnsService": {"a/b", "a/b"}, "corefileConfigMap": {"c", "c"},
	"stubZones": {"true", "yes"}, "endpointPreference": {"zone", "zone"}, "nodeName": {"n", "n"}, "zones": {"z", "[z]"},
	"serviceCIDRs": {"10.0.0.1/8", "[10.0.0.0/8]"}, "podCIDRs": {"10.0.0.0/8", "[10.0.0.0/8]"}, "upstreams": {"10.0.0.2", `["10.0.0.2:53"]`},
	"kubeswitchAddress": {"none", "none"}, "allowed": {"10.0.0.0/8", "[10.0.0.0/8]"}, "pods": {"veth*", `["veth*"]`},
	"clusterDNS": {"10.0.0.3", "[10.0.0.3]"}, "resolver": {"none", "none"}, "onForeignChange": {"yield", "yield"}, "inPlace": {"true", "on"},
	"overrideImmutable": {"true", "true"}, "bpf": {"true", "false"}, "cache": {"true", "off"}, "cacheEntries": {"100", "100"}, "cacheOff": {"x.cluster.local", "[x.cluster.local]"}, "wait": {"1s", "1s"}, "linger": {"0s", "0s"},
	"resolvConf": {"/a", "/a"}, "stateDir": {"/b", "/b"}, "runDir": {"/c d", "/c d"}, "bpffs": {"/e", "/e"}, "logLevel": {"debug", "debug"},
}

// TestTable: each field has a row, and each row has one way through flag, file, journal and another process.
func TestTable(t *testing.T) {
	var fields []string
	kind := reflect.TypeFor[Config]()
	for i := range kind.NumField() {
		key, _, _ := strings.Cut(kind.Field(i).Tag.Get("json"), ",")
		if key != "noKubeSwitch" { // kubeswitchAddress: none
			fields = append(fields, key)
		}
	}
	got := keys()
	slices.Sort(fields)
	slices.Sort(got)
	if !slices.Equal(fields, got) {
		t.Errorf("fields %v\nrows %v", fields, got)
	}
	for _, s := range Settings() {
		value, ok := values[s.Key]
		if !ok {
			t.Errorf("no value to try for %s", s.Key)
			continue
		}
		if value.flag == "" {
			continue
		}
		byFlag := Default()
		if err := s.Assign(&byFlag, value.flag); err != nil {
			t.Errorf("%s: %v", s.Key, err)
		}
		byFile, err := Load(t.Context(), writeFile(t, s.Key+": "+value.file+"\n"), true)
		if err != nil || !byFile.Same(byFlag) || byFile.Same(Default()) || s.Display(byFile) == s.Display(Default()) {
			t.Errorf("%s: flag %q, file %q (%v)", s.Key, s.Display(byFlag), s.Display(byFile), err)
		}
		// Said, but without a value.
		if unset, err := Load(t.Context(), writeFile(t, s.Key+":\n"), true); err != nil || !unset.Same(Default()) {
			t.Errorf("%s without a value: %q, %v", s.Key, s.Display(unset), err)
		}
		if changed := NeedDetach(Default(), byFlag); slices.Contains(changed, s.Key) == s.Live || len(changed) > 1 {
			t.Errorf("%s, live %v: needs a detach for %v", s.Key, s.Live, changed)
		}
		if CanAdopt(Default(), byFlag) == s.Anchors {
			t.Errorf("%s: what a daemon left where it was can be adopted: %v", s.Key, s.Anchors)
		}
	}
}

// TestNeedDetach names those that can't change while attached: another one would be a promise to keep.
func TestNeedDetach(t *testing.T) {
	var all []string
	for _, s := range Settings() {
		if !s.Live {
			all = append(all, s.Key)
		}
	}
	want := []string{"topology", "kubeswitchAddress", "resolver", "inPlace", "overrideImmutable", "bpf", "cacheEntries", "resolvConf", "stateDir", "runDir", "bpffs", "logLevel"}
	if !slices.Equal(all, want) {
		t.Errorf("got %v", all)
	}
	next := Default()
	next.Wait, next.InPlace, next.BPF = time.Second, true, false
	if got := NeedDetach(Default(), next); !slices.Equal(got, []string{"bpf", "inPlace"}) {
		t.Errorf("got %v", got)
	}
}

// TestCanAdopt: without programs in the kernel nothing of a dead daemon works on.
func TestCanAdopt(t *testing.T) {
	without := Default()
	without.BPF = false
	for _, c := range []struct {
		old, next Config
		can       bool
	}{{Default(), Default(), true}, {without, Default(), false}, {Default(), without, false}, {without, without, false}} {
		if got := CanAdopt(c.old, c.next); got != c.can {
			t.Errorf("from bpf %v to %v: %v", c.old.BPF, c.next.BPF, got)
		}
	}
}

// TestCommonArgs: another process has the settings of this one.
func TestCommonArgs(t *testing.T) {
	c := Default()
	c.ResolvConf, c.StateDir, c.RunDir, c.BPFFS, c.LogLevel = "/a/resolv.conf", "/b", "/c d", "/e", "debug"
	if got, err := ParseCommonArgs("guardian", c.CommonArgs()); err != nil || !got.Same(c) {
		t.Errorf("%v became %+v %v", c.CommonArgs(), got, err)
	}
	for _, bad := range [][]string{{"--nope"}, {"--state-dir", "relative"}, {"--run-dir"}} {
		if _, err := ParseCommonArgs("guardian", bad); err == nil {
			t.Errorf("%v is taken", bad)
		}
	}
}

// TestSettingsDocument: docs/settings.md is what the table says. "go generate ./pkg/config" writes it.
func TestSettingsDocument(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "settings.md")
	if *update {
		if err := os.WriteFile(path, []byte(document()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil || strings.ReplaceAll(string(text), "\r\n", "\n") != document() {
		t.Errorf("docs/settings.md is not what the table says (%v): run go generate ./pkg/config", err)
	}
	// Its example is a file that is taken.
	_, example, _ := strings.Cut(document(), "```yaml\n")
	example, _, _ = strings.Cut(example, "```")
	if c, err := Load(t.Context(), writeFile(t, example), true); err != nil || len(c.Zones) != 1 {
		t.Errorf("the example: %+v, %v", c, err)
	}
}

// document is docs/settings.md.
func document() string {
	var b strings.Builder
	b.WriteString(`# Settings

<!-- Made from the table in pkg/config by "go generate ./pkg/config": edit that. -->

Every setting can be in ` + "`" + DefaultFile + "` (or `--config FILE`)" + `; the command line comes before the file. A list on the command line
replaces the file's. A key without a value is left at its default. A file with an error is refused by ` + "`attach`" + `; all other commands warn
and go on with the rest of it, and with the directories of what is attached.

| key | flag | meaning | default | change while attached |
|---|---|---|---|---|
`)
	for _, s := range Settings() {
		flagText, change := "", "after `detach`"
		if s.Flag != "" {
			flagText = "`--" + s.Flag + "`"
		}
		if s.Live {
			change = "`attach` again"
		}
		usage := strings.ReplaceAll(strings.ReplaceAll(s.Usage, "`", ""), "|", `\|`)
		b.WriteString("| `" + s.Key + "` | " + flagText + " | " + usage + " | " + cmp.Or(s.Otherwise, s.Display(Default()), "none") + " | " + change + " |\n")
	}
	b.WriteString("\nAn example with every key:\n\n```yaml\n")
	for _, s := range Settings() {
		example := s.Example
		if example == "" {
			example = s.Display(Default())
		}
		b.WriteString(s.Key + ": " + example + "\n")
	}
	b.WriteString("```\n")
	return b.String()
}
