package resolvconf

import (
	"bytes"
	"net/netip"
	"slices"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

// A person who edits our file, and a program that adds to what it finds, leave lines of ours in theirs. What we wrote is
// never part of what detach leaves behind: it would say that it is temporary, and name servers that nobody is any more.

// withoutTraces is content without our lines and without those that name one of our own servers.
func withoutTraces(content []byte, own []netip.Addr) []byte {
	var b bytes.Buffer
	for line := range bytes.Lines(content) {
		servers := Parse(line).Nameservers
		if isTrace(string(line)) || len(servers) > 0 && isOwn(servers[0].Unmap(), own) {
			continue
		}
		b.Write(line)
	}
	return b.Bytes()
}

// cleanse takes our lines out of somebody else's file. A file without any, one that nobody may change, and one that
// would name no server without them stays as it is.
func (m *Manager) cleanse(rec record, cur object) error {
	if cur.Type != TypeRegular || cur.tooLarge || attribute(cur.info) != "" {
		return nil
	}
	own := rec.served()
	if len(own) == 0 && slices.ContainsFunc(Parse(cur.content).Comments, isTrace) {
		own = m.opts.Listen // the journal is lost
	}
	// An address that was there before us was not written by us.
	former := Parse(rec.original.Content).Nameservers
	own = slices.DeleteFunc(slices.Clone(own), func(a netip.Addr) bool { return slices.Contains(former, a) })
	text := withoutTraces(cur.content, own)
	if bytes.Equal(text, cur.content) || len(Parse(text).Nameservers) == 0 {
		return nil
	}
	m.log.Warn("somebody else's resolver file has lines of ours in it: taking them out", zap.String("path", m.path))
	if cur.info.MountRoot {
		return m.overwriteFile(cur, text)
	}
	if err := hostfs.RemoveIfExists(m.fs, m.fresh); err != nil {
		return err
	}
	xattrs, err := m.fs.Xattrs(m.path)
	if err != nil {
		return err
	}
	flags, err := m.fs.Flags(m.path)
	if err != nil {
		return err
	}
	clean := original{Type: TypeRegular, Content: text, Info: cur.info, Xattrs: xattrs, Flags: flags}
	if _, err := m.rebuild(clean, m.fresh); err != nil {
		return err
	}
	if err := m.swapIn(m.fresh, cur); err != nil {
		return err
	}
	return m.drop(m.fresh)
}
