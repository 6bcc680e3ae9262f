/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_FILTER_H
#define DNSBPF_FILTER_H

#include <linux/tcp.h>

#include "common.h"
#include "config.h"
#include "dns.h"
#include "maps.h"
#include "pkt.h"
#include "steer.h"
#include "types.h"

/*
 * Who may ask, and what is not even looked at: decided in XDP, before the packet costs a socket buffer's way through
 * the stack. What it is silent about goes on to the TC programs and to the forwarder.
 */

/* Is this TCP for the DNS port? The addresses are where parse_udp() expects them: that has set pkt->v6. */
static __always_inline bool is_dns_tcp(void *data, void *data_end, struct dns_pkt *pkt)
{
	struct ethhdr *eth = data;
	struct tcphdr *tcp;

	if ((void *)(eth + 1) > data_end)
		return false;
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data + ETH_HLEN;

		tcp = (void *)(ip + 1);
		if ((void *)(tcp + 1) > data_end || ip->protocol != IPPROTO_TCP || ip->version != 4 || ip->ihl != 5 ||
		    ip->frag_off & IP_FRAGMENT_BE)
			return false;
		pkt->v6 = 0;
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip6 = data + ETH_HLEN;

		tcp = (void *)(ip6 + 1);
		if ((void *)(tcp + 1) > data_end || ip6->version != 6 || ip6->nexthdr != IPPROTO_TCP)
			return false;
		pkt->v6 = 1;
	} else {
		return false;
	}
	return tcp->dest == bpf_htons(cfg_dns_port);
}

/*
 * may_ask - is this source right for the interface that the packet came in on, and is it allowed to ask?
 * @listed: only a source that the daemon has listed as allowed may ask, as at the KubeSwitch address
 *
 * What this steers no longer meets the checks of the stack for sources that nobody, or nobody there, can have: own,
 * loopback and broadcast addresses, those of another interface's network.
 *
 * A function of its own: what it leaves on the stack would be part of the verifier's state, and all that follows be
 * looked at a second time.
 */
static __noinline bool may_ask(const union addr *source, __u32 ifindex, bool listed)
{
	struct dns_prefix prefix = { .length = 128 };
	struct dns_source *known;

	__builtin_memcpy(prefix.addr, source, sizeof(prefix.addr));
	known = bpf_map_lookup_elem(&dns_sources, &prefix);
	if (!known)
		return !listed;
	if (listed && !known->allowed)
		return false;
	return known->ifindex == ifindex || known->ifindex == DNS_ANY_INTERFACE ||
	       (known->ifindex && known->ifindex == reply_ifindex(ifindex));
}

/* Can this payload of a UDP datagram to us be a query at all? A reply to nobody, or less than a header, is none. */
static __always_inline bool can_be_query(void *data, void *data_end, const struct dns_pkt *pkt)
{
	struct dnshdr *hdr = data + (pkt->dns_off & 0x7f);

	if (pkt->dns_end - pkt->dns_off < sizeof(*hdr))
		return false;
	/* Not in the linear part: TC looks. */
	if ((void *)(hdr + 1) > data_end)
		return true;
	return !(hdr->flags & DNS_FLAG_QR_BE);
}

#endif
