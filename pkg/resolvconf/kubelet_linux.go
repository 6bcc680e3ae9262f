package resolvconf

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

// KubeletFile is the name, in the state directory, of the file that a kubelet's
// resolvConf setting should point at.
const KubeletFile = "kubelet-resolv.conf"

// What the kubelet takes of a search list (ValidateDNSConfig since Kubernetes
// 1.28): names, and characters with the spaces between them.
const (
	maxSearchNames = 32
	maxSearchChars = 2048
)

// Publish is the content of a kubelet's file.
type Publish struct {
	// Path; default KubeletFile in /var/lib/k2s-dnsbpf.
	Path string
	// FS; nil is the real one.
	FS hostfs.FS
	// Upstreams in their order, which should be stable: pods copy the file once.
	Upstreams []netip.Addr
	// Own are the addresses that the program serves on.
	Own []netip.Addr
	// Base gives search list and options: the original's, never ours.
	Base File
}

// Published is what PublishKubelet did.
type Published struct {
	Path        string
	Nameservers []netip.Addr // in the file now
	Changed     bool         // it was written
	// KeptOld: no upstream is fit for pods, so the last good file stays.
	KeptOld bool
	Dropped []Skip // servers and search names that are not in it
}

// PublishKubelet writes the resolver file for pods, in one step and only if it
// differs. The file stays after detach, reboot and removal, since a kubelet
// fails every pod without it; it is never emptied. With nothing to publish and
// no good file there it fails with ErrNothingToPublish. One call at a time per
// path.
func PublishKubelet(p Publish) (Published, error) {
	if p.Path == "" {
		p.Path = "/var/lib/k2s-dnsbpf/" + KubeletFile
	}
	if p.FS == nil {
		p.FS = hostfs.OS()
	}
	out := Published{Path: p.Path}
	doing := "publish " + p.Path
	out.Nameservers, out.Dropped = podServers(p.Upstreams, p.Own)

	old, err := p.FS.ReadFile(p.Path, MaxSize)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, ErrTooLarge):
		old = nil
	case err != nil:
		return Published{}, explain(doing, err)
	}
	if len(out.Nameservers) == 0 {
		out.Nameservers, _ = podServers(Parse(old).Nameservers, p.Own)
		if len(out.Nameservers) > 0 {
			out.KeptOld = true
			return out, nil
		}
		return Published{}, fmt.Errorf("%s: %w: no upstream is reachable from a pod (%s): give one with --upstream",
			doing, ErrNothingToPublish, joinSkips(out.Dropped))
	}
	text, dropped := p.render(out.Nameservers)
	out.Dropped = append(out.Dropped, dropped...)
	if bytes.Equal(text, old) {
		return out, nil
	}
	if err := hostfs.MkdirAll(p.FS, filepath.Dir(p.Path)); err != nil {
		return Published{}, explain(doing, err)
	}
	if err := hostfs.WriteFile(p.FS, p.Path, text, ourMode); err != nil {
		return Published{}, explain(doing, err)
	}
	out.Changed = true
	return out, nil
}

// podServers picks what a pod, in a network namespace of its own, can ask.
func podServers(servers, own []netip.Addr) (picked []netip.Addr, dropped []Skip) {
	for _, a := range servers {
		a = a.Unmap()
		reason := unusable(a, own)
		switch {
		case reason != "":
		case a.IsLoopback():
			reason = "a pod's loopback is its own"
		case a.Zone() != "" || a.IsLinkLocalUnicast():
			reason = "a pod has no such link"
		case slices.Contains(picked, a):
			reason = "named twice"
		case len(picked) == maxNameservers:
			reason = "a pod takes three at most"
		}
		if reason != "" {
			dropped = append(dropped, Skip{Text: a.String(), Reason: reason})
			continue
		}
		picked = append(picked, a)
	}
	return picked, dropped
}

// render has no time and no attach id in it: equal content must be equal bytes.
func (p Publish) render(servers []netip.Addr) (text []byte, dropped []Skip) {
	var b bytes.Buffer
	b.WriteString("# k2s-dnsbpf: the host's DNS servers, for the kubelet (resolvConf). Keep it: pods need it.\n")
	for _, a := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", a)
	}
	var search []string
	chars := 0
	for i, name := range p.Base.Search {
		if chars += len(name); i > 0 {
			chars++
		}
		if i >= maxSearchNames || chars > maxSearchChars {
			dropped = append(dropped, Skip{Text: name, Reason: "a kubelet takes 32 search names in 2048 characters"})
			continue
		}
		search = append(search, name)
	}
	if len(search) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(search, " "))
	}
	if len(p.Base.Options) > 0 {
		fmt.Fprintf(&b, "options %s\n", strings.Join(p.Base.Options, " "))
	}
	return b.Bytes(), dropped
}

func joinSkips(list []Skip) string {
	if len(list) == 0 {
		return "there is none"
	}
	out := make([]string, 0, len(list))
	for _, s := range list {
		out = append(out, s.String())
	}
	return strings.Join(out, ", ")
}
