/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_STEER_H
#define DNSBPF_STEER_H

#include "common.h"
#include "config.h"
#include "dns.h"
#include "flows.h"
#include "maps.h"
#include "metrics.h"
#include "pkt.h"
#include "types.h"
#include "zones.h"

static __always_inline bool addr_equal(const __u8 *a, const union addr *b)
{
	const union addr *other = (const union addr *)a;

	return other->halves[0] == b->halves[0] && other->halves[1] == b->halves[1];
}

/* What a packet is to become. Decided without touching the packet; applied by rewrite_tc.h. */
struct dns_rewrite {
	union addr src;
	union addr dst;
	__u16 sport;
	__u16 dport;
	__be16 opt_size_be;
	__u16 opt_size_off; /* 0: leave EDNS alone */
	__u32 ifindex;
	__u8 local; /* 1: to the ingress of ifindex, 0: out of it */
};

/*
 * The endpoint whose turn it is. The first one is drawn by a hash over client and question, so that all endpoints get
 * as many; the port is left out, since a client may ask again from another one.
 */
static __always_inline struct dns_backend *pick_backend(const struct dns_scratch *scratch, const struct dns_pkt *pkt)
{
	__u32 count = pkt->v6 ? scratch->backends6 : scratch->backends4;
	struct dns_backend_key key = { .group = scratch->group };
	__u64 hash = hash_word(hash_word(scratch->question_hash, pkt->src.halves[0]), pkt->src.halves[1]);
	__u32 element = hash & (DNS_TURNS - 1);
	__u32 *turn = bpf_map_lookup_elem(&dns_turns, &element);

	if (count == 0 || !turn)
		return NULL;
	key.index = ((__u32)(hash >> 32) / 2 + (*turn)++ % count) % count;
	if (pkt->v6)
		key.index |= DNS_BACKEND_V6;
	return bpf_map_lookup_elem(&dns_backends, &key);
}

/*
 * route_query - which group answers this query?
 * @loaded: is the question in the scratch?
 *
 * Return: a steered* reason with the scratch's group set, or passed_external.
 */
static __always_inline enum dns_reason route_query(struct __sk_buff *skb, const struct dns_pkt *pkt,
                                                   struct dns_scratch *scratch, const struct dns_config *config,
                                                   enum dns_scope scope, bool loaded)
{
	bool in_zone = may_be_in_zone(scratch, config);
	bool dead = !in_zone && needs_fallback(config, scope);

	if (!in_zone && !dead)
		return DNS_REASON_passed_external;
	if (!loaded)
		load_question(skb, pkt->dns_off + sizeof(struct dnshdr));
	if (in_zone && find_zone())
		return DNS_REASON_steered;
	if ((dead || needs_fallback(config, scope)) && find_fallback(scratch))
		return DNS_REASON_steered_fallback;
	return DNS_REASON_passed_external;
}

/* Where the reply to a query that entered on this interface leaves. */
static __always_inline __u32 reply_ifindex(__u32 ifindex)
{
	__u32 *via = bpf_map_lookup_elem(&dns_reply_via, &ifindex);

	return via ? *via : ifindex;
}

/*
 * decide_query - how does this query get to an endpoint of its group?
 *
 * Return: DNS_OK with the rewrite set and the flow open, or why the query is passed.
 */
static __always_inline enum dns_reason decide_query(const struct dns_pkt *pkt, struct dns_scratch *scratch,
                                                    const struct dns_config *config, enum dns_scope scope,
                                                    __u32 ifindex, bool local, struct dns_rewrite *to)
{
	struct dns_backend *backend = pick_backend(scratch, pkt);
	struct dns_flow *flow;
	__u16 nat_port;

	if (!backend)
		return DNS_REASON_passed_no_backend;
	flow = flow_claim(config, scratch, pkt, local, &nat_port);
	if (!flow)
		return DNS_REASON_passed_no_flow_slot;
	flow->timed_ns = nat_port % DNS_LATENCY_SAMPLE ? 0 : bpf_ktime_get_ns();
	flow->question_hash = scratch->question_hash;
	__builtin_memcpy(flow->endpoint, backend->addr, sizeof(flow->endpoint));
	__builtin_memcpy(flow->client, &pkt->src, sizeof(flow->client));
	__builtin_memcpy(flow->listener, &pkt->dst, sizeof(flow->listener));
	flow->endpoint_port = backend->port;
	flow->client_port = pkt->sport;
	flow->listener_port = pkt->dport;
	flow->id = pkt->id;
	flow->ifindex = local ? ifindex : reply_ifindex(ifindex);
	flow->scope = scope;
	flow->local = local;
	flow->out_ifindex = backend->out_ifindex;
	flow->generation = config->generation;
	flow->asked = pkt->asked;

	__builtin_memcpy(&to->src, backend->nat_addr, sizeof(to->src));
	__builtin_memcpy(&to->dst, backend->addr, sizeof(to->dst));
	to->sport = nat_port;
	to->dport = backend->port;
	to->ifindex = backend->out_ifindex;
	if (pkt->opt_size_off && bpf_ntohs(pkt->opt_size_be) > cfg_edns_size_max) {
		to->opt_size_off = pkt->opt_size_off;
		to->opt_size_be = bpf_htons(cfg_edns_size_max);
	}
	return DNS_OK;
}

/*
 * decide_reply - does this reply of an endpoint answer a query in flight, and whose?
 *
 * Return: DNS_REASON_replied with the rewrite set and the flow closed, a reply_* reason, or DNS_NOT_OURS.
 */
static __always_inline enum dns_reason decide_reply(struct __sk_buff *skb, struct dns_pkt *pkt,
                                                    struct dns_scratch *scratch, const struct dns_config *config,
                                                    enum dns_scope *scope, __u32 *asked, __u32 *generation,
                                                    struct dns_rewrite *to)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	struct dnshdr *hdr = data + (pkt->dns_off & 0x7f);
	__u32 length = pkt->dns_end - pkt->dns_off;
	struct dns_flow *flow;
	__u64 started, timed;

	if ((void *)(hdr + 1) > data_end || length < sizeof(*hdr))
		return DNS_NOT_OURS;
	flow = flow_slot(config, pkt->dport);
	if (!flow)
		return DNS_NOT_OURS;
	started = flow->started_ns;
	if (!started || flow->id != bpf_ntohs(hdr->id) || flow->endpoint_port != pkt->sport ||
	    flow->out_ifindex != skb->ifindex || !addr_equal(flow->endpoint, &pkt->src))
		return DNS_NOT_OURS;

	*scope = flow->scope;
	if (flow_expired(config, started, bpf_ktime_get_coarse_ns())) {
		flow_release(flow, started);
		return DNS_REASON_reply_late;
	}
	if (!(hdr->flags & DNS_FLAG_QR_BE) || hdr->qdcount != bpf_htons(1))
		return DNS_REASON_reply_malformed;
	if (parse_question(data, data_end, pkt->dns_off + sizeof(*hdr), length - sizeof(*hdr), scratch) != DNS_OK)
		return DNS_REASON_reply_malformed;
	load_question(skb, pkt->dns_off + sizeof(*hdr));
	if (scratch->question_hash != flow->question_hash)
		return DNS_REASON_reply_question;

	__builtin_memcpy(&to->src, flow->listener, sizeof(to->src));
	__builtin_memcpy(&to->dst, flow->client, sizeof(to->dst));
	to->sport = flow->listener_port;
	to->dport = flow->client_port;
	to->ifindex = flow->ifindex;
	to->local = flow->local;
	*asked = flow->asked;
	*generation = flow->generation;
	timed = flow->timed_ns;
	if (!flow_release(flow, started))
		return DNS_NOT_OURS;
	if (timed)
		count_latency(*scope, bpf_ktime_get_ns() - timed);
	return DNS_REASON_replied;
}

#endif
