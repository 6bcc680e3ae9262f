/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_PKT_H
#define DNSBPF_PKT_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>

#include "common.h"
#include "reasons.h"

#define IP_FRAGMENT_BE bpf_htons(0x3fff) /* MF and the offset; DF and the reserved bit are no fragment */
#define VLAN_VID_MASK  0x0fff            /* of a tag's control information (IEEE 802.1Q) */

/* What parse_udp() looks at, at the most. */
#define HEADERS_MAX (ETH_HLEN + sizeof(struct ipv6hdr) + sizeof(struct udphdr))

/*
 * One parsed packet: offsets and copied values, never packet pointers, since those die with every helper that may
 * move data. Offsets count from the start of the frame.
 */
struct dns_pkt {
	union addr src;
	union addr dst;
	__u16 sport; /* ports and ID in the machine's byte order */
	__u16 dport;
	__u32 dns_end; /* end of the UDP payload, by the UDP header; 32 bits, since lo takes packets of 64 KiB */
	__u16 dns_off; /* and its start */
	__u16 l4_off;
	__u8 v6;
	__u8 has_ports; /* 0: the ports could not be read */

	/* Set by parse_query(). */
	__u16 id;
	__u16 asked;        /* DNS_ASKED_* */
	__u16 opt_size_off; /* offset of the OPT record's UDP payload size, 0 without OPT */
	__be16 opt_size_be;
};

static __always_inline enum dns_reason parse_ipv4(void *data, void *data_end, __u32 frame_length, struct dns_pkt *pkt)
{
	struct iphdr *ip = data + ETH_HLEN;
	struct udphdr *udp = (void *)(ip + 1);
	__u32 total;

	/* The shortest DNS message is longer than this, so a shorter frame can't be a query. */
	if ((void *)(udp + 1) > data_end)
		return DNS_NOT_OURS;
	if (ip->protocol != IPPROTO_UDP)
		return DNS_NOT_OURS;

	pkt->v6 = 0;
	pkt->has_ports = 0;
	if (unlikely(ip->version != 4))
		return DNS_NOT_OURS;
	if (unlikely(ip->ihl != 5))
		return DNS_REASON_passed_ip_options;
	if (unlikely(ip->frag_off & IP_FRAGMENT_BE))
		return DNS_REASON_passed_fragment;

	pkt->has_ports = 1;
	pkt->sport = bpf_ntohs(udp->source);
	pkt->dport = bpf_ntohs(udp->dest);
	pkt->l4_off = ETH_HLEN + sizeof(*ip);
	pkt->dns_off = pkt->l4_off + sizeof(*udp);
	total = bpf_ntohs(ip->tot_len);
	pkt->dns_end = ETH_HLEN + total;
	if (unlikely(total < sizeof(*ip) + sizeof(*udp) || pkt->dns_end > frame_length ||
	             bpf_ntohs(udp->len) != total - sizeof(*ip)))
		return DNS_REASON_passed_malformed;
	return DNS_OK;
}

static __always_inline bool ipv6_is_extension(__u8 nexthdr)
{
	switch (nexthdr) {
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_FRAGMENT:
	case IPPROTO_DSTOPTS:
	case IPPROTO_AH:
	case IPPROTO_MH:
		return true;
	}
	return false;
}

static __always_inline enum dns_reason parse_ipv6(void *data, void *data_end, __u32 frame_length, struct dns_pkt *pkt)
{
	struct ipv6hdr *ip6 = data + ETH_HLEN;
	struct udphdr *udp = (void *)(ip6 + 1);
	__u32 payload;

	if ((void *)(udp + 1) > data_end)
		return DNS_NOT_OURS;

	pkt->v6 = 1;
	pkt->has_ports = 0;
	if (unlikely(ip6->version != 6))
		return DNS_NOT_OURS;
	if (ip6->nexthdr != IPPROTO_UDP)
		return unlikely(ipv6_is_extension(ip6->nexthdr)) ? DNS_REASON_passed_ip_options : DNS_NOT_OURS;

	pkt->has_ports = 1;
	pkt->sport = bpf_ntohs(udp->source);
	pkt->dport = bpf_ntohs(udp->dest);
	pkt->l4_off = ETH_HLEN + sizeof(*ip6);
	pkt->dns_off = pkt->l4_off + sizeof(*udp);
	payload = bpf_ntohs(ip6->payload_len);
	pkt->dns_end = pkt->l4_off + payload;
	if (unlikely(payload < sizeof(*udp) || pkt->dns_end > frame_length || bpf_ntohs(udp->len) != payload ||
	             /* Over IPv6 there must be a checksum (RFC 8200 section 8.1). */
	             !udp->check))
		return DNS_REASON_passed_malformed;
	return DNS_OK;
}

/* A frame's Ethernet header with a VLAN tag (IEEE 802.1Q). */
struct vlan_ethhdr {
	__u8 h_dest[ETH_ALEN];
	__u8 h_source[ETH_ALEN];
	__be16 h_vlan_proto;
	__be16 h_vlan_tci;
	__be16 h_vlan_encapsulated_proto;
};

/*
 * The octets by which a priority tag, one of VLAN 0, moves the headers; the stack ignores it. Read from there on, the
 * frame is one without it but for its Ethernet addresses. For XDP: before TC the stack has taken a tag out of the
 * frame.
 */
static __always_inline __u32 priority_tag(void *data, void *data_end)
{
	struct vlan_ethhdr *eth = data;

	if ((void *)(eth + 1) > data_end ||
	    (eth->h_vlan_proto != bpf_htons(ETH_P_8021Q) && eth->h_vlan_proto != bpf_htons(ETH_P_8021AD)) ||
	    eth->h_vlan_tci & bpf_htons(VLAN_VID_MASK))
		return 0;
	return sizeof(*eth) - ETH_HLEN;
}

/*
 * parse_udp - find the ports and the payload of a plain UDP packet
 *
 * Return: DNS_OK with ports and offsets set; DNS_NOT_OURS for what is not UDP; a passed_* reason for UDP that is not
 * plain, with has_ports telling whether the ports could be read. The addresses are read by load_addrs().
 */
static __always_inline enum dns_reason parse_udp(void *data, void *data_end, __u32 frame_length, struct dns_pkt *pkt)
{
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > data_end)
		return DNS_NOT_OURS;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return parse_ipv4(data, data_end, frame_length, pkt);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		return parse_ipv6(data, data_end, frame_length, pkt);
	return DNS_NOT_OURS;
}

/* Our own form of an IPv4 address, which nobody has in an IPv6 header (RFC 4291 section 2.5.5.2). */
static __always_inline bool is_v4_mapped(const union addr *addr)
{
	return !addr->halves[0] && addr->words[2] == V4MAPPED_PREFIX_BE;
}

/* Read the addresses that parse_udp() saw; both headers are known to be there. Return: 0, or -1: not for us. */
static __always_inline int load_addrs(void *data, void *data_end, struct dns_pkt *pkt)
{
	if (pkt->v6) {
		struct ipv6hdr *ip6 = data + ETH_HLEN;

		if ((void *)(ip6 + 1) > data_end)
			return -1;
		__builtin_memcpy(&pkt->src, &ip6->saddr, sizeof(pkt->src));
		__builtin_memcpy(&pkt->dst, &ip6->daddr, sizeof(pkt->dst));
		if (is_v4_mapped(&pkt->src) || is_v4_mapped(&pkt->dst))
			return -1;
	} else {
		struct iphdr *ip = data + ETH_HLEN;

		if ((void *)(ip + 1) > data_end)
			return -1;
		addr_set_v4(&pkt->src, ip->saddr);
		addr_set_v4(&pkt->dst, ip->daddr);
	}
	return 0;
}

#endif
