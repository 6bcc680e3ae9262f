package resolvconf

// elsewhere reports whether the host's first process has another file, or
// another directory, under the name than this one has: then this process has
// mounts of its own, and a takeover would say "attached" of a host that notices
// nothing. Where that can't be seen, or the name means nothing to process 1 (a
// host's directory mounted into a container), it isn't so.
func (m *Manager) elsewhere(cur object) bool {
	first := m.opts.Root + "/proc/1/root"
	theirs, err := m.fs.Lstat(first + m.dir)
	if err != nil {
		return false
	}
	dir, err := m.fs.Lstat(m.dir)
	if err != nil {
		return false
	}
	if !dir.SameFile(theirs) {
		return true
	}
	file, err := m.fs.Lstat(first + m.path)
	return err == nil && cur.exists() && !cur.info.SameFile(file)
}
