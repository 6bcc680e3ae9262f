/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_FLOWS_H
#define DNSBPF_FLOWS_H

#include "common.h"
#include "dns.h"
#include "maps.h"
#include "pkt.h"
#include "types.h"

/* Draws before a query is passed: with half of all slots taken, one query in 256 fails. */
#define DNS_NAT_PORT_DRAWS 8

/* The slot of a NAT port, or NULL for a port that is not drawn. */
static __always_inline struct dns_flow *flow_slot(const struct dns_config *config, __u16 nat_port)
{
	__u32 slot = (__u16)(nat_port - config->nat_port_min);

	return slot < config->nat_port_count ? bpf_map_lookup_elem(&dns_flows, &slot) : NULL;
}

/* Signed: another CPU may have claimed the slot after a tick of the clock that this one has not seen. */
static __always_inline bool flow_expired(const struct dns_config *config, __u64 started_ns, __u64 now_ns)
{
	return (__s64)(now_ns - started_ns) > (__s64)config->flow_timeout_ns;
}

static __always_inline __u64 rotate(__u64 word, __u32 bits)
{
	return word << bits | word >> (64 - bits);
}

static __always_inline void sip_round(__u64 v[4])
{
	v[0] += v[1];
	v[2] += v[3];
	v[1] = rotate(v[1], 13) ^ v[0];
	v[3] = rotate(v[3], 16) ^ v[2];
	v[0] = rotate(v[0], 32) + v[3];
	v[2] += v[1];
	v[3] = rotate(v[3], 21) ^ v[0];
	v[1] = rotate(v[1], 17) ^ v[2];
	v[2] = rotate(v[2], 32);
}

/*
 * SipHash-1-3 (Aumasson and Bernstein) of one word: nobody who lacks the key tells its next results from those before.
 * bpf_get_prandom_u32() is linear, and some draws of it give away all others.
 */
static __always_inline __u64 sip_hash(const __u64 key[2], __u64 word)
{
	__u64 v[4] = {
		key[0] ^ 0x736f6d6570736575ULL,
		key[1] ^ 0x646f72616e646f6dULL,
		key[0] ^ 0x6c7967656e657261ULL,
		key[1] ^ 0x7465646279746573ULL ^ word,
	};
	const __u64 length = 8ULL << 56;

	sip_round(v);
	v[0] ^= word;
	v[3] ^= length;
	sip_round(v);
	v[0] ^= length;
	v[2] ^= 0xff;
	sip_round(v);
	sip_round(v);
	sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* A number below limit. Scaled, not a remainder: every one is equally likely, and no division. */
static __always_inline __u32 scale(__u16 random, __u32 limit)
{
	return random * limit >> 16;
}

/* Which of so many places is a source's. Of IPv6 the first half of it counts: to have a /64 is to have one address. */
static __always_inline __u32 place_of(const struct dns_config *config, const struct dns_pkt *pkt, __u32 places)
{
	__u64 source = pkt->v6 ? pkt->src.halves[0] : pkt->src.halves[1];

	return scale(hash_word(config->question_seed, source) >> 48, places);
}

/*
 * flow_claim - draw a NAT port of which the slot is free
 *
 * Nobody can have all slots: a quarter is for this host alone, which draws from the others', too, and each other source
 * has a quarter of the rest, where its address says. So many must flood to leave none.
 *
 * Return: the slot, claimed, with *nat_port set; NULL if no draw was free.
 */
static __always_inline struct dns_flow *flow_claim(const struct dns_config *config, struct dns_scratch *scratch,
                                                   const struct dns_pkt *pkt, bool local, __u16 *nat_port)
{
	__u32 own = config->nat_port_count / 4;
	__u32 share = (config->nat_port_count - own) / 4;
	__u32 first = local ? 0 : own + place_of(config, pkt, config->nat_port_count - own - share + 1);
	__u64 now = bpf_ktime_get_coarse_ns();
	__u64 random = 0;
	__u32 i;

	for (i = 0; i < DNS_NAT_PORT_DRAWS; i++) {
		struct dns_flow *flow;
		__u64 started;

		/* One result is good for four draws. */
		if (i % 4 == 0)
			random = sip_hash(config->draw_key, scratch->draws++ << 16 | bpf_get_smp_processor_id());
		if (local)
			share = i < DNS_NAT_PORT_DRAWS / 2 ? config->nat_port_count : own;
		*nat_port = config->nat_port_min + first + scale(random, share);
		random >>= 16;
		flow = flow_slot(config, *nat_port);
		if (!flow)
			return NULL;
		started = flow->started_ns;
		if (started && !flow_expired(config, started, now))
			continue;
		if (__sync_val_compare_and_swap(&flow->started_ns, started, now) == started)
			return flow;
	}
	return NULL;
}

/* Give a slot back. Return: whether it was still this query's: of two copies of a reply one gets false. */
static __always_inline bool flow_release(struct dns_flow *flow, __u64 started_ns)
{
	return __sync_val_compare_and_swap(&flow->started_ns, started_ns, 0) == started_ns;
}

#endif
