package resolvconf

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var compareAddr = cmpopts.EquateComparable(netip.Addr{})

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func TestParse(t *testing.T) {
	long := strings.Repeat("a", 60)
	tests := []struct {
		name string
		in   string
		want File
	}{
		{"empty", "", File{}},
		{"no final newline, tabs", "nameserver\t192.0.2.1\nsearch a  b\tc", File{
			Nameservers: addrs("192.0.2.1"), Search: []string{"a", "b", "c"}, SearchKeyword: "search"}},
		{"trailing comment", "nameserver 1.1.1.1 # eth0:v4\nnameserver 1.0.0.1;x\nnameserver 9.9.9.9#y\n", File{
			Nameservers: addrs("1.1.1.1", "1.0.0.1", "9.9.9.9")}},
		{"comments", "# a\n; b\n  # c\n\n \t\n", File{Comments: []string{"# a", "; b"}}},
		{"leading blank", " nameserver 1.1.1.1\n", File{
			Skipped: []Skip{{1, " nameserver 1.1.1.1", "a keyword must be at the start of the line"}}}},
		{"upper case", "NameServer 1.1.1.1\n", File{
			Skipped: []Skip{{1, "NameServer 1.1.1.1", "keywords are lower case"}}}},
		{"carriage returns", "nameserver 1.1.1.1\r\nsearch x\r\noptions rotate\r", File{
			Nameservers: addrs("1.1.1.1"), Search: []string{"x"}, SearchKeyword: "search", Options: []string{"rotate"}}},
		{"carriage returns within", "search \r \nsearch a\rb\r\nnameserver 1.1.1.1\r \r\noptions rotate \r ndots:2", File{
			Nameservers: addrs("1.1.1.1"), Search: []string{"a"}, SearchKeyword: "search", Options: []string{"rotate"},
			Skipped: []Skip{
				{1, "search ", "nothing after the keyword"}, {2, "b\r", "after a carriage return, which ends the line"},
				{4, " ndots:2", "after a carriage return, which ends the line"},
			}}},
		{"byte order mark", "\xef\xbb\xbfnameserver 1.1.1.1\nnameserver 2.2.2.2\n", File{
			Nameservers: addrs("2.2.2.2"),
			Skipped:     []Skip{{1, "\xef\xbb\xbfnameserver 1.1.1.1", "starts with a byte order mark, which is not part of a keyword"}}}},
		{"NUL", "nameserver 1.1.1.1\x00junk\nnameserver 2.2.2.2\n", File{
			Nameservers: addrs("1.1.1.1", "2.2.2.2"),
			Skipped:     []Skip{{1, "junk", "after a NUL byte, which ends the line"}}}},
		{"no operand", "nameserver\nsearch \noptions\t\nnameserver #x\n", File{Skipped: []Skip{
			{1, "nameserver", "nothing after the keyword"}, {2, "search ", "nothing after the keyword"},
			{3, "options\t", "nothing after the keyword"}, {4, "#x", "not an IP address"}}}},
		{"glued keyword", "nameserver1.1.1.1\nnameservers 1.1.1.1\nlookup file bind\n", File{Skipped: []Skip{
			{1, "nameserver1.1.1.1", "unknown keyword"}, {2, "nameservers 1.1.1.1", "unknown keyword"},
			{3, "lookup file bind", "unknown keyword"}}}},
		{"addresses", "nameserver fe80::1%eth0\nnameserver fe80::1\nnameserver ::1\nnameserver ::ffff:1.1.1.1\nnameserver 0.0.0.0\nnameserver 127.0.0.53\n", File{
			Nameservers: addrs("fe80::1%eth0", "fe80::1", "::1", "::ffff:1.1.1.1", "0.0.0.0", "127.0.0.53")}},
		{"not addresses", "nameserver [::1]:5353\nnameserver invalid IP\nnameserver 1.1.1.1:53\nnameserver 256.1.1.1\nnameserver fe80::1%\n", File{Skipped: []Skip{
			{1, "[::1]:5353", "an address with a port or in brackets is not allowed here"},
			{2, "invalid IP", "not an IP address"}, {3, "1.1.1.1:53", "not an IP address"},
			{4, "256.1.1.1", "not an IP address"}, {5, "fe80::1%", "not an IP address"}}}},
		{"inet_aton", "nameserver 10.1\nnameserver 0x7f.1\nnameserver 012.0.0.010\nnameserver 167772161\nnameserver 10.0.258\n", File{
			Nameservers: addrs("10.0.0.1", "127.0.0.1", "10.0.0.8", "10.0.0.1", "10.0.1.2")}},
		{"five and duplicates", "nameserver 1.0.0.1\nnameserver 1.0.0.2\nnameserver 1.0.0.1\nnameserver 1.0.0.3\nnameserver 1.0.0.4\n", File{
			Nameservers: addrs("1.0.0.1", "1.0.0.2", "1.0.0.1", "1.0.0.3", "1.0.0.4")}},
		{"long search", "search " + strings.Join([]string{long, long, long, long, long, long, long}, " "), File{
			Search: []string{long, long, long, long, long, long, long}, SearchKeyword: "search"}},
		{"search dot", "search .\n", File{Search: []string{"."}, SearchKeyword: "search"}},
		{"domain then search", "domain a\nsearch b c\n", File{Search: []string{"b", "c"}, SearchKeyword: "search"}},
		{"search then domain", "search b c\ndomain a x\n", File{Search: []string{"a"}, SearchKeyword: "domain",
			Skipped: []Skip{{2, "x", "domain takes one name"}}}},
		{"two searches", "search a\nsearch b\n", File{Search: []string{"b"}, SearchKeyword: "search"}},
		{"options add up", "options ndots:5 timeout:1\noptions\tno-reload what:ever ndots:2\n", File{
			Options: []string{"ndots:5", "timeout:1", "no-reload", "what:ever", "ndots:2"}}},
		{"sortlist", "sortlist 130.155.160.0/255.255.240.0 130.155.0.0\nsortlist 10.0.0.0\n", File{
			Sortlist: []string{"130.155.160.0/255.255.240.0 130.155.0.0", "10.0.0.0"}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, Parse([]byte(tt.in)), compareAddr); diff != "" {
				t.Error("(-want +got)\n" + diff)
			}
		})
	}
}

func TestParseJunkIsBounded(t *testing.T) {
	f := Parse([]byte(strings.Repeat(strings.Repeat("x", 200)+"\n", 1000)))
	if len(f.Skipped) != maxSkips+1 {
		t.Errorf("%d skips listed, want %d", len(f.Skipped), maxSkips+1)
	}
	if n := len(f.Skipped[0].Text); n != maxSkipText {
		t.Errorf("text of %d bytes, want %d", n, maxSkipText)
	}
}

// FuzzParse: nothing panics, and what is carried over into our file reads back
// as it was, with our nameserver and no other.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"nameserver 1.1.1.1\nsearch a b\noptions ndots:5 no-reload\nsortlist 1.2.3.0/255.255.255.0\n",
		"nameserver fe80::1%eth0\r\ndomain x\x00y\n", "\xef\xbb\xbfoptions a\n", "search a\x0bnameserver\x0c8.8.8.8",
		"search \r nameserver 8.8.8.8\n", "search \r ", "options \xff\xfe #\n",
	} {
		f.Add([]byte(s))
	}
	ours := addrs("127.0.0.1")
	f.Fuzz(func(t *testing.T, data []byte) {
		file := Parse(data)
		if n := len(file.Skipped); n > maxSkips+1 {
			t.Fatalf("%d skips", n)
		}
		text, err := rendering{path: "/etc/resolv.conf", undo: byHand{"/etc/p", "mv -f /etc/p /etc/resolv.conf"}, attachID: "id", version: "v", nameservers: ours, base: file}.render()
		if err != nil {
			t.Fatal(err)
		}
		if !sealed(text) {
			t.Fatal("our own file isn't recognised")
		}
		back := Parse(text)
		if !slices.Equal(back.Nameservers, ours) || len(back.Skipped) > 0 {
			t.Fatalf("nameservers %v, skipped %v", back.Nameservers, back.Skipped)
		}
		if !slices.Equal(back.Search, file.Search) || back.SearchKeyword != file.SearchKeyword {
			t.Fatalf("search %q became %q", file.Search, back.Search)
		}
		if want := carriedOptions(file.Options); !slices.Equal(back.Options, want) {
			t.Fatalf("options %q became %q", want, back.Options)
		}
		if !slices.Equal(back.Sortlist, file.Sortlist) {
			t.Fatalf("sortlist %q became %q", file.Sortlist, back.Sortlist)
		}
	})
}

func TestChooseUpstreams(t *testing.T) {
	own := addrs("127.0.0.1", "::1", "172.19.1.1")
	const file, uplink, nm = "file", "uplinks", "nm"
	tests := []struct {
		name                  string
		servers, uplinks, nms []netip.Addr
		want                  []string
		dropped               []string // a part of each reason, in order
	}{
		{name: "all, in order, once", servers: addrs("1.0.0.1", "1.0.0.2", "1.0.0.1", "2001:db8::1", "1.0.0.3", "1.0.0.4"),
			want: []string{"1.0.0.1 file", "1.0.0.2 file", "2001:db8::1 file", "1.0.0.3 file", "1.0.0.4 file"}, dropped: []string{"twice"}},
		{name: "odd addresses", servers: addrs("fe80::1%eth0", "fe80::1", "::ffff:1.1.1.1", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255"),
			want: []string{"fe80::1%eth0 file", "1.1.1.1 file"}, dropped: []string{"zone", "unspecified", "unspecified", "one server", "one server"}},
		{name: "ourselves", servers: addrs("127.0.0.1", "::ffff:127.0.0.1", "::1", "172.19.1.1"),
			dropped: []string{"itself", "itself", "itself", "itself"}},
		{name: "stub with uplinks", servers: addrs("127.0.0.53", "9.9.9.9"), uplinks: addrs("10.0.0.1", "127.0.0.1", "10.0.0.2"),
			want: []string{"10.0.0.1 uplinks", "10.0.0.2 uplinks", "9.9.9.9 file"}, dropped: []string{"stub", "itself"}},
		{name: "stub without uplinks", servers: addrs("127.0.0.53"), dropped: []string{"stub"}},
		{name: "extra stub", servers: addrs("127.0.0.54"), uplinks: addrs("10.0.0.1"), want: []string{"10.0.0.1 uplinks"}, dropped: []string{"stub"}},
		{name: "stub, NetworkManager knows", servers: addrs("127.0.0.53"), nms: addrs("10.0.0.9"), want: []string{"10.0.0.9 nm"}, dropped: []string{"stub"}},
		{name: "other loopback resolver is kept", servers: addrs("127.0.0.2"), uplinks: addrs("10.0.0.1"), want: []string{"127.0.0.2 file"}},
		{name: "our port taken from dnsmasq", servers: addrs("127.0.0.1"), nms: addrs("10.0.0.9"), want: []string{"10.0.0.9 nm"}, dropped: []string{"itself"}},
		{name: "no file, uplinks", uplinks: addrs("10.0.0.1"), want: []string{"10.0.0.1 uplinks"}},
		{name: "nothing"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ups, dropped := chooseUpstreams(serverList{file, tt.servers}, serverList{uplink, tt.uplinks}, []serverList{{nm, tt.nms}}, own)
			var got []string
			for _, u := range ups {
				got = append(got, fmt.Sprintf("%s %s", u.Addr, u.Source))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error("(-want +got)\n" + diff)
			}
			if len(dropped) != len(tt.dropped) {
				t.Fatalf("dropped %v, want %v", dropped, tt.dropped)
			}
			for i, d := range dropped {
				if !strings.Contains(d.Reason, tt.dropped[i]) {
					t.Errorf("dropped %v, want %q in the reason", d, tt.dropped[i])
				}
			}
		})
	}
}

func TestDetectOwner(t *testing.T) {
	tests := []struct {
		name string
		env  Environment
		want Owner
		why  []string
	}{
		{"plain", Environment{Type: TypeRegular, Content: []byte("nameserver 1.1.1.1\n")}, OwnerPlain, []string{"a regular file that names no owner"}},
		{"missing", Environment{Type: TypeMissing}, OwnerNone, []string{"there is no file"}},
		{"ours", Environment{Type: TypeRegular, Ours: true}, OwnerOurselves, []string{"the journal knows the file as ours"}},
		{"stub", Environment{Type: TypeSymlink, Link: "../run/systemd/resolve/stub-resolv.conf", Target: "/run/systemd/resolve/stub-resolv.conf"}, OwnerResolvedStub,
			[]string{"relative symbolic link to ../run/systemd/resolve/stub-resolv.conf", "/run/systemd/resolve/stub-resolv.conf belongs to systemd-resolved (stub)"}},
		{"uplink by /var/run", Environment{Type: TypeSymlink, Link: "x", Target: "/var/run/systemd/resolve/resolv.conf"}, OwnerResolvedUplink,
			[]string{"relative symbolic link to x", "/run/systemd/resolve/resolv.conf belongs to systemd-resolved (uplink)"}},
		{"NM dangling", Environment{Type: TypeDangling, Link: "/run/NetworkManager/resolv.conf", Target: "/run/NetworkManager/resolv.conf"}, OwnerNetworkManager,
			[]string{"absolute symbolic link to /run/NetworkManager/resolv.conf", "the link's target doesn't exist", "/run/NetworkManager/resolv.conf belongs to NetworkManager"}},
		{"NM file", Environment{Type: TypeRegular, Content: []byte("# Generated by NetworkManager\n")}, OwnerNetworkManager, []string{"a comment says: generated by networkmanager"}},
		{"openresolv", Environment{Type: TypeRegular, Content: []byte("# Generated by resolvconf\n")}, OwnerOpenresolv, []string{"a comment says: generated by resolvconf"}},
		{"Debian resolvconf", Environment{Type: TypeRegular, Content: []byte("# Dynamic resolv.conf(5) file for glibc resolver(3) generated by resolvconf(8)\n")}, OwnerResolvconf,
			[]string{"a comment says: generated by resolvconf(8)"}},
		{"mark in a value is none", Environment{Type: TypeRegular, Content: []byte("search cloud-init\n")}, OwnerPlain, []string{"a regular file that names no owner"}},
		{"empty", Environment{Type: TypeRegular}, OwnerPlain, []string{"an empty file"}},
		{"resolved in foreign mode", Environment{Type: TypeRegular, Content: []byte("nameserver 1.1.1.1\n"), Resolved: true}, OwnerPlain,
			[]string{"a regular file that names no owner", "systemd-resolved is there in foreign mode: it reads this file and asks the servers in it"}},
		{"resolved in stub mode is not foreign", Environment{Type: TypeSymlink, Link: "x", Target: "/run/systemd/resolve/stub-resolv.conf", Resolved: true}, OwnerResolvedStub,
			[]string{"relative symbolic link to x", "/run/systemd/resolve/stub-resolv.conf belongs to systemd-resolved (stub)"}},
		{"resolved static", Environment{Type: TypeSymlink, Link: "/usr/lib/systemd/resolv.conf", Target: "/usr/lib/systemd/resolv.conf"}, OwnerResolvedStatic,
			[]string{"absolute symbolic link to /usr/lib/systemd/resolv.conf", "/usr/lib/systemd/resolv.conf belongs to systemd-resolved (static)"}},
		{"netplan and cloud-init", Environment{Type: TypeSymlink, Link: "/run/NetworkManager/resolv.conf", Target: "/run/NetworkManager/resolv.conf", Netplan: true, CloudInit: true},
			OwnerNetworkManager, []string{"absolute symbolic link to /run/NetworkManager/resolv.conf", "/run/NetworkManager/resolv.conf belongs to NetworkManager",
				"netplan is there (/etc/netplan): it tells the owner which servers to use", "cloud-init is there (/run/cloud-init): it may write the file at the next boot"}},
		{"read-only", Environment{Type: TypeRegular, ReadOnly: true}, OwnerPlain, []string{"its file system is mounted read-only", "an empty file"}},
		{"dhclient", Environment{Type: TypeRegular, Content: []byte("# Generated by dhclient-script\n")}, OwnerDhclient, []string{"a comment says: dhclient-script"}},
		{"WSL", Environment{Type: TypeRegular, Content: []byte("# This file was automatically generated by WSL. To stop ...\n")}, OwnerWSL, []string{"a comment says: automatically generated by wsl"}},
		{"WSL link", Environment{Type: TypeSymlink, Link: "/mnt/wsl/resolv.conf", Target: "/mnt/wsl/resolv.conf"}, OwnerWSL,
			[]string{"absolute symbolic link to /mnt/wsl/resolv.conf", "/mnt/wsl/resolv.conf belongs to WSL"}},
		{"Debian resolvconf link", Environment{Type: TypeSymlink, Link: "/run/resolvconf/resolv.conf", Target: "/run/resolvconf/resolv.conf"}, OwnerResolvconf,
			[]string{"absolute symbolic link to /run/resolvconf/resolv.conf", "/run/resolvconf/resolv.conf belongs to resolvconf"}},
		{"cloud-init's file", Environment{Type: TypeRegular, Content: []byte("; Created by cloud-init on instance boot automatically, do not edit.\n")}, OwnerCloudInit, []string{"a comment says: cloud-init"}},
		{"Docker's mount", Environment{Type: TypeBindMount, Mount: "/x of /dev/sda (ext4)", Content: []byte("# Generated by Docker Engine.\n")}, OwnerContainer,
			[]string{"a mount of /x of /dev/sda (ext4) covers the file", "a comment says: generated by docker"}},
		{"mount", Environment{Type: TypeBindMount, Mount: "/x of /dev/sda (ext4)"}, OwnerContainer, []string{"a mount of /x of /dev/sda (ext4) covers the file"}},
		{"immutable", Environment{Type: TypeRegular, Immutable: true}, OwnerAdmin, []string{"the immutable attribute is set"}},
		{"unknown link", Environment{Type: TypeSymlink, Link: "/x", Target: "/x"}, OwnerUnknown, []string{"absolute symbolic link to /x"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			owner, why := DetectOwner(tt.env)
			if owner != tt.want {
				t.Errorf("owner %q, want %q", owner, tt.want)
			}
			if diff := cmp.Diff(tt.why, why); diff != "" {
				t.Error("(-want +got)\n" + diff)
			}
		})
	}
}

func TestRetries(t *testing.T) {
	for _, tt := range []struct {
		options  string
		timeout  time.Duration
		attempts int
		rotate   bool
	}{
		{"ndots:5 edns0", 0, 0, false},
		{"timeout:10 attempts:3 rotate", 10 * time.Second, 3, true},
		{"timeout:2 timeout:3", 3 * time.Second, 0, false},
		{"timeout:0 attempts:0", time.Second, 1, false},
		{"timeout:600 attempts:99", 30 * time.Second, 5, false},
		{"timeout:x attempts: timeout rotate:1", 0, 0, false},
	} {
		timeout, attempts, rotate := Parse([]byte("options " + tt.options + "\n")).Retries()
		if timeout != tt.timeout || attempts != tt.attempts || rotate != tt.rotate {
			t.Errorf("%s: %v, %d, %v", tt.options, timeout, attempts, rotate)
		}
	}
}
