/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_FLOWS_H
#define DNSBPF_FLOWS_H

#include "common.h"
#include "maps.h"
#include "pkt.h"
#include "types.h"

/* Draws before a query is passed: with half of all ports taken for one endpoint and ID, one query in 16 fails. */
#define DNS_NAT_PORT_DRAWS 4

static __always_inline __u16 draw_nat_port(const struct dns_config *config)
{
	/* Scaled, not a remainder: every port is equally likely, and no division. */
	__u32 draw = bpf_get_prandom_u32() & 0xffff;

	return config->nat_port_min + (draw * config->nat_port_count >> 16);
}

/*
 * flow_open - remember a query on its way to an endpoint, under a NAT port that is free for (endpoint, ID)
 *
 * Return: 0 with key->nat_port set, or -1 if no draw was free.
 */
static __always_inline int flow_open(const struct dns_config *config, struct dns_flow_key *key,
				     const struct dns_flow *flow)
{
	__u32 i;

	for (i = 0; i < DNS_NAT_PORT_DRAWS; i++) {
		key->nat_port = draw_nat_port(config);
		if (bpf_map_update_elem(&dns_flows, key, flow, BPF_NOEXIST) == 0)
			return 0;
	}
	return -1;
}

#endif
