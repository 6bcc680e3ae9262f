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

static __always_inline struct dns_backend *pick_backend(const struct dns_scratch *scratch, bool v6)
{
	__u32 count = v6 ? scratch->backends6 : scratch->backends4;
	struct dns_backend_key key = {.group = scratch->group};

	if (count == 0)
		return NULL;
	key.index = (bpf_get_prandom_u32() >> 16) * count >> 16;
	if (v6)
		key.index |= DNS_BACKEND_V6;
	return bpf_map_lookup_elem(&dns_backends, &key);
}

/*
 * decide_query - where does this query for a name in a zone go?
 *
 * Return: DNS_REASON_steered with the rewrite set and the flow open, or why the query is passed.
 */
static __always_inline enum dns_reason decide_query(const struct dns_pkt *pkt, const struct dns_scratch *scratch,
						    const struct dns_config *config, enum dns_scope scope,
						    __u32 ifindex, bool local, struct dns_rewrite *to)
{
	struct dns_backend *backend = pick_backend(scratch, pkt->v6);
	struct dns_flow_key key = {.id = pkt->id};
	struct dns_flow flow = {
		.question_hash = hash_question(scratch, config->question_seed),
		.client_port = pkt->sport,
		.listener_port = pkt->dport,
		.ifindex = ifindex,
		.scope = scope,
		.local = local,
	};

	if (!backend)
		return DNS_REASON_passed_no_backend;
	__builtin_memcpy(&key.endpoint, backend->addr, sizeof(key.endpoint));
	key.endpoint_port = backend->port;
	flow.started_ns = bpf_ktime_get_ns();
	__builtin_memcpy(&flow.client, &pkt->src, sizeof(flow.client));
	__builtin_memcpy(&flow.listener, &pkt->dst, sizeof(flow.listener));
	if (flow_open(config, &key, &flow))
		return DNS_REASON_passed_no_flow_slot;

	__builtin_memcpy(&to->src, backend->nat_addr, sizeof(to->src));
	__builtin_memcpy(&to->dst, backend->addr, sizeof(to->dst));
	to->sport = key.nat_port;
	to->dport = backend->port;
	to->ifindex = backend->out_ifindex;
	to->local = 0;
	to->opt_size_off = 0;
	to->opt_size_be = 0;
	if (pkt->opt_size_off && bpf_ntohs(pkt->opt_size_be) > cfg_edns_size_max) {
		to->opt_size_off = pkt->opt_size_off;
		to->opt_size_be = bpf_htons(cfg_edns_size_max);
	}
	return DNS_REASON_steered;
}

/*
 * decide_reply - does this reply of an endpoint answer a query in flight, and whose?
 *
 * Return: DNS_REASON_replied with the rewrite set and the flow closed, a reply_* reason, or DNS_NOT_OURS.
 */
static __always_inline enum dns_reason decide_reply(void *data, void *data_end, struct dns_pkt *pkt,
						    struct dns_scratch *scratch, const struct dns_config *config,
						    enum dns_scope *scope, struct dns_rewrite *to)
{
	struct dnshdr *hdr = data + (pkt->dns_off & 0x7f);
	struct dns_flow_key key = {
		.endpoint_port = pkt->sport,
		.nat_port = pkt->dport,
	};
	__u32 length = pkt->dns_end - pkt->dns_off;
	struct dns_flow *flow;
	__u64 age;

	if ((void *)(hdr + 1) > data_end || length < sizeof(*hdr))
		return DNS_NOT_OURS;
	__builtin_memcpy(&key.endpoint, &pkt->src, sizeof(key.endpoint));
	key.id = bpf_ntohs(hdr->id);
	flow = bpf_map_lookup_elem(&dns_flows, &key);
	if (!flow)
		return DNS_NOT_OURS;

	*scope = flow->scope;
	age = bpf_ktime_get_ns() - flow->started_ns;
	if (age > config->flow_timeout_ns) {
		bpf_map_delete_elem(&dns_flows, &key);
		return DNS_REASON_reply_late;
	}
	if (!(hdr->flags & DNS_FLAG_QR_BE) || hdr->qdcount != bpf_htons(1))
		return DNS_REASON_reply_malformed;
	length -= sizeof(*hdr);
	load_message(data, data_end, pkt->dns_off + sizeof(*hdr), length, scratch);
	if (parse_question(length) != DNS_OK)
		return DNS_REASON_reply_malformed;
	if (hash_question(scratch, config->question_seed) != flow->question_hash)
		return DNS_REASON_reply_question;

	__builtin_memcpy(&to->src, flow->listener, sizeof(to->src));
	__builtin_memcpy(&to->dst, flow->client, sizeof(to->dst));
	to->sport = flow->listener_port;
	to->dport = flow->client_port;
	to->ifindex = flow->ifindex;
	to->local = flow->local;
	to->opt_size_off = 0;
	to->opt_size_be = 0;
	/* Only one of two copies of a reply finds the flow to delete, so only one is delivered. */
	if (bpf_map_delete_elem(&dns_flows, &key))
		return DNS_NOT_OURS;
	count_latency(*scope, age);
	return DNS_REASON_replied;
}

#endif
