/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_FLOWS_H
#define DNSBPF_FLOWS_H

#include "common.h"
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

/*
 * flow_claim - draw a NAT port of which the slot is free
 *
 * Return: the slot, claimed, with *nat_port set; NULL if no draw was free.
 */
static __always_inline struct dns_flow *flow_claim(const struct dns_config *config, __u16 *nat_port)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	__u32 i;

	for (i = 0; i < DNS_NAT_PORT_DRAWS; i++) {
		/* Scaled, not a remainder: every port is equally likely, and no division. */
		__u32 draw = (bpf_get_prandom_u32() >> 16) * config->nat_port_count >> 16;
		struct dns_flow *flow;
		__u64 started;

		*nat_port = config->nat_port_min + draw;
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
