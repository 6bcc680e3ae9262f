package config

// TransparentLimits says what the resolver mode transparent does not cover, a sentence each: queries that reach the
// host's resolver, or nobody, though a cluster's name is asked for.
func TransparentLimits() []string {
	return []string{
		"Programs that ask systemd-resolved over D-Bus or varlink send no packet: nss-resolve (\"resolve\" in the hosts line of /etc/nsswitch.conf) and resolvectl.",
		"Programs that ask another server than the loopback ones of resolv.conf.",
		"TCP, and so answers that do not fit the client's UDP size: 512 octets without EDNS, 1232 with it.",
		"Queries that are not plain: over 512 octets, of another class than IN, with IP options or more records than one OPT.",
		"Without a living endpoint of the query's address family that the kernel can steer to, cluster names are answered SERVFAIL.",
	}
}
