/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_REWRITE_TC_H
#define DNSBPF_REWRITE_TC_H

#include <linux/pkt_cls.h>

#include "common.h"
#include "csum.h"
#include "pkt.h"
#include "steer.h"

/*
 * The UDP checksum is left to the helper: only it knows whether the packet carries a full one or, as on lo and veth,
 * just the sum of the pseudo header. A checksum of zero (none) stays zero; a computed zero is sent as 0xffff (RFC 768).
 */
#define L4_CSUM_FLAGS BPF_F_MARK_MANGLED_0

static __always_inline void write_ipv4(struct iphdr *ip, const struct dns_rewrite *to, __u32 addr_diff)
{
	ip->check = csum_apply(ip->check, addr_diff);
	ip->saddr = to->src.words[3];
	ip->daddr = to->dst.words[3];
}

/*
 * rewrite_tc - give a packet its new addresses, ports and EDNS size
 *
 * Invalidates all packet pointers. Return: 0, or -1 if a helper refused; the packet may then be half-written.
 */
static __always_inline int rewrite_tc(struct __sk_buff *skb, const struct dns_pkt *pkt, const struct dns_rewrite *to)
{
	__u32 csum_off = (pkt->l4_off & 0x3f) + __builtin_offsetof(struct udphdr, check);
	__u32 addr_diff, port_diff;
	void *data, *data_end;
	struct udphdr *udp;

	if (pkt->v6)
		addr_diff = csum_diff(pkt->src.words, to->src.words, 4, csum_diff(pkt->dst.words, to->dst.words, 4, 0));
	else
		addr_diff = csum_diff(&pkt->src.words[3], &to->src.words[3], 1,
		                      csum_diff(&pkt->dst.words[3], &to->dst.words[3], 1, 0));
	port_diff = csum_diff16(bpf_htons(pkt->sport), bpf_htons(to->sport),
	                        csum_diff16(bpf_htons(pkt->dport), bpf_htons(to->dport), 0));
	if (to->opt_size_off)
		port_diff =
			csum_diff16_at(to->opt_size_off - pkt->l4_off, pkt->opt_size_be, to->opt_size_be, port_diff);

	if (bpf_l4_csum_replace(skb, csum_off, 0, addr_diff, L4_CSUM_FLAGS | BPF_F_PSEUDO_HDR) ||
	    bpf_l4_csum_replace(skb, csum_off, 0, port_diff, L4_CSUM_FLAGS))
		return -1;

	data = (void *)(long)skb->data;
	data_end = (void *)(long)skb->data_end;
	udp = data + (pkt->l4_off & 0x3f);
	if ((void *)(udp + 1) > data_end)
		return -1;
	/*
	 * A device may have summed up the packet (CHECKSUM_COMPLETE). The helper keeps its sum right for what the
	 * checksum fields of IPv4 and UDP make up for: IPv6 has no such field (newer kernels have the flag BPF_F_IPV6
	 * for it), and a UDP checksum of zero stays.
	 */
	if (pkt->v6)
		bpf_csum_update(skb, addr_diff);
	else if (!udp->check)
		bpf_csum_update(skb, port_diff);
	udp->source = bpf_htons(to->sport);
	udp->dest = bpf_htons(to->dport);
	if (pkt->v6) {
		struct ipv6hdr *ip6 = data + ETH_HLEN;

		if ((void *)(ip6 + 1) > data_end)
			return -1;
		__builtin_memcpy(&ip6->saddr, &to->src, sizeof(to->src));
		__builtin_memcpy(&ip6->daddr, &to->dst, sizeof(to->dst));
	} else {
		struct iphdr *ip = data + ETH_HLEN;

		if ((void *)(ip + 1) > data_end)
			return -1;
		write_ipv4(ip, to, addr_diff);
	}
	if (to->opt_size_off) {
		__be16 *size = data + (to->opt_size_off & 0x1ff);

		if ((void *)(size + 1) > data_end)
			return -1;
		*size = to->opt_size_be;
	}
	return 0;
}

/* Zero MACs are what lo has: the packet is taken for one addressed to this host. */
static __always_inline int clear_macs(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data;
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > (void *)(long)skb->data_end)
		return -1;
	__builtin_memset(eth->h_dest, 0, sizeof(eth->h_dest));
	__builtin_memset(eth->h_source, 0, sizeof(eth->h_source));
	return 0;
}

/*
 * What the asker's socket gave the packet, or a rule or queue on its way here, is not for the way on: a mark would
 * choose its route. The kernel itself takes the delivery time off. Volatile: two stores must not become one, of which
 * the verifier knows nothing.
 *
 * Invalidates all packet pointers.
 */
static __always_inline int forget_sender(struct __sk_buff *skb)
{
	volatile struct __sk_buff *fields = skb;

	fields->mark = 0;
	fields->priority = 0;
	fields->queue_mapping = 0;
	/* A tag that is still there has a priority only. */
	return skb->vlan_present ? bpf_skb_vlan_pop(skb) : 0;
}

/* Rewrite and send on. Return: a TC verdict; *reason becomes error_rewrite where that failed. */
static __always_inline int apply_tc(struct __sk_buff *skb, const struct dns_pkt *pkt, const struct dns_rewrite *to,
                                    enum dns_reason *reason)
{
	if (forget_sender(skb) || rewrite_tc(skb, pkt, to) || (to->local && clear_macs(skb))) {
		*reason = DNS_REASON_error_rewrite;
		return TC_ACT_SHOT;
	}
	if (to->local)
		return bpf_redirect(to->ifindex, BPF_F_INGRESS);
	return bpf_redirect_neigh(to->ifindex, NULL, 0, 0);
}

#endif
