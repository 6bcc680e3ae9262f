/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_ANSWER_H
#define DNSBPF_ANSWER_H

#include <linux/pkt_cls.h>

#include "common.h"
#include "csum.h"
#include "dns.h"
#include "pkt.h"
#include "rewrite_tc.h"

/* Answers that are made of the query, in place. */

/* The end of an OPT record: RDLENGTH, and the head of the first option where there is one (RFC 6891 section 6.1.2). */
struct dns_opt_end {
	__be16 rdlength;
	__be16 code;
	__be16 length;
} __attribute__((packed));

#define DNS_OPTION_HEAD 4 /* octets of an option's code and length */

/* What a query must be changed by to be its own SERVFAIL. */
struct dns_failure {
	__be16 flags;
	__be16 option_code;
	__be16 option_length;
	__u16 opt_end_off; /* 0: there are no options */
};

/*
 * plan_failure - what makes the query a reply, and what the checksum changes by
 *
 * The message keeps its length: an OPT record stays, as a reply to EDNS must have one, and all options in it become one
 * of padding, since none of them is answered: a cookie that comes back as it was sent would make the reply a forged
 * one. What the client and the server swap, addresses and ports, is the same to the checksum.
 */
static __always_inline int plan_failure(void *data, void *data_end, const struct dns_pkt *pkt, struct dns_failure *to,
                                        __u32 *diff)
{
	struct dnshdr *hdr = data + (pkt->dns_off & 0x7f);
	struct dns_opt_end *end;
	__u32 offset;

	if ((void *)(hdr + 1) > data_end)
		return -1;
	to->flags =
		(hdr->flags & (DNS_FLAG_RD_BE | DNS_FLAG_CD_BE)) | DNS_FLAG_QR_BE | DNS_FLAG_RA_BE | DNS_SERVFAIL_BE;
	*diff = csum_diff16(hdr->flags, to->flags, 0);
	if (!pkt->opt_size_off)
		return 0;
	offset = pkt->opt_size_off + __builtin_offsetof(struct dns_opt, rdlength) -
	         __builtin_offsetof(struct dns_opt, udp_size);
	end = data + (offset & 0x1ff);
	/* With the frame ends an OPT record without options. */
	if ((void *)(end + 1) > data_end || bpf_ntohs(end->rdlength) < DNS_OPTION_HEAD)
		return 0;
	to->opt_end_off = offset;
	to->option_code = bpf_htons(DNS_EDNS_PADDING);
	to->option_length = bpf_htons(bpf_ntohs(end->rdlength) - DNS_OPTION_HEAD);
	offset += sizeof(end->rdlength) - pkt->l4_off;
	*diff = csum_diff16_at(offset, end->code, to->option_code, *diff);
	*diff = csum_diff16_at(offset + sizeof(end->code), end->length, to->option_length, *diff);
	return 0;
}

/* Client and server change places. */
static __always_inline int swap_ends(void *data, void *data_end, const struct dns_pkt *pkt)
{
	struct udphdr *udp = data + (pkt->l4_off & 0x3f);

	if ((void *)(udp + 1) > data_end)
		return -1;
	udp->source = bpf_htons(pkt->dport);
	udp->dest = bpf_htons(pkt->sport);
	if (pkt->v6) {
		struct ipv6hdr *ip6 = data + ETH_HLEN;

		if ((void *)(ip6 + 1) > data_end)
			return -1;
		__builtin_memcpy(&ip6->saddr, &pkt->dst, sizeof(pkt->dst));
		__builtin_memcpy(&ip6->daddr, &pkt->src, sizeof(pkt->src));
	} else {
		struct iphdr *ip = data + ETH_HLEN;

		if ((void *)(ip + 1) > data_end)
			return -1;
		ip->saddr = pkt->dst.words[3];
		ip->daddr = pkt->src.words[3];
	}
	return 0;
}

static __always_inline int write_failure(struct __sk_buff *skb, const struct dns_pkt *pkt, const struct dns_failure *to,
                                         __u32 diff)
{
	void *data = (void *)(long)skb->data;
	void *data_end = (void *)(long)skb->data_end;
	struct udphdr *udp = data + (pkt->l4_off & 0x3f);
	struct dnshdr *hdr = data + (pkt->dns_off & 0x7f);

	if ((void *)(udp + 1) > data_end || (void *)(hdr + 1) > data_end || swap_ends(data, data_end, pkt))
		return -1;
	/* As in rewrite_tc(). */
	if (!udp->check)
		bpf_csum_update(skb, diff);
	hdr->flags = to->flags;
	if (to->opt_end_off) {
		struct dns_opt_end *end = data + (to->opt_end_off & 0x1ff);

		if ((void *)(end + 1) > data_end)
			return -1;
		end->code = to->option_code;
		end->length = to->option_length;
	}
	return 0;
}

/*
 * answer_failure - make a query its own SERVFAIL reply
 * @local: it leaves through lo, and so comes back in on it: the stack delivers the packet to the socket that it now is
 *         for. Another is sent back to where it came from.
 *
 * Invalidates all packet pointers. Return: a TC verdict, with *reason set. No other program gets the packet.
 */
static __always_inline int answer_failure(struct __sk_buff *skb, const struct dns_pkt *pkt, bool local,
                                          enum dns_reason *reason)
{
	__u32 csum_off = (pkt->l4_off & 0x3f) + __builtin_offsetof(struct udphdr, check);
	struct dns_failure to = {};
	__u32 diff = 0;

	if (forget_sender(skb) || plan_failure((void *)(long)skb->data, (void *)(long)skb->data_end, pkt, &to, &diff) ||
	    bpf_l4_csum_replace(skb, csum_off, 0, diff, L4_CSUM_FLAGS) || write_failure(skb, pkt, &to, diff)) {
		*reason = DNS_REASON_error_rewrite;
		return TC_ACT_SHOT;
	}
	*reason = DNS_REASON_answered_failure;
	return local ? TC_ACT_OK : bpf_redirect_neigh(reply_ifindex(skb->ifindex), NULL, 0, 0);
}

#endif
